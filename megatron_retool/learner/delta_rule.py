"""The gated delta rule (Gated Delta Networks, arXiv:2412.06464, section 3), chunk by chunk.

A head keeps a state S of d_k x d_v numbers, zero before a sequence.  Each token multiplies it by its decay, and
replaces the share beta of what the state says of the token's key by the token's value; the query reads the result:

    S_t = exp(g_t) S_(t-1) + k_t beta_t (v_t - exp(g_t) S_(t-1)^T k_t)^T        o_t = S_t^T q_t / sqrt(d_k)

Within a chunk of C tokens the changes are the solution of a triangular system (arXiv:2406.06484, section 3.2; with
decays: arXiv:2412.06464, section 3.3), so that only chunks follow one another.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Tokens of a chunk."""
_EPSILON = 1e-6
"""Added to the squared length of queries and keys."""


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, chunk: int = CHUNK
) -> Tensor:
    """What the queries of a batch of sequences read, in at least float32.

    A sequence may be followed by padding: what comes later changes nothing earlier.

    Args:
        query, key: [B, L, key heads, d_k]; made to unit length here.
        value: [B, L, value heads, d_v]; so many of them in turn as there are to a key head share its query and key.
        log_decay: [B, L, value heads], g <= 0.
        beta: [B, L, value heads], from 0 to 1.

    Returns:
        [B, L, value heads, d_v] in ``value``'s dtype.
    """
    batch, length, key_heads, key_dim = key.shape
    chunks = functools.partial(in_chunks, groups=key_heads, chunk=chunk)
    query, key, value = chunks(query), chunks(key), chunks(value)
    query, key = _unit(query) * key_dim**-0.5, _unit(key)
    log_decay, beta = chunks(log_decay.unsqueeze(-1)).squeeze(-1), chunks(beta.unsqueeze(-1))

    between = decays(log_decay)
    since_start = log_decay.cumsum(-1).exp().unsqueeze(-1)
    until_end = between[..., -1, :].unsqueeze(-1)
    transposed = key.transpose(-1, -2)
    # Row t: what token t changes, and what it would read of the state before the chunk.
    solved = torch.linalg.solve_triangular(
        key @ transposed * between * beta,
        torch.cat([beta * value, beta * since_start * key], -1),
        upper=False,
        unitriangular=True,
    )
    changes, reads = solved.split([value.size(-1), key_dim], -1)
    within, query, key = query @ transposed * between, query * since_start, key * until_end

    state = value.new_zeros(batch, key_heads, value.size(2), key_dim, value.size(-1))
    outputs = []
    parts = (x.unbind(3) for x in (changes, reads, within, query, key.transpose(-1, -2), since_start[..., -1:, :]))
    for own, read, attention, asked, written, decay in zip(*parts, strict=True):
        change = own - read @ state
        outputs.append(asked @ state + attention @ change)
        state = decay * state + written @ change
    out = torch.stack(outputs, 3).flatten(3, 4)[..., :length, :]
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


def in_chunks(x: Tensor, groups: int, chunk: int) -> Tensor:
    """[B, L, heads, d] -> [B, groups, heads of each, chunks, C, d] with C <= ``chunk``, in at least float32; zeros fill
    the last chunk."""
    length = x.size(1)
    size = min(chunk, length)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    x = F.pad(x, (0, 0, 0, 0, 0, -length % size))
    return x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).unflatten(3, (-1, size))


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _EPSILON).rsqrt()


def decays(log_decay: Tensor) -> Tensor:
    """[..., C] -> [..., C, C]: the decay from token j (column) to token i (row), 0 where j comes later.

    Sums over (j, i] are added up one by one: a difference of two sums from the chunk's start would lose the digits of
    the small one, in float32 a relative error of 1e-4 where decays are fast.
    """
    size = log_decay.size(-1)
    past = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril()
    each = log_decay.unsqueeze(-1).expand(*log_decay.shape, size).masked_fill(~past.tril(-1), 0.0)
    return each.cumsum(-2).masked_fill(~past, float("-inf")).exp()
