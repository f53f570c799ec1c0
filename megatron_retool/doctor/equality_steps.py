"""An engine's operators against the learner's on the same numbers: where engine and learner differ on this GPU.

An engine with deterministic inference computes a row by the same operations whatever stands beside it, and so does
Megatron-Core with ``batch_invariant_mode``. Whether both then get the same number is another question, operator by
operator. docs/mismatch.md has what is known without a GPU: matrix products and log-softmax are the same floating-point
operations in the same order, RMSNorm is not.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_retool.doctor.kernel_steps import (
    HIDDEN,
    LENGTHS,
    OUT,
    TOKENS,
    Comparison,
    boundaries,
    need,
    packed_heads,
    transformer_engine_attention,
)
from megatron_retool.doctor.outcome import StepFigure
from megatron_retool.doctor.session import DoctorSession

_EPSILON = 1e-6


@dataclass(frozen=True)
class OperatorPair:
    """One operator of both sides.

    Attributes:
        rows: what both are given, one token a row.
        same: both are the same floating-point operations in the same order, so that nothing but 0 is right.
    """

    name: str
    engine: Callable[[Tensor], Tensor]
    learner: Callable[[Tensor], Tensor]
    rows: Tensor
    same: bool = False


def engine_operators(session: DoctorSession) -> list[StepFigure]:
    """How far each operator's two sides are apart, and how much a row depends on its neighbours."""
    session.need_gpus(1, "an engine's kernels")
    need("sglang", "sglang")
    need("transformer_engine", "transformer-engine")
    figures = []
    for pair in operator_pairs(Comparison(session.device)):
        figures += measure(pair)
    return [*figures, *_attention(Comparison(session.device))]


def operator_pairs(inputs: Comparison) -> list[OperatorPair]:
    """Operators that take a token a row, in bfloat16."""
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.transformer.custom_layers import batch_invariant_kernels as learner
    from sglang.kernels.ops.activation import silu_and_mul
    from sglang.srt.batch_invariant_ops import batch_invariant_ops as engine

    # As SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM=0 does before the import: Megatron-Core's kernel is Triton's too.
    vars(engine)["_ENABLE_MM_DEEPGEMM"] = False
    dtype = torch.bfloat16
    hidden, gate_and_up = (inputs.random(TOKENS, size, dtype=dtype) for size in (HIDDEN, 2 * OUT))
    matrix, weight = inputs.random(OUT, HIDDEN, dtype=dtype).t(), inputs.random(HIDDEN, dtype=dtype)
    logits = inputs.random(TOKENS, 64 * OUT, dtype=torch.float32)
    return [
        OperatorPair(
            "matrix product",
            lambda x: engine.matmul_persistent(x, matrix),
            lambda x: learner.matmul_persistent(x, matrix),
            hidden,
            same=True,
        ),
        OperatorPair(
            "matrix product, learner without batch_invariant_mode",
            lambda x: engine.matmul_persistent(x, matrix),
            lambda x: x @ matrix,
            hidden,
        ),
        OperatorPair("log-softmax", engine.log_softmax, learner.log_softmax, logits, same=True),
        OperatorPair(
            "RMSNorm",
            lambda x: engine.rms_norm_batch_invariant(x, weight, _EPSILON),
            lambda x: learner.rmsnorm_batch_invariant(x, weight, _EPSILON),
            hidden,
        ),
        OperatorPair("SwiGLU", silu_and_mul, fused_bias_swiglu.swiglu, gate_and_up),
    ]


def measure(pair: OperatorPair) -> list[StepFigure]:
    """Largest |engine - learner|, and of each side the largest |row by itself - row among others|."""
    rows, bound = pair.rows, 0.0 if pair.same else None
    between = _apart(lambda: pair.engine(rows), lambda: pair.learner(rows))
    figures = [StepFigure(f"{pair.name}: engine against learner", between, at_most=bound)]
    for name, side in (("engine", pair.engine), ("learner", pair.learner)):
        alone = _apart(lambda: side(rows[:1]), lambda: side(rows)[:1])  # noqa: B023
        figures.append(StepFigure(f"{pair.name}: a row by itself, {name}", alone, at_most=bound))
    return figures


def _apart(first: Callable[[], Tensor], second: Callable[[], Tensor]) -> float | str:
    """Largest |difference|; a text where one side raises."""
    try:
        return float((first().double() - second().double()).abs().max())
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"


def _attention(inputs: Comparison) -> list[StepFigure]:
    """An engine's over pages of its cache, keys in one piece, against Transformer Engine's over packed texts."""
    query, key, value = packed_heads(inputs, torch.bfloat16)
    starts, longest = torch.tensor(boundaries(), dtype=torch.int32, device=inputs.device), max(LENGTHS)

    def paged() -> Tensor:
        from sglang.kernels.ops.attention.flash_attention_v3 import flash_attn_with_kvcache

        pages = (starts[:-1, None] + torch.arange(longest, device=query.device)).clamp(max=TOKENS - 1).int()
        found: Tensor = flash_attn_with_kvcache(
            q=query,
            k_cache=key.unsqueeze(1),
            v_cache=value.unsqueeze(1),
            page_table=pages,
            cache_seqlens=starts.diff(),
            cu_seqlens_q=starts,
            max_seqlen_q=longest,
            causal=True,
            num_splits=1,
        )
        return found

    difference = _apart(paged, lambda: transformer_engine_attention(query, key, value, starts, longest))
    return [StepFigure("attention: engine against learner", difference)]
