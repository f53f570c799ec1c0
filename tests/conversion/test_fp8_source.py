"""Block-FP8 checkpoints as sources: what they stand for in bfloat16, on every layout, and what is refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from conversion import verify
from conversion.files.companions import copy_companions
from conversion.files.quantized_checkpoint import open_source
from conversion.files.safetensors_headers import HFCheckpointError
from conversion.hf_to_mcore import TargetLayout, convert
from conversion.mcore_to_hf import export
from conversion.model.architecture import Architecture
from conversion.model.block_fp8 import dequantize_blockwise, quantize_blockwise
from conversion.model.config_reader import UnsupportedArchitecture
from conversion.model.low_precision import full_precision, quantization_in
from megatron_retool.parity.admission.shrink import shrunk
from megatron_retool.parity.admission.tiny_model import random_model, save_model
from megatron_retool.planning.models import MODELS
from tests.conversion.conftest import BLOCKS, assert_same_bits, read_all, save_tokenizer

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def stood_for(stored: dict[str, Tensor], suffix: str = "_scale_inv") -> dict[str, Tensor]:
    """The bfloat16 weights of a block-FP8 checkpoint, matrix by matrix."""
    return {
        name: dequantize_blockwise(tensor, stored[name + suffix]).bfloat16()
        if tensor.dtype == torch.float8_e4m3fn
        else tensor
        for name, tensor in stored.items()
        if not name.endswith(suffix)
    }


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A block-FP8 directory as Kimi K2's: every linear layer quantised, whether or not blocks fill it."""
    config = shrunk(MODELS["kimi-k2"], 2) | {
        "model_type": "deepseek_v3", "hidden_size": 144, "kv_lora_rank": 132, "intermediate_size": 200
    }  # fmt: skip
    plain, directory = (tmp_path_factory.mktemp(name) for name in ("plain", "kimi"))
    save_model(random_model(config).bfloat16(), plain)
    tensors: dict[str, Tensor] = {}
    for name, tensor in read_all(plain).items():
        kept = tensor.dim() != 2 or "embed" in name or "lm_head" in name or name.endswith("mlp.gate.weight")
        if kept:
            tensors[name] = tensor
        else:
            tensors[name], tensors[name + "_scale_inv"] = quantize_blockwise(tensor)
    assert tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (2, 2)
    save_file(tensors, directory / "model.safetensors")
    written = json.loads((plain / "config.json").read_text())
    change = {"model_type": "kimi_k2", "quantization_config": FP8, "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(written | change))
    save_tokenizer(directory)
    return directory


@pytest.fixture
def damaged(kimi: Path, tmp_path: Path) -> Callable[..., Path]:
    """The directory with its tensors changed."""

    def make(change: Callable[[dict[str, Tensor]], Any]) -> Path:
        directory, tensors = tmp_path / "source", read_all(kimi)
        directory.mkdir()
        copy_companions(kimi, directory)
        change(tensors)
        save_file(tensors, directory / "model.safetensors")
        return directory

    return make


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_an_exported_checkpoint_comes_back_as_what_it_stands_for(
    model_directory, family: str, tp: int, tmp_path: Path
) -> None:
    """Llama's is in the form of compressed-tensors."""
    source = model_directory(family, **BLOCKS)
    convert(source, tmp_path / "mcore", workers=1)
    export(tmp_path / "mcore", tmp_path / "fp8", fp8=True, workers=1, max_file_bytes=50_000)
    report = convert(tmp_path / "fp8", tmp_path / "again", layout=TargetLayout(tp=tp, pp=tp), workers=1, verify=tp == 2)
    assert report["dequantized"] and report.get("largest_logit_difference", 0.0) < 1e-4
    export(tmp_path / "again", tmp_path / "bf16", workers=1)
    suffix = "_scale" if family == "llama" else "_scale_inv"
    expected = stood_for(read_all(tmp_path / "fp8"), suffix)
    assert expected.keys() == read_all(source).keys()
    assert_same_bits(read_all(tmp_path / "bf16"), expected)
    # Quantisation left something to see, and config.json is the full-precision model's again.
    assert any(not torch.equal(tensor, expected[name]) for name, tensor in read_all(source).items())
    assert json.loads((tmp_path / "bf16" / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_blocks_at_the_edges_and_a_model_type_from_the_hub(kimi: Path, tp: int, tmp_path: Path) -> None:
    convert(kimi, tmp_path / "mcore", layout=TargetLayout(tp=tp, ep=tp), workers=2, verify=tp == 1)
    export(tmp_path / "mcore", tmp_path / "bf16", workers=1)
    assert_same_bits(read_all(tmp_path / "bf16"), stood_for(read_all(kimi)))
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert config["model_type"] == "deepseek_v3" and config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    assert config.keys() == json.loads((kimi / "config.json").read_text()).keys() - {"quantization_config"}


@pytest.mark.rare
def test_verification_by_hand_knows_what_was_dequantised(kimi: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    convert(kimi, tmp_path / "mcore", workers=1)
    arguments = ["--hf-dir", str(kimi), "--mcore-dir", str(tmp_path / "mcore")]
    assert verify.main(arguments) == 0
    assert "the same model" in capsys.readouterr().out
    other = tmp_path / "other"
    shutil.copytree(kimi, other)
    tensors = read_all(kimi)
    tensors["model.layers.1.mlp.experts.0.up_proj.weight_scale_inv"] *= 1.5
    save_file(tensors, other / "model.safetensors")
    assert verify.main(["--hf-dir", str(other), *arguments[2:]]) == 1
    assert "verification failed" in capsys.readouterr().err


def test_any_rows_are_those_of_the_whole(kimi: Path) -> None:
    checkpoint, expected, generator = open_source(kimi), stood_for(read_all(kimi)), random.Random(0)
    assert checkpoint.tensors.keys() == expected.keys()
    assert all(checkpoint.tensors[name].nbytes == tensor.nbytes for name, tensor in expected.items())
    for name, tensor in expected.items():
        for _ in range(4):
            start = generator.randrange(len(tensor))
            rows = (start, generator.randint(start + 1, len(tensor)))
            assert torch.equal(checkpoint.read(name, rows), tensor[slice(*rows)]), (name, rows)
            out = torch.empty_like(tensor[slice(*rows)])
            assert checkpoint.read(name, rows, out) is out and torch.equal(out, tensor[slice(*rows)])


def test_transformers_dequantises_to_the_same_bits() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    torch.manual_seed(0)
    for power_of_two in (False, True):
        weight = torch.randn(384, 256) * torch.logspace(-6, 3, 256)
        quantized, scales = quantize_blockwise(weight, power_of_two=power_of_two)
        theirs = Fp8Dequantize(None).convert({"weight$": quantized, "weight_scale_inv": scales})["weight"]
        ours = dequantize_blockwise(quantized, scales)
        assert torch.equal(theirs.float(), ours) and torch.equal(theirs.bfloat16(), ours.bfloat16())


UP = "model.layers.1.mlp.experts.0.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(UP + "_scale_inv"), rf"lacks tensor {UP}_scale_inv, the scales of the FP8 weight {UP} in mod"),
        (
            lambda t: t.update({UP + "_scale_inv": torch.ones(1, 3)}),
            rf"model\.safetensors: {UP}_scale_inv has shape \(1, 3\), but {UP} of shape \(24, 144\) has \(1, 2\)",
        ),
        (
            lambda t: t.update({UP + "_scale_inv": torch.ones(1, 2).bfloat16()}),
            rf"model\.safetensors: {UP}_scale_inv has dtype torch\.bfloat16, not float32",
        ),
        (
            lambda t: t.update({UP + "_scale_inv": torch.tensor([[1.0, float("nan")]])}),
            rf"model\.safetensors: {UP}_scale_inv has a scale that is no finite number from 0 on",
        ),
        (
            lambda t: t.update({UP: t[UP].bfloat16()}),
            rf"holds the scales {UP}_scale_inv, but {UP} is no float8_e4m3fn weight",
        ),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.float8_e4m3fn)}),
            r"lacks tensor model\.norm\.weight_scale_inv, the scales of the FP8 weight model\.norm\.weight",
        ),
        (lambda t: t.update({UP: t[UP].float().to(torch.float8_e5m2)}), rf"but {UP} is no float8_e4m3fn weight"),
        (
            lambda t: [t.pop(n) for n in [n for n in t if n + "_scale_inv" in t or n.endswith("_inv")]],
            "no tensor is float8_e4m3",
        ),
        (
            lambda t: t.update({UP.replace("up_proj", "up_proj.input_scale"): torch.ones(1)}),
            r"holds tensor .*up_proj\.input_scale\.weight, which a deepseek_v3 model",
        ),
    ],
)
def test_what_does_not_belong_together_is_named(damaged, change, message: str, tmp_path: Path) -> None:
    with pytest.raises(HFCheckpointError, match=message):
        convert(damaged(change), tmp_path / "mcore", workers=1)
    assert not (tmp_path / "mcore").exists()


