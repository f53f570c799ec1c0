"""Block-FP8 checkpoints; modelopt's schemes where it is installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from conversion.fp8_export import export_with_modelopt, read_calibration
from conversion.hf_to_mcore import TargetLayout, convert
from conversion.mcore_to_hf import export
from conversion.model.architecture import Architecture
from conversion.model.block_fp8 import are_powers_of_two, form_of, quantize_blockwise, quantized_names
from conversion.model.weight_map import WeightMap
from conversion.verify import verify_logits
from tests.conversion.conftest import BLOCKS, assert_same_bits, read_all


@pytest.mark.parametrize(
    ("family", "change", "kept_layers"),
    [
        ("qwen3_moe", {}, ["mlp.gate"]),
        ("qwen3", {}, []),
        # 200 is no multiple of 128: the SwiGLU stays as it is, and the config says so.
        ("mistral", {"intermediate_size": 200}, ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]),
    ],
)
def test_blockwise_checkpoint(model_directory, family: str, change, kept_layers: list[str], tmp_path: Path) -> None:
    source = model_directory(family, **{**BLOCKS, **change})
    convert(source, tmp_path / "mcore", workers=1)
    export(tmp_path / "mcore", tmp_path / "hf", fp8=True, workers=1, max_file_bytes=50_000)
    original, written = read_all(source), read_all(tmp_path / "hf")
    kept = ["lm_head", *(f"model.layers.{layer}.{name}" for layer in range(2) for name in kept_layers)]
    projections = {n for n in original if n.endswith("_proj.weight") and n.removesuffix(".weight") not in kept}
    form = form_of(WeightMap(Architecture.from_pretrained(source)))
    scales = {f"{name}{form.suffix}" for name in projections}
    assert projections == quantized_names(WeightMap(Architecture.from_pretrained(source)))
    assert written.keys() == original.keys() | scales
    assert_same_bits(
        {name: t for name, t in written.items() if name not in scales | projections},
        {name: t for name, t in original.items() if name not in projections},
    )
    for name in projections:
        expected, scale = quantize_blockwise(original[name])
        assert torch.equal(written[name].view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(written[f"{name}{form.suffix}"], scale)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]
    if family != "mistral":
        assert config == {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": kept,
        }
    else:
        merged = [f"model.layers.{layer}.mlp.gate_up_proj" for layer in range(2)]
        assert config["quant_method"] == "compressed-tensors" and config["ignore"] == [*kept, *merged]
        (group,) = config["config_groups"].values()
        assert group["weights"]["strategy"] == "block" and group["weights"]["block_structure"] == [128, 128]


@pytest.mark.slow
def test_scales_that_a_blackwell_engine_takes(model_directory, tmp_path: Path, monkeypatch) -> None:
    source = model_directory("qwen3", **BLOCKS)
    convert(source, tmp_path / "mcore", workers=1)
    export(tmp_path / "mcore", tmp_path / "hf", fp8=True, fp8_scales="power_of_two", workers=1)
    original, written = read_all(source), read_all(tmp_path / "hf")
    for name in quantized_names(WeightMap(Architecture.from_pretrained(source))):
        expected, scale = quantize_blockwise(original[name], power_of_two=True)
        assert torch.equal(written[name].view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(written[f"{name}_scale_inv"], scale) and are_powers_of_two(scale)
        assert not are_powers_of_two(quantize_blockwise(original[name])[1])
    # The learner's model is rounded as the files were.
    verify_logits(Architecture.from_pretrained(source), tmp_path / "hf", tmp_path / "mcore", fp8=True)
    # Of itself on a host with such a GPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    export(tmp_path / "mcore", tmp_path / "blackwell", fp8=True, workers=1)
    monkeypatch.undo()
    for name, tensor in read_all(tmp_path / "blackwell").items():
        assert torch.equal(tensor.view(torch.uint8), written[name].view(torch.uint8)), name


def test_a_model_without_whole_blocks_is_refused(model_directory, tmp_path: Path) -> None:
    convert(model_directory("llama"), tmp_path / "mcore", workers=1)
    with pytest.raises(ValueError, match="hidden_size=32 and the other sizes of this llama model are not multiples"):
        export(tmp_path / "mcore", tmp_path / "hf", fp8=True)
    assert not (tmp_path / "hf").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "algorithm"), [("fp8", "FP8"), ("nvfp4", "NVFP4")])
def test_modelopt_checkpoint(model_directory, scheme: str, algorithm: str, tmp_path: Path) -> None:
    pytest.importorskip("modelopt.torch.quantization")
    source = model_directory("llama")
    text = tmp_path / "calibration.txt"
    text.write_text("w1 w2 w3 w4\n\nw5 w6 w7 w8\n")
    samples = read_calibration(text, source)
    assert samples == [[1, 2, 3, 4], [5, 6, 7, 8]]
    export_with_modelopt(source, tmp_path / "hf", scheme, samples)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == algorithm
    written = read_all(tmp_path / "hf")
    assert "model.layers.0.mlp.up_proj.weight_scale" in written
    assert (tmp_path / "hf" / "tokenizer.json").exists() and (tmp_path / "hf" / "COMPLETE").exists()

    # A run can begin with it again, as with what others publish.
    assert (tmp_path / "hf" / "hf_quant_config.json").is_file()
    convert(tmp_path / "hf", tmp_path / "mcore", layout=TargetLayout(tp=2), workers=1)
    export(tmp_path / "mcore", tmp_path / "again", workers=1)
    again, numbers = read_all(tmp_path / "again"), torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for name, tensor in read_all(source).items():
        stored = written[name]
        if scheme == "nvfp4" and name + "_scale" in written:
            halves = torch.stack([stored & 15, stored >> 4], dim=-1).flatten(1).int()
            signed = torch.where(halves >= 8, -numbers[halves & 7], numbers[halves & 7])
            scale = (written[name + "_scale"].float() * written[name + "_scale_2"]).repeat_interleave(16, 1)
            stored = signed * scale
        elif name + "_scale" in written:
            stored = stored.float() * written[name + "_scale"]
        assert torch.equal(again[name], stored.to(again[name].dtype)), name
        assert (again[name] - tensor).abs().max() <= 0.3 * tensor.abs().max()


def test_bad_requests(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="scheme 'int3' is not one of fp8, nvfp4"):
        export_with_modelopt("x", "y", "int3", [[1]])
    with pytest.raises(ValueError, match="calibration holds no sample"):
        export_with_modelopt("x", "y", "fp8", [])
