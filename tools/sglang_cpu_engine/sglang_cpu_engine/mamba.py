"""Mamba-2 (arXiv:2405.21060, section 7), of Granite 4 and Nemotron-H, token by token.

A head keeps a matrix S [value size, state size] in place of a cache. A token lets it decay, adds its value by the
group's vector b, and reads it by the group's vector c:

    S = exp(s A) S + s v b^T        o = S c + D v        with the step s = softplus(dt + dt_bias)

SGLang's own functions, which these stand for by name and arguments, are Triton kernels. Everything is computed in
float32, and a request's numbers do not depend on its neighbours, nor on where a prefill was cut. Another plugin may
exchange ``walked``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numba
import torch
from torch import Tensor
from torch.nn.functional import softplus

from sglang_cpu_engine import compiled, delta_nets


def with_convolutions(original: Callable[..., Any], mixer: Any, *arguments: Any, **kwargs: Any) -> Any:
    """Around the forward method of SGLang's layer, whose module has convolutions by these names only on GPUs."""
    names = vars(sys.modules["sglang.srt.layers.attention.mamba.mamba"])
    for kind in ("", "_triton"):
        names.setdefault(f"causal_conv1d_fn{kind}", delta_nets.convolve_prefill)
        names.setdefault(f"causal_conv1d_update{kind}", delta_nets.convolve_next)
    return original(mixer, *arguments, **kwargs)


def scan(
    x: Tensor,
    dt: Tensor,
    rates: Tensor,
    write: Tensor,
    read: Tensor,
    *,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    initial_states: Tensor | None,
    out: Tensor,
    state_dtype: torch.dtype,
    **options: Any,
) -> tuple[None, Tensor, None]:
    """New tokens of some requests: into ``out``, like ``x``, what they read. No states within them are kept.

    Args:
        x: [1, tokens, heads, value size].
        dt: [1, tokens, heads].
        rates: [heads], A.
        write, read: [1, tokens, groups, state size].
        cu_seqlens: [requests + 1], where their tokens begin.
        initial_states: [requests, heads, value size, state size]; None: zeros.
        options: D, [heads], among others that change nothing here.

    Returns:
        Second of three, the states behind these tokens, like ``initial_states``.
    """
    requests = len(cu_seqlens) - 1
    shape = (requests, *x.shape[2:], write.shape[-1])
    states = (
        x.new_zeros(shape, dtype=torch.float32)
        if initial_states is None
        else initial_states.to(torch.float32, copy=True)
    )
    out[0] = walked(x[0], dt[0], rates, write[0], read[0], options["D"], dt_bias, states, cu_seqlens)
    return None, states.to(state_dtype), None


def scan_next(
    states: Tensor,
    x: Tensor,
    dt: Tensor,
    rates: Tensor,
    write: Tensor,
    read: Tensor,
    skip: Tensor,
    *,
    dt_bias: Tensor,
    state_batch_indices: Tensor,
    out: Tensor,
    **_: Any,
) -> None:
    """``scan`` of one new token of each request, ``x`` [requests, heads, value size], in place of its slot's state.

    ``dt``, ``rates``, ``skip`` and ``dt_bias`` come repeated over the features of values, ``rates`` over the state too.
    """
    slots, starts = state_batch_indices.long(), torch.arange(len(x) + 1, device=x.device)
    own = states[slots].to(torch.float32, copy=True)
    per_head = rates[:, 0, 0], write, read, skip[:, 0], dt_bias[:, 0]
    out.copy_(walked(x, dt[..., 0], *per_head, own, starts))
    states[slots] = own.to(states.dtype)


def walked(
    value: Tensor, dt: Tensor, rates: Tensor, write: Tensor, read: Tensor, skip: Tensor, dt_bias: Tensor,
    states: Tensor, starts: Tensor,
) -> Tensor:  # fmt: skip
    """[tokens, heads, value size] in the dtype of ``value``, for what ``scan`` is given, without the first 1.

    ``states``, float32, change in place.
    """
    step = delta_nets.in_whole_vectors(softplus, dt.float() + dt_bias.float())
    decay = delta_nets.in_whole_vectors(torch.exp, step * rates.float())
    output, values = torch.empty(value.shape, dtype=torch.float32), value.float().contiguous()
    operands = values, step.contiguous(), decay.contiguous(), write.float().contiguous(), read.float().contiguous()
    _compiled()(*(each.numpy() for each in (*operands, states, starts.long(), output)))
    return (output + skip.float()[:, None] * values).to(value.dtype)


@functools.cache
def _compiled() -> Callable[..., None]:
    return compiled.kept(numba.njit, _walk)


def _walk(value, step, decay, write, read, states, starts, output):  # type: ignore[no-untyped-def]
    heads, value_size = value.shape[1], value.shape[2]
    shared = heads // write.shape[1]
    for request in range(len(states)):
        for head in range(heads):
            state = states[request, head]
            for token in range(starts[request], starts[request + 1]):
                own_write, own_read = write[token, head // shared], read[token, head // shared]
                kept, rate = decay[token, head], step[token, head]
                for row in range(value_size):
                    memory, added = state[row], rate * value[token, head, row]
                    answer = numba.float32(0)
                    for column in range(len(memory)):
                        memory[column] = kept * memory[column] + added * own_write[column]
                        answer += memory[column] * own_read[column]
                    output[token, head, row] = answer
