"""Block-FP8: the numbers, and the weights that it holds for."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conversion.model.architecture import Architecture
from conversion.model.block_fp8 import (
    blockwise_quantization_config,
    dequantize_blockwise,
    has_power_of_two_scales,
    linear_names,
    quantize_blockwise,
    quantized_names,
    round_to_blocks,
    takes_power_of_two,
)
from conversion.model.weight_map import WeightMap


@given(
    rows=st.integers(1, 20),
    columns=st.integers(1, 20),
    magnitude=st.floats(-30, 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=60, deadline=None)
def test_blockwise_error_is_half_a_step_of_e4m3(rows: int, columns: int, magnitude: float, dtype: torch.dtype) -> None:
    weight = (torch.randn(rows, columns) * 2.0**magnitude).to(dtype)
    quantized, scale = quantize_blockwise(weight, block=8)
    assert quantized.dtype == torch.float8_e4m3fn and quantized.shape == weight.shape
    assert scale.dtype == torch.float32 and scale.shape == (-(-rows // 8), -(-columns // 8))
    back = dequantize_blockwise(quantized, scale, block=8)
    # 3 bits of mantissa: half a step is 2^-4 of the value; below 2^-6 steps are even, half of one is 2^-10 scales.
    per_element = scale.repeat_interleave(8, 0)[:rows].repeat_interleave(8, 1)[:, :columns]
    bound = torch.maximum(weight.float().abs() * 2**-4, per_element * 2**-10) * 1.001
    assert ((back - weight.float()).abs() <= bound).all()


def test_the_largest_element_of_a_block_is_kept_and_blocks_are_independent() -> None:
    weight = torch.full((130, 129), 0.01)
    weight[0, 0], weight[129, 128] = -5.0, 1e-6
    quantized, scale = quantize_blockwise(weight)
    assert scale.shape == (2, 2)
    assert scale[0, 0] == pytest.approx(5.0 / 448) and scale[0, 1] == pytest.approx(0.01 / 448)
    back = dequantize_blockwise(quantized, scale)
    assert back[0, 0] == pytest.approx(-5.0) and back[1, 128] == pytest.approx(0.01)
    assert quantized[0, 0].float() == -448


def test_zero_blocks_have_scale_one() -> None:
    quantized, scale = quantize_blockwise(torch.zeros(3, 3))
    assert scale.tolist() == [[1.0]] and quantized.float().eq(0).all()


def test_scales_that_are_powers_of_two() -> None:
    weight = torch.randn(256, 384) * torch.rand(256, 384) ** 4
    weight[:128, :128] = 0
    quantized, scale = quantize_blockwise(weight, power_of_two=True)
    assert (torch.frexp(scale).mantissa == 0.5).all() and scale[0, 0] == 1
    exact = quantize_blockwise(weight)[1]
    assert (scale >= exact).all() and (scale[exact < 1] < 2 * exact[exact < 1]).all()
    # An engine that makes such scales of its own from these weights changes no number.
    back = dequantize_blockwise(quantized, scale)
    assert torch.equal(dequantize_blockwise(*quantize_blockwise(back, power_of_two=True)), back)
    assert (back - weight).abs().max() <= weight.abs().max() * 2**-4


@pytest.mark.parametrize(
    ("capability", "expected"), [(None, False), ((8, 9), False), ((9, 0), False), ((10, 0), True), ((12, 0), True)]
)
def test_blackwells_kernels_take_powers_of_two(capability: tuple[int, int] | None, expected: bool) -> None:
    assert has_power_of_two_scales(capability) is expected


def test_sglang_makes_powers_of_two_for_the_same_gpus() -> None:
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.submodule_search_locations
    layers = Path(found.submodule_search_locations[0]) / "srt" / "layers"
    tree = ast.parse((layers / "deep_gemm_wrapper" / "configurer.py").read_text())
    (rule,) = (
        ast.unparse(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DEEPGEMM_SCALE_UE8M0"
    )
    # 10.x and 12.x, and not Hopper's 9.0.
    assert rule == "ENABLE_JIT_DEEPGEMM and (get_platform().is_sm100 or get_device_sm() in (120, 121))"
    assert "sf = ceil_to_ue8m0(x_amax / 448.0)" in (layers / "quantization" / "fp8_utils.py").read_text()


def test_rounding_keeps_the_dtype_and_is_what_an_fp8_engine_computes_with() -> None:
    weight = torch.randn(192, 160).bfloat16()
    rounded = round_to_blocks(weight)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, dequantize_blockwise(*quantize_blockwise(weight)).bfloat16())
    assert not torch.equal(rounded, weight)
    coarser = round_to_blocks(weight, power_of_two=True)
    assert torch.equal(coarser, dequantize_blockwise(*quantize_blockwise(weight, power_of_two=True)).bfloat16())
    assert not torch.equal(coarser, rounded)


def test_scales_are_chosen_by_name_or_by_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9 + device.index, 0))
    hopper, blackwell = (torch.device("cuda", index) for index in (0, 1))
    found = [takes_power_of_two("auto", device) for device in (torch.device("cpu"), hopper, blackwell)]
    assert found == [False, False, True]
    assert takes_power_of_two("power_of_two", torch.device("cpu")) and not takes_power_of_two("float32", blackwell)


def test_one_rule_says_what_is_linear_what_is_stored_in_fp8_and_what_the_config_excludes() -> None:
    moe = Architecture(
        "qwen3_moe", 2, 128, 2, 1, 64, 256, 9, num_experts=2, num_experts_per_tok=1, moe_ffn_hidden_size=200
    )
    weight_map = WeightMap(moe)
    linear, quantized = linear_names(weight_map), quantized_names(weight_map)
    # 64 rows of k and v are half a block, and engines merge them with q: none of the three is stored in FP8.
    assert quantized == {f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (0, 1)}
    assert linear == {name for name in weight_map.hf_names if name.endswith("_proj.weight")}
    excluded = set(blockwise_quantization_config(weight_map)["modules_to_not_convert"])
    assert excluded == {
        "lm_head",
        "model.layers.0.mlp.gate",
        "model.layers.1.mlp.gate",
        *(name.removesuffix(".weight") for name in linear - quantized),
    }
