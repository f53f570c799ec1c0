"""Reading slices of Hugging Face directories, writing sharded ones, and what is said of directories that do not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conversion.files.companions import check_tokenizer, copy_companions
from conversion.files.hf_checkpoint import (
    FileWriter,
    HFCheckpoint,
    TensorSpec,
    plan_files,
    write_index,
)
from conversion.files.safetensors_headers import HFCheckpointError
from conversion.model.architecture import Architecture
from conversion.model.mapping import WeightMapError, shard, to_mcore
from conversion.model.weight_map import WeightMap
from tests.conversion.conftest import assert_same_bits, read_all


@pytest.fixture
def broken(model_directory, tmp_path: Path):
    """``broken(change)``: a copy of the qwen2 model in one file, its tensors changed by ``change``."""

    def make(change) -> tuple[HFCheckpoint, WeightMap]:
        source = model_directory("qwen2")
        tensors = read_all(source)
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        return HFCheckpoint(tmp_path), WeightMap(Architecture.from_pretrained(source))

    return make


@pytest.mark.parametrize("tp", [1, 2])
def test_a_shard_is_read_without_the_rest(model_directory, family: str, tp: int) -> None:
    directory = model_directory(family)
    checkpoint = HFCheckpoint(directory)
    tensors = read_all(directory)
    architecture = Architecture.from_pretrained(directory)
    for mapping in WeightMap(architecture, architecture.vocab_size + 3):
        full = to_mcore(mapping, [tensors[name] for name in mapping.hf_names])
        for rank in range(tp):
            assert torch.equal(checkpoint.read_shard(mapping, tp, rank), shard(mapping, full, tp, rank))


def test_written_files_are_what_safetensors_reads(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5).bfloat16(),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
        "strided": torch.randn(4, 6).t(),
        "fp8": torch.randn(2, 2).to(torch.float8_e4m3fn),
    }
    specs = [TensorSpec(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]
    # Two writers of one file, the second one first; a tensor in two blocks.
    for start, stop in ((2, 5), (0, 2)):
        with FileWriter(tmp_path / "model.safetensors", specs, start, stop) as writer:
            for name, tensor in list(tensors.items())[start:stop]:
                writer.write(name, tensor.split(2) if tensor.dim() == 2 else [tensor])
    assert_same_bits(load_file(tmp_path / "model.safetensors"), {k: v.contiguous() for k, v in tensors.items()})
    checkpoint = HFCheckpoint(tmp_path)
    assert_same_bits({name: checkpoint.read(name) for name in tensors}, {k: v.contiguous() for k, v in tensors.items()})


def test_write_refuses_what_was_not_announced(tmp_path: Path) -> None:
    for name, tensor in (("a", torch.zeros(3)), ("b", torch.zeros(2)), ("a", torch.zeros(4, dtype=torch.bfloat16))):
        with (
            FileWriter(tmp_path / "x", [TensorSpec("a", (2,), torch.float32)]) as writer,
            pytest.raises(HFCheckpointError, match="expected TensorSpec.name='a'"),
        ):
            writer.write(name, [tensor])


def test_files_are_filled_in_order_and_parameters_stay_whole(tmp_path: Path) -> None:
    groups = [[TensorSpec(f"g{g}.{i}", (10,), torch.float32) for i in range(3)] for g in range(5)]  # 120 bytes each
    files = plan_files(groups, 250)
    assert [name for name, _ in files] == [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [len(specs) for _, specs in files] == [6, 6, 3]
    write_index(tmp_path, files)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 600
    assert index["weight_map"]["g4.0"] == "model-00003-of-00003.safetensors"
    assert plan_files(groups, 10**6)[0][0] == "model.safetensors"
    assert len(plan_files(groups, 1)) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"lacks tensor model\.norm\.weight"),
        (lambda t: [t.pop(n) for n in list(t) if "k_proj" in n], r"lacks tensors .*k_proj.* and 11 more"),
        (lambda t: t.update({"model.layers.9.x": torch.zeros(1)}), r"holds tensor model\.layers\.9\.x, which"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(101, 32).bfloat16()}), "lm_head.weight differs"),
    ],
)
def test_missing_and_extra_tensors_are_named(broken, change, message: str) -> None:
    checkpoint, weight_map = broken(change)
    with pytest.raises(HFCheckpointError, match=message):
        checkpoint.check(weight_map)


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "num_mtp_modules"])
def test_layers_for_multi_token_prediction_are_known_as_such(broken, key: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({key: 1}))
    checkpoint, weight_map = broken(lambda t: None)
    checkpoint.check(weight_map)  # announced, as MiniMax-M2 does, and not there
    assert checkpoint.predictors(8) == [] and checkpoint.predictors_key == key
    name = "model.layers.8.eh_proj.weight"
    checkpoint, weight_map = broken(lambda t: t.update({name: torch.zeros(1)}))
    checkpoint.check(weight_map)
    assert checkpoint.predictors(8) == [name]
    checkpoint, weight_map = broken(lambda t: t.update({"model.layers.9.eh_proj.weight": torch.zeros(1)}))
    with pytest.raises(HFCheckpointError, match=r"holds tensor model\.layers\.9\.eh_proj\.weight, which a"):
        checkpoint.check(weight_map)


@pytest.mark.parametrize("name", ["mtp.layers.0.mlp.gate.weight", "model.mtp_layers.0.input_proj.weight"])
def test_a_whole_model_for_multi_token_prediction_is_known_as_such(broken, name: str) -> None:
    checkpoint, weight_map = broken(lambda t: t.update({name: torch.zeros(1)}))
    checkpoint.check(weight_map)
    assert checkpoint.predictors(8) == [name] and checkpoint.predictors_key is None


def test_shapes_and_dtypes_are_checked_without_reading(broken) -> None:
    checkpoint, weight_map = broken(lambda t: t.update({"model.norm.weight": torch.zeros(31)}))
    with pytest.raises(WeightMapError, match=r"model\.norm\.weight in .* has shape \(31,\), but .* implies \(32,\)"):
        checkpoint.check(weight_map)


def test_redundant_tensors_of_old_checkpoints_are_accepted(broken) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    checkpoint, weight_map = broken(add)
    checkpoint.check(weight_map)


def test_damaged_directories(model_directory, tmp_path: Path) -> None:
    with pytest.raises(HFCheckpointError, match="has neither model.safetensors.index.json nor model.safetensors"):
        HFCheckpoint(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(model_directory("llama"), copy)
    first = sorted(copy.glob("*.safetensors"))[0]
    whole = first.read_bytes()
    first.write_bytes(whole[:-10])
    with pytest.raises(HFCheckpointError, match=f"{first.name}: tensor .* is cut short"):
        HFCheckpoint(copy)
    first.write_bytes(b"not a safetensors file")
    with pytest.raises(HFCheckpointError, match=f"{first.name} is not a safetensors file"):
        HFCheckpoint(copy)
    first.unlink()
    with pytest.raises(HFCheckpointError, match=f"{first.name} is missing"):
        HFCheckpoint(copy)
    first.write_bytes(whole)
    index = copy / "model.safetensors.index.json"
    text = json.loads(index.read_text())
    text["weight_map"]["model.extra.weight"] = first.name
    index.write_text(json.dumps(text))
    with pytest.raises(HFCheckpointError, match=r"places tensor model\.extra\.weight in .*, which lacks it"):
        HFCheckpoint(copy)
    index.write_text("{}")
    with pytest.raises(HFCheckpointError, match="is not a safetensors index"):
        HFCheckpoint(copy)


def header(content: object) -> bytes:
    text = json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header([1, 2]), "is not a safetensors file: its header holds a list, where names of tensors are expected"),
        (header({"w": {"dtype": "F32", "shape": [1]}}), "the header's entry of tensor w lacks .*data_offsets: fetch"),
        (header({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}), "the header's entry of tensor w lacks"),
        (header({"w": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}), "the header's entry of tensor w"),
        (header({"w": [0, 4]}), "the header's entry of tensor w lacks"),
        (header("w")[:12], "its header would be 3 bytes long|is not a safetensors file: .+"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
            "is a Git LFS pointer .*`git lfs pull`",
        ),
        (b"\n<!DOCTYPE html><html><body>403</body></html>", "is a web page.*fetch the file again"),
        (b"", "is not a safetensors file: it is empty: fetch the file again"),
        (b"PK\x03\x04" * 9, "is not a safetensors file: its header would be"),
    ],
)
def test_what_is_no_safetensors_file_is_told(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(HFCheckpointError, match=message) as error:
        HFCheckpoint(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"weight_map": {"w": 5}}', "places tensor w in 5, which is no file's name"),
        ('{"weight_map": [1]}', "is not a safetensors index"),
        ("[]", "is not a safetensors index"),
        ("version https://git-lfs.github.com/spec/v1\n", "is not a safetensors index: it is a Git LFS pointer"),
    ],
)
def test_indices_that_are_none(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(HFCheckpointError, match=message):
        HFCheckpoint(tmp_path)


def test_tokenizer_and_companions(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    with pytest.raises(HFCheckpointError, match=r"has no tokenizer \(tokenizer.json, or"):
        check_tokenizer(source)
    kept = ["chat_template.jinja", "config.json", "merges.txt", "vocab.json"]
    for name in (*kept, "model.safetensors", "pytorch_model.bin", ".gitattributes"):
        (source / name).write_text(name)
    check_tokenizer(source)
    assert copy_companions(source, target) == kept
    assert sorted(path.name for path in target.iterdir()) == kept
