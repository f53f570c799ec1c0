"""Gated delta nets (arXiv:2412.06464, equation 10), the linear attention of Qwen3-Next and Qwen3.5, token by token.

A head keeps a matrix S [value size, key size] in place of a cache. A token lets it decay, corrects what it answers to
its key, and reads it by its query:

    S = exp(g) S        S = S + beta (v - S k) k^T        o = S q

SGLang's own functions for a CPU, which these stand for by name and arguments, want a processor with AMX. Everything is
computed in float32, and a request's numbers do not depend on its neighbours, nor on where a prefill was cut.

Arithmetic and SGLang's calls are apart: another plugin may exchange ``convolved``, ``rates``, ``answers``, ``norm``,
``gated_norm`` and ``times_sigmoid``, whose docstrings say what they are given, by their names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from sglang_cpu_engine import compiled

_NORM_EPSILON = 1e-6
_AT_A_TIME = 32
"""float32 numbers that torch takes at a time, in two of the widest vector registers."""


def convolve_prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: Any,
) -> Tensor:
    """The causal convolution of new tokens of some requests, each feature by itself: like ``x``.

    Args:
        x: [features, new tokens of all requests].
        weight: [features, width].
        conv_states: [slots, features, width - 1], the last tokens before these; in place those before the next ones.
        has_initial_state: bool [requests], whether there were tokens before.
        cache_indices: [requests], their slots.
        query_start_loc: [requests + 1], where their tokens begin.
    """
    output, width = torch.empty_like(x), weight.shape[1]
    starts = query_start_loc.tolist()
    for each, (slot, begun) in enumerate(zip(cache_indices.tolist(), has_initial_state.tolist(), strict=True)):
        new = slice(starts[each], starts[each + 1])
        before = conv_states[slot] if begun else torch.zeros_like(conv_states[slot])
        known = torch.cat([before.to(x.dtype), x[:, new]], 1)
        output[:, new] = convolved(known, weight, bias, activation)
        conv_states[slot] = known[:, known.shape[1] - width + 1 :].to(conv_states.dtype)
    return output


def convolve_next(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: Tensor,
    **_: Any,
) -> Tensor:
    """``convolve_prefill`` of one new token of each request, ``x`` [requests, features]."""
    slots = conv_state_indices.long()
    known = torch.cat([conv_state[slots].to(x.dtype), x[..., None]], -1)
    conv_state[slots] = known[..., 1:].to(conv_state.dtype)
    return convolved(known, weight, bias, activation)[..., 0]


def convolved(known: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """[…, features, tokens] of ``known`` […, features, width - 1 + tokens], in its dtype, and of ``activation``.

    ``weight`` [features, width] and ``bias`` [features].
    """
    width, known_values, factors = weight.shape[1], known.float(), weight.float()
    tokens = known.shape[-1] - width + 1
    total = factors[:, :1] * known_values[..., :tokens]
    for place in range(1, width):
        total = total + factors[:, place : place + 1] * known_values[..., place : place + tokens]
    if bias is not None:
        total = total + bias.float()[:, None]
    return (silu(total) if activation in ("silu", "swish") else total).to(known.dtype)


def gates(a_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithm of the decay and beta, float32 [1, tokens, value heads], of ``a`` and ``b`` [tokens, value heads]."""
    log_decay, beta = rates(a, b, a_log, dt_bias)
    return log_decay[None], beta[None]


def rates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """-exp(a_log) softplus(a + dt_bias) and sigmoid(b), float32 [tokens, heads] of ``a`` and ``b`` [tokens, heads]."""
    steps = in_whole_vectors(softplus, a.float() + dt_bias.float())
    return -a_log.float().exp() * steps, in_whole_vectors(torch.sigmoid, b.float())