@pytest.mark.parametrize("carried", [True, False])
def test_layers_for_multi_token_prediction_are_carried_or_left_out(
    damaged, kimi: Path, tmp_path: Path, carried: bool
) -> None:
    weight, norm = "model.layers.2.eh_proj.weight", "model.layers.2.enorm.weight"
    quantized, scales = quantize_blockwise(torch.randn(144, 200))
    added = {weight: quantized, weight + "_scale_inv": scales, norm: torch.randn(144).bfloat16()}
    source = damaged(lambda t: t.update(added))
    convert(source, tmp_path / "mcore", layout=TargetLayout(tp=2), workers=2, predictors=carried)
    report = export(tmp_path / "mcore", tmp_path / "bf16", workers=2)
    expected = stood_for(read_all(kimi)) | (stood_for(added) if carried else {})
    assert_same_bits(read_all(tmp_path / "bf16"), expected)
    assert report["predictors"] == 2 * carried
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == int(carried)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, 'quant_method="gptq", which is not read: start from the full-precision'),
        ({**FP8, "weight_block_size": None}, r"weight_block_size=null: of quant_method=fp8 only \[128, 128\] is read"),
        (
            {**FP8, "weight_block_size": [64, 64]},
            r"weight_block_size=\[64, 64\]: of quant_method=fp8 only \[128, 128\]",
        ),
        ({**FP8, "fmt": "e5m2"}, 'fmt="e5m2": of quant_method=fp8 only'),
        ("fp8", "quant_method=null, which is not read"),
    ],
)
def test_other_quantisations_are_named(kimi: Path, change: Any, message: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(kimi, source)
    config = json.loads((kimi / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": change}))
    with pytest.raises(UnsupportedArchitecture, match=rf"{source}/config\.json: quantization_config has {message}"):
        convert(source, tmp_path / "mcore", workers=1)
    assert not (tmp_path / "mcore").exists()


def test_published_configurations() -> None:
    for change in ({}, {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["lm_head"]}, {"scale_fmt": "ue8m0"}):
        found = quantization_in({"quantization_config": {**FP8, **change}})
        assert found is not None and found.is_block_fp8()
    assert quantization_in({}) is None and quantization_in({"quantization_config": None}) is None
    assert full_precision({"quantization_config": FP8, "hidden_size": 8}) == {"hidden_size": 8}


def test_learner_and_engines_refuse_it_as_it_is(kimi: Path) -> None:
    """They would read it without its scales, or each with other numbers than the other's."""
    with pytest.raises(UnsupportedArchitecture, match=r"config\.json: quantization_config is set: .*hf_to_mcore\.py"):
        Architecture.from_pretrained(kimi)
    assert Architecture.from_pretrained(kimi, dequantized=True).family == "deepseek_v3"
