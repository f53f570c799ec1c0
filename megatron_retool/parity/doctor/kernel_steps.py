"""Kernels, one by one, against plain torch in float64: what is wrong here makes everything above it wrong."""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_retool.learner.transformer_engine import UNFUSED, attention_kernel
from megatron_retool.machine import installed
from megatron_retool.parity.doctor.outcome import Skipped, StepFigure
from megatron_retool.parity.doctor.session import DoctorSession

FP32, TF32, BF16 = 1e-5, 2e-3, 2e-2
"""Largest difference, relative to the largest value."""
TOKENS, HIDDEN, OUT, HEADS, GROUPS, HEAD_DIM = 384, 256, 512, 4, 2, 64
LENGTHS = (100, 28, 256)
"""Of packed sequences, TOKENS in all."""


class Comparison:
    """Collects figures; a kernel that raises is one that does not hold."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.figures: list[StepFigure] = []
        self._generator = torch.Generator().manual_seed(0)

    def random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Normal values on the device, which ``dtype`` holds."""
        return torch.randn(*shape, generator=self._generator).to(dtype).to(self.device)

    def check(self, name: str, kernel: Callable[[], Tensor], plain: Callable[[], Tensor], bound: float) -> None:
        """``kernel`` against ``plain``."""
        try:
            difference: float | str = relative_difference(kernel(), plain())
        except Exception as error:
            traceback.print_exc()
            difference = f"{type(error).__name__}: {error}"
        self.figures.append(StepFigure(name, difference, at_most=bound))


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Largest |difference| over the largest |expected|."""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    return float((found - expected).abs().max() / expected.abs().max())


def packed_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of each of LENGTHS, in float64: [TOKENS, HEADS, HEAD_DIM]."""
    outputs = []
    parts = (tensor.double().cpu().split(LENGTHS) for tensor in (query, key, value))
    for q, k, v in zip(*parts, strict=True):
        k, v = (each.repeat_interleave(HEADS // GROUPS, dim=1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
        scores = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -torch.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(outputs)


def boundaries() -> list[int]:
    """cu_seqlens of LENGTHS."""
    return [sum(LENGTHS[:count]) for count in range(len(LENGTHS) + 1)]


def torch_kernels(session: DoctorSession) -> list[StepFigure]:
    """torch's own matrix products, softmax and attention against float64."""
    result = Comparison(session.device)
    for dtype, bound in ((torch.float32, FP32), (torch.bfloat16, BF16)):
        name = str(dtype).removeprefix("torch.")
        a, b = result.random(TOKENS, HIDDEN, dtype=dtype), result.random(HIDDEN, OUT, dtype=dtype)
        query, key, value = (result.random(1, HEADS, LENGTHS[2], HEAD_DIM, dtype=dtype) for _ in range(3))
        result.check(f"matrix product, {name}", lambda: a @ b, lambda: a.double() @ b.double(), bound)  # noqa: B023
        result.check(f"softmax, {name}", lambda: b.log_softmax(-1), lambda: b.double().log_softmax(-1), bound)  # noqa: B023

        def plain() -> Tensor:
            q, k, v = (each.double() for each in (query, key, value))  # noqa: B023
            scores = (q @ k.mT / HEAD_DIM**0.5).masked_fill(
                torch.ones(LENGTHS[2], LENGTHS[2], device=q.device).triu(1).bool(), -torch.inf
            )
            return scores.softmax(-1) @ v

        result.check(
            f"attention, {name}",
            lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=True),  # noqa: B023
            plain,
            bound,
        )
    return result.figures


def transformer_engine(session: DoctorSession) -> list[StepFigure]:
    """The layers that Megatron-Core builds a model of."""
    session.need_gpus(1, "Transformer Engine")
    need("transformer_engine", "transformer-engine")
    import transformer_engine.pytorch as te

    result, dtype = Comparison(session.device), torch.bfloat16
    hidden = result.random(TOKENS, HIDDEN, dtype=dtype)
    options = {"params_dtype": dtype, "device": session.device}

    linear = te.Linear(HIDDEN, OUT, bias=False, **options)
    result.check("Linear", lambda: linear(hidden), lambda: hidden.double() @ linear.weight.double().T, BF16)
    result.check(
        "Linear, gradient of its weight",
        lambda: _gradient(linear.weight, linear(hidden)),
        lambda: torch.ones(OUT, TOKENS, dtype=torch.float64, device=hidden.device) @ hidden.double(),
        BF16,
    )
    norm = te.RMSNorm(HIDDEN, eps=1e-6, dtype=dtype, device=session.device)
    result.check("RMSNorm", lambda: norm(hidden), lambda: _normed(hidden), BF16)
    both = te.LayerNormLinear(HIDDEN, OUT, bias=False, normalization="RMSNorm", eps=1e-6, **options)
    result.check("LayerNormLinear", lambda: both(hidden), lambda: _normed(hidden) @ both.weight.double().T, BF16)
    splits = [TOKENS // 4, TOKENS // 2, TOKENS // 4]
    grouped = te.GroupedLinear(len(splits), HIDDEN, OUT, bias=False, **options)
    weights = [getattr(grouped, f"weight{index}") for index in range(len(splits))]
    result.check(
        "GroupedLinear",
        lambda: grouped(hidden, splits),
        lambda: torch.cat([p.double() @ w.double().T for p, w in zip(hidden.split(splits), weights, strict=True)]),
        BF16,
    )
    _check_packed_attention(result, "DotProductAttention, packed", transformer_engine_attention)
    kernel = attention_kernel()
    fused = StepFigure(f"fused attention ({kernel})", float(kernel != UNFUSED), at_least=1.0)
    result.check(
        "FusedAdam",
        lambda: _after_adam(te.optimizers.FusedAdam, hidden),
        lambda: _after_adam(torch.optim.AdamW, hidden),
        FP32,
    )
    return [StepFigure("transformer-engine", str(installed("transformer-engine"))), *result.figures, fused]


def transformer_engine_attention(query: Tensor, key: Tensor, value: Tensor, places: Tensor, longest: int) -> Tensor:
    """Transformer Engine's packed causal attention, [TOKENS, HEADS, HEAD_DIM]; ``places`` are cu_seqlens."""
    import transformer_engine.pytorch as te

    attention = te.DotProductAttention(
        HEADS, HEAD_DIM, num_gqa_groups=GROUPS, qkv_format="thd", attn_mask_type="padding_causal"
    )
    sizes = {"cu_seqlens_q": places, "cu_seqlens_kv": places, "max_seqlen_q": longest, "max_seqlen_kv": longest}
    output: Tensor = attention(query, key, value, **sizes)
    return output.view(TOKENS, HEADS, HEAD_DIM)


def flash_attn(session: DoctorSession) -> list[StepFigure]:
    """flash-attn's packed causal attention against float64."""
    session.need_gpus(1, "flash-attn")
    need("flash_attn", "flash-attn")
    from flash_attn import flash_attn_varlen_func

    def attend(query: Tensor, key: Tensor, value: Tensor, places: Tensor, longest: int) -> Tensor:
        output: Tensor = flash_attn_varlen_func(query, key, value, places, places, longest, longest, causal=True)
        return output

    result = Comparison(session.device)
    _check_packed_attention(result, "packed causal attention", attend)
    return [StepFigure("flash-attn", str(installed("flash-attn"))), *result.figures]


def apex(session: DoctorSession) -> list[StepFigure]:
    """Apex's fused weight gradient, which adds to a float32 buffer, against float64."""
    session.need_gpus(1, "Apex")
    need("fused_weight_gradient_mlp_cuda", "Apex's fused_weight_gradient_mlp_cuda")
    import fused_weight_gradient_mlp_cuda

    result = Comparison(session.device)
    hidden, above = (result.random(TOKENS, size, dtype=torch.bfloat16) for size in (HIDDEN, OUT))
    main = result.random(OUT, HIDDEN, dtype=torch.float32)

    def added() -> Tensor:
        gradient = main.clone()
        fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(hidden, above, gradient)
        return gradient

    result.check("weight gradient added", added, lambda: main.double() + above.double().T @ hidden.double(), TF32)
    return result.figures


def need(module: str, package: str) -> None:
    """Raise Skipped where the package is not installed."""
    if importlib.util.find_spec(module) is None:
        raise Skipped(f"{package} is not installed")


def _normed(hidden: Tensor) -> Tensor:
    wide = hidden.double()
    return wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def packed_heads(found: Comparison, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values of TOKENS tokens: [TOKENS, heads, HEAD_DIM] each."""
    return [found.random(TOKENS, heads, HEAD_DIM, dtype=dtype) for heads in (HEADS, GROUPS, GROUPS)]


def _check_packed_attention(
    found: Comparison, name: str, attend: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
) -> None:
    """``attend(query, key, value, cu_seqlens, longest)`` of LENGTHS, in bfloat16."""
    query, key, value = packed_heads(found, torch.bfloat16)
    places = torch.tensor(boundaries(), dtype=torch.int32, device=found.device)
    found.check(
        name,
        lambda: attend(query, key, value, places, max(LENGTHS)),
        lambda: packed_attention(query, key, value),
        BF16,
    )


def _gradient(weight: Tensor, output: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(output.float().sum(), [weight])
    return gradient


def _after_adam(optimizer: Callable[..., Any], start: Tensor) -> Tensor:
    """A parameter after three steps on gradients that are its own values."""
    parameter = torch.nn.Parameter(start.float().clone())
    steps = optimizer([parameter], lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    for _ in range(3):
        parameter.grad = parameter.detach().clone()
        steps.step()
    return parameter