def in_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function``, of each element of ``x`` [tokens, heads].

    What is left of a tensor behind its last whole vectors torch computes by other instructions, to other bits; how many
    tokens there are would decide which elements those are.
    """
    heads = x.shape[-1]
    return function(pad(x, (0, -heads % _AT_A_TIME)))[:, :heads]


def delta_rule(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """What new tokens of some requests read, like ``v``; no states within them are kept.

    Args:
        q, k: [1, tokens, key heads, key size], not normed yet.
        v: [1, tokens, value heads, value size].
        g, beta: float32 [1, tokens, value heads].
        initial_state: float32 [slots, value heads, value size, key size]; in place the states behind these tokens.
        initial_state_indices: [requests], their slots.
        cu_seqlens: [requests + 1], where their tokens begin.
    """
    read = answers(q[0], k[0], v[0], g[0], beta[0], initial_state, initial_state_indices.long(), cu_seqlens.long())
    return read[None], None, None


def answers(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, states: Tensor, slots: Tensor,
    starts: Tensor,
) -> Tensor:  # fmt: skip
    """[tokens, heads, value size] in the dtype of ``value``, for what ``delta_rule`` is given, without the first 1."""
    query, key = (_unit(each.float()) for each in (query, key))
    output, decay = torch.empty(value.shape, dtype=torch.float32), in_whole_vectors(torch.exp, log_decay)
    operands = (query * query.shape[-1] ** -0.5, key, value.float().contiguous(), decay.contiguous(), beta.contiguous())
    _compiled()(*(each.numpy() for each in (*operands, states, slots, starts, output)))
    return output.to(value.dtype)


def delta_rule_of_next(
    a_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, states: Tensor,
    slots: Tensor, starts: Tensor, *_: Any,
) -> Tensor:  # fmt: skip
    """``delta_rule`` of one new token of each request, whose gates are not computed yet."""
    g, beta = gates(a_log, a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1]), dt_bias)
    return delta_rule(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=states, initial_state_indices=slots, cu_seqlens=starts
    )[0]


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPSILON)


def gated_rms_norm(module: Any, x: Tensor, z: Tensor, *arguments: Any, **kwargs: Any) -> Tensor:
    """In place of the forward method of SGLang's module."""
    return gated_norm(
        x, module.weight, module.eps, z.reshape(x.shape), "sigmoid" if module.activation == "sigmoid" else "silu"
    )


def gated_norm(x: Tensor, weight: Tensor, eps: float, gate: Tensor, activation: str) -> Tensor:
    """RMS norm of ``x`` times silu or sigmoid of ``gate``, which has its shape; rounded once, to its dtype."""
    values, wide = _normed(x, weight.float(), eps), gate.float()
    return (values * (wide.sigmoid() if activation == "sigmoid" else silu(wide))).to(x.dtype)


def sigmoid_mul(x: Tensor, gate: Tensor) -> None:
    """``times_sigmoid`` in place."""
    x.copy_(times_sigmoid(x, gate.reshape(x.shape)))


def times_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """x sigmoid(gate), rounded once, for a gate of the shape of ``x``."""
    return (x.float() * gate.float().sigmoid()).to(x.dtype)


def heads_normed(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, size: int) -> tuple[Tensor, ...]:
    """The RMS norm of each head of ``q`` and ``k`` [tokens, heads * size], with 1 added to its weight."""
    pairs = ((q, q_weight), (k, k_weight))
    return tuple(norm(x.reshape(-1, size), 1 + weight.float(), eps) for x, weight in pairs)


def heads_normed_beside_gates(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, size: int, heads: int
) -> tuple[Tensor, ...]:
    """``heads_normed`` where a gate lies behind the query of each head, and the gates."""
    query, gate = q_gate.reshape(-1, heads, 2, size).unbind(2)
    return *heads_normed(query, k, q_weight, k_weight, eps, size), gate.contiguous()


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of ``x`` times float32 ``weight``, rounded once, to the dtype of ``x``."""
    return _normed(x, weight, eps).to(x.dtype)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    values = x.float()
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * weight


def projections_split(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_size: int, value_size: int
) -> tuple[Tensor, ...]:
    """q, k and v in one tensor, z [tokens, value heads, value size], b and a [tokens, value heads]."""
    keys, values = key_heads * key_size, value_heads * value_size
    qkv, z = qkvz.split([2 * keys + values, values], -1)
    b, a = ba.split(value_heads, -1)
    return qkv.contiguous(), z.reshape(-1, value_heads, value_size), b.contiguous(), a.contiguous()


@functools.cache
def _compiled() -> Callable[..., None]:
    return compiled.kept(numba.njit, _walk)


def _walk(query, key, value, decay, beta, states, slots, starts, output):  # type: ignore[no-untyped-def]
    heads, value_size = value.shape[1], value.shape[2]
    shared = heads // key.shape[1]
    for request in range(len(slots)):
        for head in range(heads):
            state = states[slots[request], head]
            for token in range(starts[request], starts[request + 1]):
                own_key, own_query = key[token, head // shared], query[token, head // shared]
                kept, rate = decay[token, head], beta[token, head]
                for row in range(value_size):
                    memory = state[row]
                    answer = numba.float32(0)
                    for column in range(len(memory)):
                        memory[column] *= kept
                        answer += memory[column] * own_key[column]
                    change, read = rate * (value[token, head, row] - answer), numba.float32(0)
                    for column in range(len(memory)):
                        memory[column] += change * own_key[column]
                        read += memory[column] * own_query[column]
                    output[token, head, row] = read
