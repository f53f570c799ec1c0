"""Precision settings against machines: clear refusals, and the options that Megatron-Core gets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_retool.config import ConfigError, Fp8Config, LearnerConfig, OptimizerConfig, RecomputeConfig
from megatron_retool.learner.precision import (
    Acceleration,
    check_precision,
    optimizer_options,
    token_multiple,
    transformer_options,
)
from tests.conversion.model.test_layout import DENSE, EXPERTS

CPU = Acceleration(cuda=False)
H200 = Acceleration(True, (9, 0), "NVIDIA H200", "2.9.0", apex=True, fused_weight_gradient=True)
B200 = replace(H200, capability=(10, 0), gpu_name="NVIDIA B200")
A100 = replace(H200, capability=(8, 0), gpu_name="NVIDIA A100")
BARE_H200 = replace(H200, transformer_engine=None, apex=False, fused_weight_gradient=False)


def _fp8(recipe: str, **settings: Any) -> LearnerConfig:
    return LearnerConfig(fp8=Fp8Config(recipe=recipe, **settings))


@pytest.mark.parametrize(
    ("learner", "optimizer", "machine", "message"),
    [
        (_fp8("blockwise"), {}, CPU, r"fp8.recipe=blockwise needs a CUDA device"),
        (_fp8("blockwise"), {}, BARE_H200, r"needs Transformer Engine, which is not installed"),
        (_fp8("blockwise"), {}, replace(H200, transformer_engine="2.2.0"), r"Engine 2.3 or later, found 2.2.0"),
        (_fp8("tensorwise"), {}, A100, r"capability 8.9 or later, NVIDIA A100 has 8.0"),
        (_fp8("mxfp8"), {}, H200, r"capability 10.0 or later, NVIDIA H200 has 9.0"),
        (_fp8("nvfp4"), {}, CPU, r"fp8.recipe=nvfp4 needs a CUDA device with FP4"),
        (_fp8("nvfp4"), {}, H200, r"capability 10.0 or later, NVIDIA H200 has 9.0"),
        (_fp8("nvfp4", format="e4m3"), {}, B200, r"fp8.format=e4m3 is of FP8, and .*nvfp4 has a format of its own"),
        (_fp8("e5m2"), {}, H200, r"'e5m2' is not one of tensorwise, blockwise, mxfp8"),
        (_fp8("delayed"), {}, H200, r"'delayed' is not one of tensorwise, blockwise, mxfp8"),
        (replace(_fp8("blockwise"), dtype="float32"), {}, H200, r"needs learner.dtype=bfloat16, not float32"),
        (LearnerConfig(dtype="float16"), {}, CPU, r"dtype=float16 needs CUDA"),
        (LearnerConfig(), {"cpu_offload": True}, CPU, r"cpu_offload=true needs CUDA and Transformer Engine"),
        (LearnerConfig(use_distributed_optimizer=False), {"cpu_offload": True}, H200, r"distributed_optimizer=true"),
        (LearnerConfig(recompute=RecomputeConfig(granularity="some")), {}, CPU, r"'some' is not one of full"),
        (LearnerConfig(recompute=RecomputeConfig(method="uniform")), {}, CPU, r"belong to .*granularity=full"),
        (LearnerConfig(recompute=RecomputeConfig(modules=["mlp"])), {}, CPU, r"needs .*granularity=selective"),
        (LearnerConfig(recompute=RecomputeConfig("full", num_layers=9)), {}, CPU, r"between 1 and the 8 layers"),
        (LearnerConfig(recompute=RecomputeConfig("selective", modules=["moe"])), {}, CPU, r"mixture-of-experts"),
        (LearnerConfig(recompute=RecomputeConfig("selective", modules=["lm_head"])), {}, CPU, r"not one of core_attn"),
    ],
)  # fmt: skip
def test_refused_before_any_work(
    learner: LearnerConfig, optimizer: dict[str, Any], machine: Acceleration, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_precision(learner, OptimizerConfig(**optimizer), DENSE, machine)


def test_context_parallelism_of_a_window_is_not_transformer_engines() -> None:
    windowed = replace(DENSE, sliding_window=64)
    assert H200.packs_attention(windowed, 2) and BARE_H200.packs_attention(DENSE)
    assert not H200.packs_attention(windowed) and not H200.packs_attention(DENSE, 2)


@pytest.mark.parametrize(
    ("recipe", "machine", "settings", "format", "multiple"),
    [
        ("tensorwise", H200, {"keep_first_last_bf16": False}, "hybrid", 16),
        ("blockwise", H200, {}, "e4m3", 128),
        ("blockwise", H200, {"format": "hybrid"}, "hybrid", 128),
        ("mxfp8", B200, {}, "e4m3", 32),
    ],
)
def test_fp8_recipes_become_megatron_options(
    recipe: str, machine: Acceleration, settings: dict[str, Any], format: str, multiple: int
) -> None:
    learner = _fp8(recipe, **settings)
    check_precision(learner, OptimizerConfig(), DENSE, machine)
    options = transformer_options(learner, machine)
    assert options["fp8"] == format
    assert options["fp8_recipe"] == recipe
    assert options["first_last_layers_bf16"] == learner.fp8.keep_first_last_bf16
    assert options["bf16"] and options["params_dtype"] is torch.bfloat16
    assert optimizer_options(learner, OptimizerConfig())["fp8_recipe"] == recipe
    assert token_multiple(learner) == multiple


def test_fp4_takes_the_place_of_fp8() -> None:
    learner = _fp8("nvfp4")
    check_precision(learner, OptimizerConfig(), DENSE, B200)
    options = transformer_options(learner, B200)
    assert (options["fp4"], options["fp4_recipe"], options["first_last_layers_bf16"]) == ("e2m1", "nvfp4", True)
    assert "fp8" not in options and "fp8_recipe" not in optimizer_options(learner, OptimizerConfig())
    assert token_multiple(learner) == 128


def test_every_option_exists_in_megatron() -> None:
    from megatron_retool.learner import cpu

    cpu.install()
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    learner = replace(_fp8("blockwise"), recompute=RecomputeConfig("selective", modules=["core_attn"]))
    assert transformer_options(learner, H200).keys() <= TransformerConfig.__dataclass_fields__.keys()
    full = replace(learner, recompute=RecomputeConfig("full"))
    options = transformer_options(full, H200)
    assert options.keys() <= TransformerConfig.__dataclass_fields__.keys()
    assert (options["recompute_method"], options["recompute_num_layers"]) == ("uniform", 1)
    offloading = optimizer_options(learner, OptimizerConfig(cpu_offload=True))
    assert offloading.keys() <= MegatronOptimizerConfig.__dataclass_fields__.keys()
    assert offloading["optimizer_cpu_offload"]


def test_fused_kernels_follow_what_is_installed() -> None:
    assert transformer_options(LearnerConfig(), H200)["apply_rope_fusion"]
    bare = transformer_options(LearnerConfig(), BARE_H200)
    assert not bare["apply_rope_fusion"]
    assert "Transformer Engine 2.9.0" in H200.describe() and "sm90" in H200.describe()
    assert "local layer spec" in CPU.describe()


@pytest.mark.parametrize("module", ["layernorm", "moe_act"])
def test_only_transformer_engine_computes_these_again(module: str) -> None:
    learner = LearnerConfig(recompute=RecomputeConfig("selective", modules=[module]))
    check_precision(learner, OptimizerConfig(), EXPERTS, H200)
    with pytest.raises(ConfigError, match=f"{module} needs Transformer Engine's .* leave it out"):
        check_precision(learner, OptimizerConfig(), EXPERTS, CPU)
