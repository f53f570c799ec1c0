"""A decoder's operators, each row's result independent of its neighbours, to the bit.

On a CPU ``kernels`` computes them, on a GPU ``gpu_kernels``, to other bits. All take and return float32 or bfloat16 and
compute in float32; a result is rounded once, to its input's dtype. None has a gradient: the learner pairs each with the
ordinary operator's (``learner.exact``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_retool.exact import kernels


def _array(x: Any) -> Any:
    """What a compiled kernel takes: the memory of a tensor as an array, that of bfloat16 as uint16; float32."""
    if isinstance(x, Tensor):
        x = x.detach().contiguous()
        return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()
    return np.float32(x) if isinstance(x, float) else x


def _compute(kernel: Callable[..., None], first: Tensor, *operands: Tensor | float) -> None:
    """Call a kernel of ``kernels``, or the one of its name for a GPU, where the operands lie; it fills some of them."""
    if first.is_cuda:
        from megatron_retool.exact import gpu_kernels

        kernel = getattr(gpu_kernels, kernel.__name__)
        kernel(*(_aligned(x) if isinstance(x, Tensor) else x for x in (first, *operands)))
    else:
        kernel(*map(_array, (first, *operands)))


def _aligned(x: Tensor) -> Tensor:
    """Contiguous, from a multiple of 16 bytes on, as what torch allocates is and a slice of it may not be."""
    x = x.detach().contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


_ROWS_TO_WIDEN = 64
"""From so many rows on, to make float32 of bfloat16 beforehand costs less than to do it in every tile of a product."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x weight^T + bias: [..., K], [N, K], [N] -> [..., N] of ``dtype``, by default that of ``x``."""
    rows = x.detach().reshape(-1, x.size(-1))
    if rows.size(0) >= _ROWS_TO_WIDEN and not rows.is_cuda:
        rows, weight = rows.float(), weight.detach().float()
    out = _empty(x, rows.size(0), weight.size(0))
    _compute(kernels.products, rows, weight, out)
    if bias is not None:
        out += bias.detach().float()
    return out.to(dtype or x.dtype).view(*x.shape[:-1], weight.size(0))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x weight / sqrt(mean(x^2) + eps) over the last dimension, in the shape and dtype of ``x``."""
    return _normalized(x, weight, eps).to(x.dtype)


def gated_rms_norm(x: Tensor, weight: Tensor, eps: float, gate: Tensor) -> Tensor:
    """``rms_norm`` times silu(gate), for a gate of the shape of ``x``."""
    wide = gate.detach().float()
    return _normalized(x, weight, eps).mul_(wide).mul_(sigmoid(wide)).to(x.dtype)


def _empty(x: Tensor, *shape: int) -> Tensor:
    """float32, where ``x`` lies."""
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = _empty(x, x.numel() // x.size(-1), x.size(-1))
    _compute(kernels.normalized, x.reshape(out.shape), weight, float(eps), out)
    return out.view(x.shape)


def rotary_table(frequencies: Sequence[float], length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [length, r / 2], of the angles position * frequency for r / 2 frequencies."""
    angles = np.arange(length, dtype=np.float64)[:, None] * np.array(frequencies, np.float64)
    return torch.from_numpy(np.cos(angles).astype(np.float32)), torch.from_numpy(np.sin(angles).astype(np.float32))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` [rows, heads, d] rotated by ``cos`` and ``sin`` float32 [rows, r / 2]; see ``kernels.rotated``."""
    out = _empty(x, *x.shape)
    _compute(kernels.rotated, x, cos, sin, out)
    return out.to(x.dtype)


def linear_of_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Each head's product with a matrix of its own: [rows, heads, K], [heads, N, K] -> [rows, heads, N]."""
    return torch.stack([linear(rows, matrix) for rows, matrix in zip(x.unbind(1), weight, strict=True)], dim=1)


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
    scale: float,
    width: int | None = None,
) -> Tensor:
    """Each query's softmax attention over the keys that it sees, in their order; [rows, heads, d] in its dtype.

    Args:
        query: [rows, heads, d].
        keys: [places, groups, d], of the dtype of ``query``, as ``values``.
        slots: integers; row i sees the places slots[starts[i]], ..., slots[starts[i] + counts[i] - 1].
        starts: int64 [rows], as ``counts``.
        width: how many features the values have, the first ones; None: all.
    """
    out = _empty(query, *query.shape[:2], width or values.size(-1))
    places = slots.reshape(-1), starts.long(), counts.long()
    _compute(kernels.attended, query, keys, values, *places, float(scale), out)
    return out.to(query.dtype)


def last_keys(starts: Tensor, counts: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """``starts`` and ``counts`` of ``attention`` where a query sees at most ``window`` keys, itself among them."""
    seen = counts.clamp(max=window)
    return starts + counts - seen, seen


def silu_and_multiply(x: Tensor) -> Tensor:
    """silu of the first half of the last dimension times the second: [..., 2 F] -> [..., F]."""
    return _gated(kernels.gated, x)


def gelu_and_multiply(x: Tensor) -> Tensor:
    """As ``silu_and_multiply``, by GELU's form with tanh."""
    return _gated(kernels.gelu_gated, x)


def _gated(kernel: Callable[..., None], x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.size(-1))
    out = _empty(x, rows.size(0), rows.size(1) // 2)
    _compute(kernel, rows, out)
    return out.to(x.dtype).view(*x.shape[:-1], out.size(1))


def sigmoid(logits: Tensor) -> Tensor:
    """Of float32 logits, in float32."""
    out = _empty(logits, logits.numel() // logits.size(-1), logits.size(-1))
    _compute(kernels.sigmoids, logits.reshape(out.shape), out)
    return out.view(logits.shape)


def multiply_by_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """x sigmoid(gate), rounded once, for a gate of the shape of ``x``."""
    return (x.detach().float() * sigmoid(gate.detach().float())).to(x.dtype)


def top_experts(scores: Tensor, count: int, groups: tuple[int, int] | None = None, of_a_group: int = 2) -> Tensor:
    """int64 [t, count]: the experts with the largest of the scores [t, E]; of equal ones those that come first.

    Args:
        groups: (n, m): of n groups of neighbours only the m best take part; None: all experts do.
        of_a_group: how many of a group's best scores, added up, are the group's.
    """
    scores = scores.detach()
    if groups is not None:
        number, kept = groups
        members = scores.unflatten(-1, (number, -1))
        worth = members.sort(dim=-1, descending=True).values[..., :of_a_group].sum(-1)
        closed = torch.ones_like(worth, dtype=torch.bool).scatter_(1, top_experts(worth, kept), False)
        scores = members.masked_fill(closed.unsqueeze(-1), -torch.inf).flatten(-2)
    return scores.argsort(dim=-1, descending=True, stable=True)[:, :count]


def expert_gates(scores: Tensor, experts: Tensor, normalized: bool, kind: str = "softmax") -> Tensor:
    """float32 [t, E]: what the chosen experts' outputs are multiplied by, 0 for the others.

    Args:
        scores: float32 [t, E]: logits for "softmax", their sigmoids for "sigmoid".
        experts: int64 [t, k].
        normalized: the gates of a token add up to 1; else they are shares of all experts, or the scores themselves.
    """
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, experts, True)
    out = _empty(scores, *scores.shape)
    if kind == "softmax":
        _compute(kernels.gates_of, scores, chosen, not normalized, out)
    elif normalized:
        _compute(kernels.shares_of, scores, chosen, out)
    else:
        out = scores.masked_fill(~chosen, 0.0)
    return out


def gated_sum(x: Tensor, shared: Tensor, gate: Tensor) -> Tensor:
    """x + gate shared, rounded once: [rows, h], [rows, h] and float32 [rows, 1] -> [rows, h] in the dtype of ``x``."""
    return (x.float() + gate * shared.float()).to(x.dtype)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu of each feature's causal convolution: [..., features, width - 1 + tokens] -> [..., features, tokens].

    ``weight`` is [features, width], the present token's last, and ``bias`` [features]; in the place of tokens before a
    text stands 0.
    """
    lines = x.reshape(-1, *x.shape[-2:])
    out = _empty(x, lines.size(0), lines.size(1), lines.size(2) - weight.size(-1) + 1)
    _compute(kernels.convolved, lines, weight, weight.new_zeros(lines.size(1)) if bias is None else bias, out)
    return out.to(x.dtype).view(*x.shape[:-1], out.size(-1))


def delta_net_rates(steps: Tensor, logits: Tensor, log_factors: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """-exp(log_factors) softplus(steps + bias) and sigmoid(logits), float32 [tokens, heads], of [tokens, heads] each;
    ``log_factors`` and ``bias`` [heads]."""
    log_decays, betas = _empty(steps, *steps.shape), _empty(steps, *steps.shape)
    _compute(kernels.rates, steps, logits, log_factors, bias, log_decays, betas)
    return log_decays, betas


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decays: Tensor,
    betas: Tensor,
    states: Tensor,
    slots: Tensor,
    starts: Tensor,
) -> Tensor:
    """What each query reads of its head's memory, token by token; [tokens, heads, V] in the dtype of ``value``.

    Args:
        query, key: [tokens, key heads, K], made to unit length here.
        value: [tokens, heads, V].
        log_decays, betas: see ``delta_net_rates``.
        states: float32 [slots, heads, V, K], contiguous: the memories of the slots, changed in place.
        slots: int64 [texts].
        starts: int64 [texts + 1], where the texts' tokens begin, and the last one's end.
    """
    out, memory = _empty(value, *value.shape), _rows_of(states)
    operands = query, key, value, log_decays, betas
    _compute(kernels.delta_rule, *operands, _UNIT_LENGTH_EPS, memory, slots.long(), starts.long(), out)
    return out.to(value.dtype)


def state_space(
    value: Tensor,
    steps: Tensor,
    rates: Tensor,
    skip: Tensor,
    bias: Tensor,
    write: Tensor,
    read: Tensor,
    states: Tensor,
    slots: Tensor,
    starts: Tensor,
) -> Tensor:
    """What each token reads of its head's memory in Mamba-2, token by token; [tokens, heads, V] as ``value``.

    Args:
        value: [tokens, heads, V].
        steps: [tokens, heads], before softplus.
        rates, skip, bias: [heads], A (float32, negative), D and the steps' bias.
        write, read: [tokens, groups, N], of each group of heads.
        states, slots, starts: as in ``delta_rule``, with N in the place of K.
    """
    out, memory = _empty(value, *value.shape), _rows_of(states)
    vectors = write.float(), read.float()
    operands = value, steps, rates, skip, bias, *vectors, memory, slots.long(), starts.long()
    _compute(kernels.state_space, *operands, out)
    return out.to(value.dtype)


def norm_of_gated(x: Tensor, weight: Tensor, eps: float, gate: Tensor) -> Tensor:
    """RMS norm of x silu(gate), [..., N] in the dtype of ``x``, rounded once; ``weight`` [N]."""
    gated = silu_and_multiply(torch.cat([gate, x], -1).float())
    return rms_norm(gated, weight.float(), eps).to(x.dtype)


def _rows_of(states: Tensor) -> Tensor:
    """[slots x heads x V, K] in the memory of ``states``, which kernels change."""
    if states.is_cuda and states.data_ptr() % 16:
        raise ValueError("states begin where a kernel for a GPU would get a copy: at no multiple of 16 bytes")
    return states.view(-1, states.size(-1))


_UNIT_LENGTH_EPS = 1e-6
"""Added to the squared length of queries and keys, as in ``learner.delta_rule``."""


def log_normalizers(logits: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [rows] each: the largest of the float32 logits [rows, V], and log sum exp(logit - largest)."""
    out = _empty(logits, logits.size(0), 2)
    _compute(kernels.log_normalizers, logits, out)
    largest, log_sum = out.unbind(1)
    return largest, log_sum


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probs, in the shape of the float32 logits [rows, V]."""
    largest, log_sum = log_normalizers(logits)
    return logits.sub(largest.unsqueeze(-1)).sub_(log_sum.unsqueeze(-1))


def probabilities(logits: Tensor) -> Tensor:
    """Exponentials of ``log_softmax``, by which filters choose tokens."""
    out = _empty(logits, *logits.shape)
    _compute(kernels.exponentials, log_softmax(logits), out)
    return out
