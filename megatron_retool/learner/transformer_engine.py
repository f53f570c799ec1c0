"""The learner's choice of Transformer Engine's block scales."""

from __future__ import annotations

import os

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
