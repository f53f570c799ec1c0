"""gpt-oss through the converters: experts in one tensor, and MXFP4 that becomes bfloat16."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from conversion.files.hf_checkpoint import HFCheckpoint
from conversion.files.safetensors_headers import HFCheckpointError
from conversion.hf_to_mcore import TargetLayout, convert
from conversion.mcore_to_hf import export
from conversion.model.architecture import Architecture
from conversion.model.config_reader import UnsupportedArchitecture
from conversion.model.mapping import WeightMapError, shard, to_mcore
from conversion.model.stacked import part_of
from conversion.model.weight_map import WeightMap
from megatron_retool.parity.admission.shrink import shrunk
from megatron_retool.parity.admission.tiny_model import random_model, save_model
from megatron_retool.planning.models import MODELS
from tests.conversion.conftest import assert_same_bits, read_all

EXPERTS = "model.layers.1.mlp.experts."
CONFIG = {**shrunk(MODELS["gpt-oss-20b"], 4), "hidden_size": 64, "intermediate_size": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bfloat16."""
    return save_model(random_model(CONFIG).bfloat16(), tmp_path_factory.mktemp("gpt_oss"))


@pytest.fixture
def quantized(model: Path, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """The model with its experts in MXFP4, as it is published; and the tensors that they stand for."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    tensors, meant = {}, {}
    for name, tensor in read_all(model).items():
        if tensor.dim() < 3:
            tensors[name] = meant[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32, 16)
        blocks = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 124, shape[:-1], dtype=torch.uint8, generator=generator)
        tensors[name + "_blocks"], tensors[name + "_scales"] = blocks, scales
        meant[name] = convert_moe_packed_tensors(blocks, scales)
    directory = tmp_path / "published"
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (directory / "config.json").write_text(json.dumps(config))
    return directory, meant


@pytest.mark.parametrize("layout", [TargetLayout(), TargetLayout(tp=2, pp=2, ep=2)], ids=["whole", "tp2_pp2_ep2"])
def test_round_trip_is_bit_exact(model: Path, layout: TargetLayout, tmp_path: Path) -> None:
    report = convert(model, tmp_path / "mcore", layout=layout, workers=2, require_tokenizer=False)
    export(tmp_path / "mcore", tmp_path / "hf", workers=2, max_file_bytes=60_000, require_tokenizer=False)
    expected = read_all(model)
    assert report["tensors"] == len(expected)
    assert report["bytes"] == sum(tensor.nbytes for tensor in expected.values())
    assert_same_bits(read_all(tmp_path / "hf"), expected)
    assert (tmp_path / "hf" / "config.json").read_bytes() == (model / "config.json").read_bytes()


def test_a_dtype_is_cast_both_ways(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "mcore", dtype=torch.float32, workers=1, require_tokenizer=False)
    export(tmp_path / "mcore", tmp_path / "hf", dtype=torch.bfloat16, workers=1, require_tokenizer=False)
    assert_same_bits(read_all(tmp_path / "hf"), read_all(model))


def test_a_shard_is_read_without_the_rest(model: Path) -> None:
    checkpoint, tensors = HFCheckpoint(model), read_all(model)
    architecture = Architecture.from_pretrained(model)
    for mapping in WeightMap(architecture, architecture.vocab_size + 3):
        parts = [part_of(name) for name in mapping.hf_names]
        sources = [
            tensors[name] if part is None else part.of(tensors[part.tensor][part.index])
            for name, part in zip(mapping.hf_names, parts, strict=True)
        ]
        full = to_mcore(mapping, sources)
        for rank in range(2):
            assert torch.equal(checkpoint.read_shard(mapping, 2, rank), shard(mapping, full, 2, rank))


@pytest.mark.slow
def test_logits_are_verified(model: Path, tmp_path: Path) -> None:
    report = convert(model, tmp_path / "mcore", verify=True, workers=1, require_tokenizer=False)
    assert report["largest_logit_difference"] < 1e-4


def test_mxfp4_becomes_bfloat16(quantized: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    source, meant = quantized
    layout = TargetLayout(tp=2, ep=2)
    report = convert(source, tmp_path / "mcore", layout=layout, workers=1, require_tokenizer=False)
    assert report["bytes"] == sum(tensor.nbytes for tensor in meant.values())
    export(tmp_path / "mcore", tmp_path / "hf", workers=1, require_tokenizer=False)
    assert_same_bits(read_all(tmp_path / "hf"), meant)
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())
    assert Architecture.from_pretrained(tmp_path / "hf") == Architecture.from_pretrained(source, dequantized=True)
    checkpoint = HFCheckpoint(source)
    assert_same_bits({name: checkpoint.read(name) for name in meant}, meant)


def test_mxfp4_is_refused_where_nobody_makes_bfloat16_of_it(quantized: tuple[Path, dict[str, torch.Tensor]]) -> None:
    with pytest.raises(UnsupportedArchitecture, match=r"config.json: .*hf_to_mcore.py and .* make of .* MXFP4"):
        Architecture.from_pretrained(quantized[0])


def test_mxfp4_is_not_verified(quantized: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    with pytest.raises(HFCheckpointError, match="holds MXFP4, which --verify does not compare"):
        convert(quantized[0], tmp_path / "mcore", verify=True, workers=1, require_tokenizer=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop(EXPERTS + "down_proj_scales"),
            "model.safetensors: tensor .*down_proj_blocks is there without",
        ),
        (lambda t: t.update({EXPERTS + "down_proj": torch.ones(1)}), "down_proj_blocks is there beside .*down_proj"),
        (
            lambda t: t.update({EXPERTS + "down_proj_scales": t[EXPERTS + "down_proj_scales"].float()}),
            r"down_proj_blocks has dtype torch.uint8 and .*down_proj_scales torch.float32, not uint8",
        ),
        (
            lambda t: t.update({EXPERTS + "down_proj_scales": t[EXPERTS + "down_proj_scales"][:, :-1].clone()}),
            r"down_proj_blocks has shape .* in model.safetensors \(4, 63, 1\): expected \[experts, out",
        ),
    ],
)
def test_mxfp4_that_does_not_fit(change, message: str, quantized: tuple[Path, dict[str, torch.Tensor]]) -> None:
    directory = quantized[0]
    tensors = read_all(directory)
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(HFCheckpointError, match=message):
        HFCheckpoint(directory)


def test_mxfp4_that_is_cut_short(quantized: tuple[Path, dict[str, torch.Tensor]]) -> None:
    checkpoint = HFCheckpoint(quantized[0])
    file = quantized[0] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:4000])
    name = EXPERTS + "down_proj[1]"
    with pytest.raises(HFCheckpointError, match=f"{re.escape(str(file))} ends inside tensor .*down_proj_"):
        checkpoint.read(name)


def test_a_stack_of_another_shape_is_named(model: Path, tmp_path: Path) -> None:
    tensors = read_all(model)
    tensors[EXPERTS + "gate_up_proj"] = tensors[EXPERTS + "gate_up_proj"][:-1].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        WeightMapError, match=r"gate_up_proj in .*model.safetensors has shape \(3, 64, 64\), .* \(4, 64"
    ):
        HFCheckpoint(tmp_path).check(WeightMap(Architecture.from_pretrained(model)))
