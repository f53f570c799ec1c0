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


_ROWS_TO_WIDEN = 64
"""From so many rows on, to make float32 of bfloat16 beforehand costs less than to do it in every tile of a product."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x weight^T + bias: [..., K], [N, K], [N] -> [..., N] of ``dtype``, by default that of ``x``."""
    rows = x.detach().reshape(-1, x.size(-1))
    if rows.size(0) >= _ROWS_TO_WIDEN:
        rows, weight = rows.float(), weight.detach().float()
    out = torch.empty(rows.size(0), weight.size(0))
    kernels.products(array(rows), array(weight), out.numpy())
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


def _normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.numel() // x.size(-1), x.size(-1))
    kernels.normalized(array(x.reshape(out.shape)), array(weight), np.float32(eps), out.numpy())
    return out.view(x.shape)


def rotary_table(frequencies: Sequence[float], length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [length, r / 2], of the angles position * frequency for r / 2 frequencies."""
    angles = np.arange(length, dtype=np.float64)[:, None] * np.array(frequencies, np.float64)
    return torch.from_numpy(np.cos(angles).astype(np.float32)), torch.from_numpy(np.sin(angles).astype(np.float32))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` [rows, heads, d] rotated by ``cos`` and ``sin`` float32 [rows, r / 2]; see ``kernels.rotated``."""
    out = torch.empty(x.shape)
    kernels.rotated(array(x), array(cos), array(sin), out.numpy())
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
    out = torch.empty(*query.shape[:2], width or values.size(-1))
    places = (array(slots.reshape(-1)), array(starts.long()), array(counts.long()))
    kernels.attended(array(query), array(keys), array(values), *places, np.float32(scale), out.numpy())
    return out.to(query.dtype)


def last_keys(starts: Tensor, counts: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """``starts`` and ``counts`` of ``attention`` where a query sees at most ``window`` keys, itself among them."""
    seen = counts.clamp(max=window)
    return starts + counts - seen, seen


def silu_and_multiply(x: Tensor) -> Tensor:
    """silu of the first half of the last dimension times the second: [..., 2 F] -> [..., F]."""
    rows = x.reshape(-1, x.size(-1))
    out = torch.empty(rows.size(0), rows.size(1) // 2)
    kernels.gated(array(rows), out.numpy())
    return out.to(x.dtype).view(*x.shape[:-1], out.size(1))


def sigmoid(logits: Tensor) -> Tensor:
    """Of float32 logits, in float32."""
    out = torch.empty(logits.shape)
    kernels.sigmoids(array(logits.reshape(-1, logits.size(-1))), out.view(-1, logits.size(-1)).numpy())
    return out


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
        closed = torch.ones(worth.shape, dtype=torch.bool).scatter_(1, top_experts(worth, kept), False)
        scores = members.masked_fill(closed.unsqueeze(-1), -torch.inf).flatten(-2)
    return scores.argsort(dim=-1, descending=True, stable=True)[:, :count]


def expert_gates(scores: Tensor, experts: Tensor, normalized: bool, kind: str = "softmax") -> Tensor:
    """float32 [t, E]: what the chosen experts' outputs are multiplied by, 0 for the others.

    Args:
        scores: float32 [t, E]: logits for "softmax", their sigmoids for "sigmoid".
        experts: int64 [t, k].
        normalized: the gates of a token add up to 1; else they are shares of all experts, or the scores themselves.
    """
    chosen = torch.zeros(scores.shape, dtype=torch.bool).scatter_(1, experts, True)
    out = torch.empty(scores.shape)
    if kind == "softmax":
        kernels.gates_of(array(scores), chosen.numpy(), not normalized, out.numpy())
    elif normalized:
        kernels.shares_of(array(scores), chosen.numpy(), out.numpy())
    else:
        out = scores.masked_fill(~chosen, 0.0)
    return out


def gated_sum(x: Tensor, shared: Tensor, gate: Tensor) -> Tensor:
    """x + gate shared, rounded once: [rows, h], [rows, h] and float32 [rows, 1] -> [rows, h] in the dtype of ``x``."""
    return (x.float() + gate * shared.float()).to(x.dtype)


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """silu of each feature's causal convolution: [..., features, width - 1 + tokens] -> [..., features, tokens].

    ``weight`` is [features, width], the present token's last; in the place of tokens before a text stands 0.
    """
    lines = x.reshape(-1, *x.shape[-2:])
    out = torch.empty(lines.size(0), lines.size(1), lines.size(2) - weight.size(-1) + 1)
    kernels.convolved(array(lines), array(weight), out.numpy())
    return out.to(x.dtype).view(*x.shape[:-1], out.size(-1))


def delta_net_rates(steps: Tensor, logits: Tensor, log_factors: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """-exp(log_factors) softplus(steps + bias) and sigmoid(logits), float32 [tokens, heads], of [tokens, heads] each;
    ``log_factors`` and ``bias`` [heads]."""
    log_decays, betas = torch.empty(steps.shape), torch.empty(steps.shape)
    operands = (array(each) for each in (steps, logits, log_factors, bias))
    kernels.rates(*operands, log_decays.numpy(), betas.numpy())
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
    out, memory = torch.empty(value.shape), states.view(-1, states.size(-1))
    operands = (array(each) for each in (query, key, value, log_decays, betas))
    places = (array(slots.long()), array(starts.long()))
    kernels.delta_rule(*operands, np.float32(_UNIT_LENGTH_EPS), memory.numpy(), *places, out.numpy())
    return out.to(value.dtype)


_UNIT_LENGTH_EPS = 1e-6
"""Added to the squared length of queries and keys, as in ``learner.delta_rule``."""


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
