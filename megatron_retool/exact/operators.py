"""A decoder's operators on CPU tensors, each row's result independent of its neighbours, to the bit.

All take and return float32 or bfloat16 and compute in float32; a result is rounded once, to its input's dtype. None has
a gradient: the learner pairs each with the ordinary operator's (``learner.exact``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_retool.exact import kernels


def array(x: Tensor) -> Any:
    """The memory of ``x`` as an array; that of bfloat16 as uint16."""
    x = x.detach().contiguous()
    return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x weight^T + bias: [..., K], [N, K], [N] -> [..., N] of ``dtype``, by default that of ``x``."""
    rows = x.reshape(-1, x.size(-1))
    out = torch.empty(rows.size(0), weight.size(0))
    kernels.products(array(rows), array(weight), out.numpy())
    if bias is not None:
        out += bias.detach().float()
    return out.to(dtype or x.dtype).view(*x.shape[:-1], weight.size(0))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x weight / sqrt(mean(x^2) + eps) over the last dimension, in the shape and dtype of ``x``."""
    out = torch.empty(x.numel() // x.size(-1), x.size(-1))
    kernels.normalized(array(x.reshape(out.shape)), array(weight), np.float32(eps), out.numpy())
    return out.to(x.dtype).view(x.shape)


def rotary_table(frequencies: Sequence[float], length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [length, r / 2], of the angles position * frequency for r / 2 frequencies."""
    angles = np.arange(length, dtype=np.float64)[:, None] * np.array(frequencies, np.float64)
    return torch.from_numpy(np.cos(angles).astype(np.float32)), torch.from_numpy(np.sin(angles).astype(np.float32))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` [rows, heads, d] rotated by ``cos`` and ``sin`` float32 [rows, r / 2]; see ``kernels.rotated``."""
    out = torch.empty(x.shape)
    kernels.rotated(array(x), array(cos), array(sin), out.numpy())
    return out.to(x.dtype)


def attention(
    query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, starts: Tensor, counts: Tensor, scale: float
) -> Tensor:
    """Each query's softmax attention over the keys that it sees, in their order; [rows, heads, d] in its dtype.

    Args:
        query: [rows, heads, d].
        keys: [places, groups, d], of the dtype of ``query``, as ``values``.
        slots: integers; row i sees the places slots[starts[i]], ..., slots[starts[i] + counts[i] - 1].
        starts: int64 [rows], as ``counts``.
    """
    out = torch.empty(*query.shape[:2], values.size(-1))
    places = (array(slots.reshape(-1)), array(starts.long()), array(counts.long()))
    kernels.attended(array(query), array(keys), array(values), *places, np.float32(scale), out.numpy())
    return out.to(query.dtype)


def silu_and_multiply(x: Tensor) -> Tensor:
    """silu of the first half of the last dimension times the second: [..., 2 F] -> [..., F]."""
    rows = x.reshape(-1, x.size(-1))
    out = torch.empty(rows.size(0), rows.size(1) // 2)
    kernels.gated(array(rows), out.numpy())
    return out.to(x.dtype).view(*x.shape[:-1], out.size(1))


def top_experts(logits: Tensor, count: int) -> Tensor:
    """int64 [t, count]: the experts with the largest of the logits [t, E]; of equal ones those that come first."""
    return logits.detach().argsort(dim=-1, descending=True, stable=True)[:, :count]


def expert_gates(logits: Tensor, experts: Tensor, normalized: bool) -> Tensor:
    """float32 [t, E]: what the chosen experts' outputs are multiplied by, 0 for the others.

    Args:
        logits: float32 [t, E].
        experts: int64 [t, k].
        normalized: the softmax is over the chosen experts; else over all.
    """
    chosen = torch.zeros(logits.shape, dtype=torch.bool).scatter_(1, experts, True)
    out = torch.empty(logits.shape)
    kernels.gates_of(array(logits), chosen.numpy(), not normalized, out.numpy())
    return out


def log_normalizers(logits: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [rows] each: the largest of the float32 logits [rows, V], and log sum exp(logit - largest)."""
    out = torch.empty(logits.size(0), 2)
    kernels.log_normalizers(array(logits), out.numpy())
    largest, log_sum = out.unbind(1)
    return largest, log_sum


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probs, in the shape of the float32 logits [rows, V]."""
    largest, log_sum = log_normalizers(logits)
    return logits.sub(largest.unsqueeze(-1)).sub_(log_sum.unsqueeze(-1))
