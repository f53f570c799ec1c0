"""What Megatron-Core 0.16 and the pinned Transformer Engine get wrong between them, and the learner's choice of scales.

The faults lie in Python, none in a kernel, so tests/learner/transformer_engine shows them on any host. It also fails
when a new version of either has no need of a repair any more.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.extensions import transformer_engine as extension
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor

from conversion.model.block_fp8 import has_power_of_two_scales

_SCALES_VARIABLE = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"


def choose_block_scales(capability: tuple[int, int] | None) -> None:
    """Give the blockwise recipe the scales that weights on their way to engines get (``conversion.model.block_fp8``).

    Transformer Engine's own choice is powers of two on every GPU, which would let an FP8 learner and an FP8 engine on
    Hopper compute with different weights. It reads a variable when it is imported, which wins where it is set.
    """
    if _SCALES_VARIABLE in os.environ:
        return
    from transformer_engine.common.recipe import Float8BlockScaling, QParams

    scales = QParams(power_2_scale=has_power_of_two_scales(capability), amax_epsilon=0.0)
    for operand in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(Float8BlockScaling, operand, scales)


def repair_experts(model: torch.nn.Module) -> None:
    """Make a model's grouped experts count in the gradient norm, and savable under FP8. Idempotent."""
    for module, split_dimension in _grouped_experts(model):
        _accept_empty_extra_state(type(module))
        for parameter in module.parameters():
            # Transformer Engine sets the marks where it packs experts into one tensor, and nowhere else. Without them
            # the norm takes a weight for the same on every TP rank, and leaves all experts out but those of rank 0.
            if not hasattr(parameter, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(parameter, True, split_dimension, 1)


def _grouped_experts(model: torch.nn.Module) -> Iterator[tuple[Any, int]]:
    """Modules, and the dimension in which TP ranks share their weights."""
    if extension.TEGroupedLinear is None:
        return
    for module in model.modules():
        if isinstance(module, extension.TEGroupedLinear):
            yield module, int(isinstance(module, extension.TERowParallelGroupedLinear))


def _accept_empty_extra_state(grouped_linear: type) -> None:
    """Let ``sharded_state_dict`` take an empty extra state under FP8.

    Recipes that compute scales anew in every pass have nothing to save: Transformer Engine gives an empty tensor, which
    Megatron-Core splits as if delayed scaling's tables were in it.
    """
    split = grouped_linear._split_extra_state  # type: ignore[attr-defined]
    if getattr(split, "accepts_empty", False):
        return

    @functools.wraps(split)
    def split_what_there_is(self: Any, state: Tensor) -> list[Tensor]:
        return [state] * self.num_gemms if state.numel() == 0 else split(self, state)

    split_what_there_is.accepts_empty = True  # type: ignore[attr-defined]
    grouped_linear._split_extra_state = split_what_there_is  # type: ignore[attr-defined]
