"""hf_to_mcore and mcore_to_hf: bit-exact for every family, atomic, and clear about what does not fit."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import conversion
from conversion import hf_to_mcore, mcore_to_hf
from conversion.files import checksums, spans
from conversion.files.checksums import DamagedError, find_faults, has_checksums, read_marker
from conversion.files.companions import copy_companions
from conversion.files.dist_checkpoint import DistCheckpoint, DistCheckpointError
from conversion.files.safetensors_headers import HFCheckpointError
from conversion.files.workers import even_ranges
from conversion.hf_to_mcore import TargetLayout, convert
from conversion.mcore_to_hf import export
from conversion.model.architecture import Architecture
from conversion.model.layout import LayoutError
from conversion.model.mapping import to_mcore
from conversion.model.weight_map import WeightMap, checkpoint_place
from megatron_retool import interruption
from tests.conversion.conftest import assert_same_bits, flip, read_all

SCRIPTS = Path(conversion.__file__).parent


def run(script: str, *arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", [TargetLayout(), TargetLayout(tp=2, pp=4, vpp=2)], ids=["whole", "tp2_pp4_vpp2"])
def test_round_trip_is_bit_exact(model_directory, family: str, layout: TargetLayout, dtype, tmp_path: Path) -> None:
    source = model_directory(family, dtype)
    if family == "qwen3_moe":
        layout = TargetLayout(layout.tp, layout.pp, layout.vpp, ep=4 if layout.pp > 1 else 2)
    report = convert(source, tmp_path / "mcore", layout=layout, workers=1)
    export(tmp_path / "mcore", tmp_path / "hf", workers=1, max_file_bytes=40_000)
    expected = read_all(source)
    assert report["tensors"] == len(expected)
    assert report["bytes"] == sum(tensor.nbytes for tensor in expected.values())
    assert_same_bits(read_all(tmp_path / "hf"), expected)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("tp", [1, 2])
def test_the_checkpoint_holds_the_weight_map(model_directory, family: str, tp: int, tmp_path: Path) -> None:
    source = model_directory(family)
    convert(source, tmp_path / "mcore", layout=TargetLayout(tp=tp), workers=1)
    checkpoint = DistCheckpoint(tmp_path / "mcore")
    architecture, tensors = Architecture.from_pretrained(source), read_all(source)
    keys = set()
    for mapping in WeightMap(architecture):
        place = checkpoint_place(mapping, architecture)
        full = to_mcore(mapping, [tensors[name] for name in mapping.hf_names])
        assert torch.equal(checkpoint.read(place, mapping.mcore_shape), full)
        keys.add(place.key)
    assert keys == checkpoint.tensors.keys()


@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.float32), ("qwen2", None), ("qwen3_moe", None)], ids=str)
def test_what_is_larger_than_a_block_arrives_whole(
    model_directory, family: str, dtype: torch.dtype | None, tmp_path: Path, monkeypatch
) -> None:
    """Blocks of 3 rows, 2 blocks fetched ahead, three workers, a file's parts by several of them; TP 2 there and 1."""
    monkeypatch.setattr(spans, "BLOCK_BYTES", 3 * 32 * 2)
    monkeypatch.setattr(spans, "AHEAD_BYTES", 6 * 32 * 2)
    source, shape = model_directory(family), TargetLayout(tp=2)
    convert(source, tmp_path / "mcore", layout=shape, dtype=dtype, workers=3)
    export(tmp_path / "mcore", tmp_path / "hf", dtype=torch.bfloat16, workers=3)
    assert_same_bits(read_all(tmp_path / "hf"), read_all(source))
    (record,) = (r for name, r in (read_marker(tmp_path / "hf") or {}).items() if name.endswith("safetensors"))
    assert len(record.parts) == 3 and find_faults(tmp_path / "hf") == []
    convert(tmp_path / "hf", tmp_path / "again", layout=TargetLayout(tp=1), workers=2)
    export(tmp_path / "again", tmp_path / "back", workers=1)
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (
        tmp_path / "hf" / "model.safetensors"
    ).read_bytes()


