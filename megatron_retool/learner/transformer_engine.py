"""Transformer Engine's block scales, which the learner chooses, the sizes of matrices that its recipes take, weights
kept in FP8, and its attention kernel, which it chooses itself."""

from __future__ import annotations

import copy
import functools
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from conversion.model.block_fp8 import has_power_of_two_scales
from megatron_retool.config import ConfigError
from megatron_retool.learner.precision import FP8_RECIPES

logger = logging.getLogger(__name__)

UNFUSED = "torch, one step after another"
_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
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


def check_matrices(model: torch.nn.Module, recipe: str) -> None:
    """Refuse a model that Transformer Engine's FP8 or FP4 products would stop at, before weights are read.

    Raises:
        ConfigError: naming the first matrix whose sizes on this rank are no multiples of what the recipe wants.
    """
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    multiple = FP8_RECIPES[recipe].matrix_multiple
    for name, module in model.named_modules():
        for weight in module.parameters(recurse=False) if isinstance(module, TransformerEngineBaseModule) else ():
            if weight.dim() == 2 and any(size % multiple for size in weight.shape):
                rows, columns = weight.shape
                raise ConfigError(
                    f"learner.fp8.recipe={recipe} multiplies matrices whose sizes are multiples of {multiple}, and "
                    f"{name} has {rows} x {columns} on a rank: lower learner.tensor_model_parallel_size, choose "
                    "another recipe, or set it to null"
                )


def keep_weights_in_fp8(config: TransformerConfig, chunks: Sequence[Any]) -> None:
    """Replace the weights of layers that compute in FP8 or FP4 by such tensors (learner.fp8.parameters).

    The optimizer takes its main parameters from the floats that each of these parameters keeps on the host until then.
    Transformer Engine would build them so before weights are loaded, and the optimizer would begin with random ones.
    """
    from megatron.core.fp4_utils import get_fp4_context
    from megatron.core.fp8_utils import get_fp8_context
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    config, context = copy.copy(config), get_fp4_context if config.fp4 else get_fp8_context
    config.fp8_param = config.fp4_param = True
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            with context(config, layer.layer_number - 1, is_init=True):
                for module in layer.modules() if FP8GlobalStateManager.with_fp8_parameters() else ():
                    if isinstance(module, TransformerEngineBaseModule):
                        _keep_weights_in_fp8(module)


@torch.no_grad()
def _keep_weights_in_fp8(module: Any) -> None:
    from transformer_engine.pytorch.module.base import _attach_high_precision_init_val

    module.primary_weights_in_fp8 = module.preserve_high_precision_init_val = True
    module.init_fp8_metadata(num_gemms=getattr(module, "num_gemms", 1))
    for name, parameter in list(module.named_parameters(recurse=False)):
        number = module.param_init_meta[name].fp8_meta_index
        if number is None:
            continue
        quantizer = module.quantizers["scaling_fwd"][number]
        quantizer.set_usage(rowwise=True, columnwise=True)
        quantizer.internal = False
        rounded = torch.nn.Parameter(quantizer(parameter.detach()))
        rounded.__dict__.update(parameter.__dict__)  # how tensor and expert parallelism cut it
        _attach_high_precision_init_val(rounded, parameter.detach().cpu())
        setattr(module, name, rounded)


def attention_kernel() -> str | None:
    """What computed Transformer Engine's last attention in this process; None where it computed none."""
    chosen = getattr(sys.modules.get(_ATTENTION), "_attention_backends", {})
    if chosen.get("use_flash_attention"):
        return f"flash-attn {chosen['flash_attention_backend']}"
    if chosen.get("use_fused_attention"):
        return f"cuDNN, {getattr(chosen['fused_attention_backend'], 'name', chosen['fused_attention_backend'])}"
    return UNFUSED if chosen.get("use_unfused_attention") else None


def watch_attention() -> None:
    """Warn once in this process where Transformer Engine found no fused kernel, for it says nothing itself."""
    if attention_kernel() == UNFUSED:
        _warn_of_unfused_attention()


@functools.cache
def _warn_of_unfused_attention() -> None:
    logger.warning(
        "Transformer Engine computes attention without a fused kernel: many times slower, and its memory grows with "
        "the square of a sequence's length. With NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 the learner's log says why "
        "(docs/failures.md)"
    )