def test_each_rank_finds_its_parts_in_its_own_file(model_directory, tmp_path: Path) -> None:
    """TP2 x PP2: four files; a tensor-parallel matrix has one chunk for each TP rank, in that rank's file."""
    convert(model_directory("qwen3"), tmp_path / "mcore", layout=TargetLayout(tp=2, pp=2), workers=1)
    assert sorted(path.name for path in (tmp_path / "mcore").glob("*.distcp")) == [f"__{r}_0.distcp" for r in range(4)]
    checkpoint = DistCheckpoint(tmp_path / "mcore")
    files = {
        (tuple(index.offset), record.relative_path)
        for index, record in checkpoint._storage.items()
        if index.fqn == "decoder.layers.self_attention.linear_proj.weight" and index.offset[0] in (0, 7)
    }
    assert files == {
        ((0, 0, 0), "__0_0.distcp"),
        ((0, 0, 32), "__1_0.distcp"),
        ((7, 0, 0), "__2_0.distcp"),
        ((7, 0, 32), "__3_0.distcp"),
    }


def test_several_processes_write_the_same(model_directory, tmp_path: Path) -> None:
    source = model_directory("qwen3_moe")
    seen: list[tuple[int, int]] = []
    report = convert(source, tmp_path / "mcore", workers=2, on_progress=lambda done, all_: seen.append((done, all_)))
    assert len(list((tmp_path / "mcore").glob("*.distcp"))) == 2
    assert seen[-1] == (report["bytes"], report["bytes"])
    export(tmp_path / "mcore", tmp_path / "hf", workers=2, max_file_bytes=100_000)
    assert_same_bits(read_all(tmp_path / "hf"), read_all(source))


def test_an_error_in_a_worker_leaves_nothing(model_directory, tmp_path: Path, monkeypatch) -> None:
    source = model_directory("llama")
    monkeypatch.setattr(hf_to_mcore, "_run_job", _fail)
    with pytest.raises(OSError, match="disk on fire"):
        convert(source, tmp_path / "mcore", workers=2)
    assert list(tmp_path.iterdir()) == []


def _fail(*arguments):
    raise OSError("disk on fire")


def test_casting(model_directory, tmp_path: Path) -> None:
    source = model_directory("mistral", torch.float32)
    convert(source, tmp_path / "mcore", dtype=torch.bfloat16, workers=1)
    export(tmp_path / "mcore", tmp_path / "hf", workers=1)
    expected = {name: tensor.bfloat16() for name, tensor in read_all(source).items()}
    assert_same_bits(read_all(tmp_path / "hf"), expected)
    export(tmp_path / "mcore", tmp_path / "half", dtype=torch.float16, workers=1)
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert config["dtype"] == "float16"
    assert {tensor.dtype for tensor in read_all(tmp_path / "half").values()} == {torch.float16}


def test_transformers_loads_the_export(model_directory, family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    source = model_directory(family, torch.float32)
    convert(source, tmp_path / "mcore", workers=1)
    export(tmp_path / "mcore", tmp_path / "hf", workers=1)
    ids = torch.randint(0, 101, (2, 12))
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(d)(ids).logits for d in (source, tmp_path / "hf")]
    assert torch.equal(logits[0], logits[1])
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "hf")("w7 w8")["input_ids"] == [7, 8]


def test_layers_of_different_dtypes_need_a_choice(model_directory, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    tensors = read_all(model_directory("llama"))
    copy_companions(model_directory("llama"), mixed)
    tensors["model.layers.5.mlp.down_proj.weight"] = tensors["model.layers.5.mlp.down_proj.weight"].float()
    save_file(tensors, mixed / "model.safetensors")
    with pytest.raises(HFCheckpointError, match=r"layers\.5\.mlp\.down_proj\.weight in .* has dtype torch\.float32"):
        convert(mixed, tmp_path / "mcore", workers=1)
    convert(mixed, tmp_path / "mcore", workers=1, dtype=torch.float32)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_numbers_are_refused_by_name(model_directory, value: float, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    copy_companions(model_directory("llama"), source)
    tensors = read_all(model_directory("llama"))
    names = ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    for name in names:
        tensors[name] = tensors[name].clone()
        tensors[name][-1] = value
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(HFCheckpointError, match=f"NaN or infinite values in tensors {names[0]}, {names[1]}:"):
        convert(source, tmp_path / "mcore")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_export_of_weights_that_are_no_numbers_is_refused(model_directory, tmp_path: Path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("conversion.hf_to_mcore.is_finite", lambda block: True)
        source = tmp_path / "source"
        source.mkdir()
        copy_companions(model_directory("llama"), source)
        tensors = read_all(model_directory("llama"))
        tensors["model.norm.weight"] = tensors["model.norm.weight"] * math.nan
        save_file(tensors, source / "model.safetensors")
        convert(source, tmp_path / "mcore")
    with pytest.raises(HFCheckpointError, match="NaN or infinite values in tensor model.norm.weight:"):
        export(tmp_path / "mcore", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_cast_beyond_its_range_is_refused(model_directory, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    copy_companions(model_directory("llama"), source)
    tensors = read_all(model_directory("llama"))
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1e6
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(HFCheckpointError, match="infinite values as float16 in tensor model.norm.weight: .*--dtype"):
        convert(source, tmp_path / "mcore", dtype=torch.float16)


def test_all_chat_templates_are_carried(model_directory, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(model_directory("llama"), source)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    (source / "additional_chat_templates" / "code.py").write_text("1 / 0")
    convert(source, tmp_path / "mcore")
    export(tmp_path / "mcore", tmp_path / "hf")
    carried = tmp_path / "hf" / "additional_chat_templates"
    assert [(path.name, path.read_text()) for path in carried.iterdir()] == [("rag.jinja", "{{ messages }}")]


def test_an_existing_directory_is_kept_unless_told(model_directory, tmp_path: Path) -> None:
    target = tmp_path / "mcore"
    target.mkdir()
    (target / "precious").touch()
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        convert(model_directory("llama"), target, workers=1)
    with pytest.raises(FileExistsError, match="has no COMPLETE marker"):
        convert(model_directory("llama"), target, workers=1, overwrite=True)
    assert (target / "precious").exists()
    (target / "COMPLETE").touch()
    convert(model_directory("llama"), target, workers=1, overwrite=True)
    assert not (target / "precious").exists() and (target / "COMPLETE").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["mcore"]


def test_a_failure_keeps_what_overwrite_would_replace(model_directory, tmp_path: Path, monkeypatch) -> None:
    target = tmp_path / "mcore"
    convert(model_directory("llama"), target, workers=1)
    before = {path.name: path.read_bytes() for path in target.iterdir() if path.is_file()}
    monkeypatch.setattr(hf_to_mcore, "write_metadata", _fail)
    with pytest.raises(OSError, match="disk on fire"):
        convert(model_directory("mistral"), target, workers=1, overwrite=True)
    assert {path.name: path.read_bytes() for path in target.iterdir() if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["mcore"]


def test_too_little_room(model_directory, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))
    with pytest.raises(OSError, match=r"has 1 bytes free, and [\d.]+ KiB are going to be written"):
        convert(model_directory("llama"), tmp_path / "mcore", workers=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (TargetLayout(tp=3), "--tp: 3 parts do not divide num_attention_heads=4"),
        (TargetLayout(pp=3), "--pp: 3 parts do not divide num_hidden_layers=8"),
        (TargetLayout(pp=4, vpp=4), "--vpp: 16 parts do not divide num_hidden_layers=8"),
        (TargetLayout(ep=2), "--ep: 2 parts do not divide num_experts=1"),
    ],
)
def test_layouts_that_do_not_divide_the_model(model_directory, layout, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        convert(model_directory("llama"), tmp_path / "mcore", layout=layout)
    assert list(tmp_path.iterdir()) == []


def test_directories_that_are_no_checkpoint(model_directory, tmp_path: Path) -> None:
    with pytest.raises(DistCheckpointError, match="does not exist"):
        export(tmp_path / "nothing", tmp_path / "hf")
    with pytest.raises(DistCheckpointError, match="metadata.json is missing"):
        export(model_directory("llama"), tmp_path / "hf")
    convert(model_directory("llama"), tmp_path / "mcore", workers=1)
    (tmp_path / "mcore" / "COMPLETE").unlink()
    with pytest.raises(DistCheckpointError, match="no COMPLETE marker"):
        export(tmp_path / "mcore", tmp_path / "hf")
    (tmp_path / "mcore" / "COMPLETE").touch()
    (tmp_path / "mcore" / "hf" / "config.json").unlink()
    with pytest.raises(DistCheckpointError, match="pass --hf-config-dir"):
        export(tmp_path / "mcore", tmp_path / "hf")
    export(tmp_path / "mcore", tmp_path / "hf", hf_config_dir=model_directory("llama"), workers=1)


def test_a_checkpoint_of_another_model(model_directory, tmp_path: Path) -> None:
    convert(model_directory("llama"), tmp_path / "mcore", workers=1)
    with pytest.raises(DistCheckpointError, match=r"has no tensor decoder\.layers\.self_attention\.linear_qkv\.bias"):
        export(tmp_path / "mcore", tmp_path / "hf", hf_config_dir=model_directory("qwen2"))
    assert not (tmp_path / "hf").exists()


def test_a_truncated_file_of_the_checkpoint(model_directory, tmp_path: Path) -> None:
    convert(model_directory("llama"), tmp_path / "mcore", workers=1)
    file = tmp_path / "mcore" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(DamagedError, match=r"__0_0\.distcp has \d+ bytes, and \d+ were written: it is cut short"):
        export(tmp_path / "mcore", tmp_path / "hf", workers=1)
    said = r"__0_0\.distcp: cannot read decoder\S* at byte \d+: the file is cut short: it has \d+ bytes.* Make .* again"
    with pytest.raises(DistCheckpointError, match=said):
        export(tmp_path / "mcore", tmp_path / "hf", workers=1, checksums=False)
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("large_bytes", [checksums._LARGE_BYTES, -1])
def test_a_flipped_bit_anywhere_stops_a_conversion(
    model_directory, tmp_path: Path, monkeypatch, large_bytes: int
) -> None:
    """In each file of a converted directory, verified before or meanwhile; without checksums the index at least is
    read with care."""
    generator = random.Random(0)
    monkeypatch.setattr(checksums, "_LARGE_BYTES", large_bytes)
    convert(model_directory("llama"), tmp_path / "mcore", workers=1)
    export(tmp_path / "mcore", tmp_path / "hf", workers=1)
    ways = ((export, tmp_path / "mcore"), (convert, tmp_path / "hf"))
    for work, source in ways:
        files = [path for path in source.rglob("*") if path.is_file()]
        assert len(files) >= 6
        for path in files:
            before = path.read_bytes()
            flip(path, generator)
            with pytest.raises(DamagedError) as error:
                work(source, tmp_path / "made", workers=1)
            assert str(error.value).startswith(f"{path} is damaged")
            assert not list(tmp_path.glob("*made*"))
            path.write_bytes(before)
        work(source, tmp_path / "made", workers=1)
        shutil.rmtree(tmp_path / "made")
    (tmp_path / "mcore" / ".metadata").write_bytes(b"\x80\x04nonsense")
    with pytest.raises(DistCheckpointError, match=r"\.metadata cannot be read \("):
        export(tmp_path / "mcore", tmp_path / "again", checksums=False)


def test_a_marker_is_not_carried_into_another_directory(model_directory, tmp_path: Path) -> None:
    convert(model_directory("llama"), tmp_path / "mcore", workers=1)
    export(tmp_path / "mcore", tmp_path / "hf", workers=1)
    convert(tmp_path / "hf", tmp_path / "back", workers=1)
    assert has_checksums(tmp_path / "back") and not (tmp_path / "back" / "hf" / "COMPLETE").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing_behind(model_directory, tmp_path: Path, monkeypatch, number: signal.Signals) -> None:
    def stop_in_the_middle(*arguments: object) -> None:
        assert len(list(tmp_path.glob(".mcore.*.incomplete"))) == 1
        os.kill(os.getpid(), number)

    monkeypatch.setattr(hf_to_mcore, "_write", stop_in_the_middle)
    monkeypatch.setattr(interruption._State, "first_signal", None)
    arguments = ["--hf-dir", str(model_directory("llama")), "--mcore-dir", str(tmp_path / "mcore")]
    with interruption.interrupts(), pytest.raises(KeyboardInterrupt):
        hf_to_mcore.main(arguments)
    assert list(tmp_path.iterdir()) == []


def test_layouts_that_the_learner_refuses_are_refused(model_directory, tmp_path: Path) -> None:
    for layout, said in ((TargetLayout(vpp=2), "--vpp 2 needs --pp > 1"),):
        with pytest.raises(LayoutError, match=said):
            convert(model_directory("llama"), tmp_path / "mcore", layout=layout)


def test_missing_tokenizer(model_directory, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in model_directory("llama").iterdir():
        if not path.name.startswith("tokenizer"):
            (bare / path.name).symlink_to(path)
    with pytest.raises(HFCheckpointError, match="has no tokenizer"):
        convert(bare, tmp_path / "mcore", workers=1)
    convert(bare, tmp_path / "mcore", workers=1, require_tokenizer=False)


@pytest.mark.slow
def test_commands_from_another_directory(model_directory, tmp_path: Path) -> None:
    """The README's two commands, verification included, on a relative path."""
    source = model_directory("qwen2")
    there = run("hf_to_mcore.py", "--hf-dir", source, "--mcore-dir", "out/mcore", "--tp", "2", "--verify", cwd=tmp_path)
    assert there.returncode == 0, there.stderr
    assert "Warning" not in there.stderr and "Loading weights" not in there.stderr
    assert "largest logit difference to Hugging Face: " in there.stdout
    assert float(there.stdout.split("Hugging Face: ")[1]) < 1e-4
    back = run("mcore_to_hf.py", "--mcore-dir", "out/mcore", "--hf-dir", "out/hf", cwd=tmp_path)
    assert back.returncode == 0, back.stderr
    assert_same_bits(read_all(tmp_path / "out" / "hf"), read_all(source))
    again = run("hf_to_mcore.py", "--hf-dir", "nobody/nothing/x", "--mcore-dir", "new", cwd=tmp_path)
    assert again.returncode == 1
    assert again.stderr.startswith("error: nobody/nothing/x is neither a directory nor a hub id")


def test_verification_finds_a_wrong_tensor(model_directory, tmp_path: Path, monkeypatch, capsys) -> None:
    """q, k, v in the wrong order: same shapes, other logits. The command fails and leaves nothing."""
    from conversion import verify

    source = model_directory("mistral")
    tampered = tmp_path / "tampered"
    convert(source, tampered, workers=1)
    monkeypatch.setattr(verify, "_mcore_logits", lambda comparison, ids: verify._hf_logits(comparison, ids.flip(1)))
    monkeypatch.setattr(verify, "run_alone", lambda function, job: function(job))
    arguments = ["--mcore-dir", str(tampered), "--hf-dir", str(tmp_path / "hf"), "--verify"]
    assert mcore_to_hf.main(arguments) == 1
    assert "verification failed: the logits of" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tampered"]


def test_even_ranges() -> None:
    assert even_ranges([1] * 10, 3) == [(0, 4), (4, 7), (7, 10)]
    assert even_ranges([100, 1, 1, 1], 2) == [(0, 1), (1, 4)]
    assert even_ranges([1, 1], 5) == [(0, 1), (1, 2)]
    assert even_ranges([1, 1, 100], 2) == [(0, 3)]


def with_predictors(source: Path, directory: Path, layer: int, **others: torch.Tensor) -> Path:
    """A copy of a model whose config.json announces a layer for multi-token prediction, with some of its tensors."""
    directory.mkdir()
    copy_companions(source, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    tensors = {
        f"model.layers.{layer}.eh_proj.weight": torch.randn(32, 64).bfloat16(),
        f"model.layers.{layer}.mlp.experts.7.down_proj.weight": torch.randn(32, 24).bfloat16(),
        f"model.layers.{layer}.mlp.gate.e_score_correction_bias": torch.randn(8),
        f"model.layers.{layer}.shared_head.norm.weight": torch.randn(32).bfloat16(),
        "mtp.fc.weight": torch.randn(32, 64).bfloat16(),
        "model.mtp_layers.0.input_proj.weight": torch.randn(32, 64).bfloat16(),
    }
    save_file(read_all(source) | tensors | others, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("layout", [TargetLayout(), TargetLayout(tp=2, pp=2, ep=2)])
def test_layers_for_multi_token_prediction_are_carried_along(
    model_directory, layout: TargetLayout, tmp_path: Path
) -> None:
    source = with_predictors(model_directory("glm4_moe", num_hidden_layers=4), tmp_path / "source", 4)
    stored = read_all(source)
    report = convert(source, tmp_path / "mcore", layout=layout, workers=2)
    assert report["predictors"] == 6 and report["tensors"] == len(stored) - 6
    export(tmp_path / "mcore", tmp_path / "back", workers=2)
    assert_same_bits(read_all(tmp_path / "back"), stored)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    export(tmp_path / "mcore", tmp_path / "half", workers=1, dtype=torch.float16)
    dtypes = {name: tensor.dtype for name, tensor in read_all(tmp_path / "half").items()}
    assert {name for name, dtype in dtypes.items() if dtype != torch.float16} == {
        name for name in stored if name.endswith("e_score_correction_bias")
    }
    export(tmp_path / "mcore", tmp_path / "without", workers=1, predictors=False)
    assert len(read_all(tmp_path / "without")) == len(stored) - 6
    assert json.loads((tmp_path / "without" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_a_trained_checkpoint_gets_them_from_where_training_began(model_directory, tmp_path: Path, capsys) -> None:
    """The learner reads a model with such layers and saves none of them."""
    from megatron_retool.config import Config, LearnerConfig, ModelConfig, OptimizerConfig
    from megatron_retool.learner.learner import Learner

    plain = model_directory("glm4_moe", num_hidden_layers=4)
    source = with_predictors(plain, tmp_path / "source", 4)
    config = Config(model=ModelConfig(path=str(source)), learner=LearnerConfig())
    learner = Learner(config, optimizer=OptimizerConfig(), total_optimizer_steps=1, hf_dir=source)
    learner.save(tmp_path / "learner")
    convert(source, tmp_path / "mcore", workers=1)
    for place in (source, tmp_path / "mcore"):
        target = tmp_path / f"from_{place.name}"
        options = ["--mcore-dir", str(tmp_path / "learner"), "--hf-dir", str(target), "--predictors-from", str(place)]
        assert mcore_to_hf.main(options) == 0
        written, expected = read_all(target), read_all(source)
        carried = expected.keys() - read_all(plain).keys()
        assert written.keys() == expected.keys() and len(carried) == 6
        assert_same_bits({name: written[name] for name in carried}, {name: expected[name] for name in carried})
        assert "6 tensors of layers for multi-token prediction were carried along" in capsys.readouterr().out
    options = ["--mcore-dir", str(tmp_path / "learner"), "--hf-dir", str(tmp_path / "none")]
    assert mcore_to_hf.main([*options, "--predictors-from", str(plain)]) == 1
    assert f"--predictors-from {plain} has no layers for multi-token prediction" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        mcore_to_hf.main([*options, "--predictors-from", str(source), "--fp8", "blockwise"])
    assert "--predictors-from does not go with --fp8" in capsys.readouterr().err


def test_what_is_no_tensor_of_rows_is_refused_by_name(model_directory, tmp_path: Path) -> None:
    number = {"mtp.scale": torch.tensor(1.0)}
    source = with_predictors(model_directory("glm4_moe", num_hidden_layers=4), tmp_path / "source", 4, **number)
    with pytest.raises(HFCheckpointError, match=r"model\.safetensors: tensor mtp\.scale is a number"):
        convert(source, tmp_path / "mcore", workers=1)
