"""The recurrence of Mamba-2 (Transformers are SSMs, arXiv:2405.21060, section 6), chunk by chunk.

A head keeps a state S of d_state x d_v numbers, zero before a sequence.  Each token multiplies it by its decay and adds
its value, by the group's vector b; the group's vector c reads the result:

    S_t = exp(g_t) S_(t-1) + b_t (s_t v_t)^T        o_t = S_t^T c_t

Within a chunk of C tokens that is masked linear attention, so that only chunks follow one another.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from megatron_retool.learner.delta_rule import CHUNK, decays, in_chunks


def state_space(
    value: Tensor, write: Tensor, read: Tensor, log_decay: Tensor, step: Tensor, chunk: int = CHUNK
) -> Tensor:
    """What the tokens of a batch of sequences read, in at least float32.

    A sequence may be followed by padding: what comes later changes nothing earlier.

    Args:
        value: [B, L, heads, d_v].
        write, read: [B, L, groups, d_state]; so many heads in turn as there are to a group share its two vectors.
        log_decay: [B, L, heads], g <= 0.
        step: [B, L, heads], s.

    Returns:
        [B, L, heads, d_v] in float32, or in ``value``'s dtype where that is longer.
    """
    batch, length, groups, state_dim = write.shape
    chunks = functools.partial(in_chunks, groups=groups, chunk=chunk)
    value, write, read = chunks(value), chunks(write), chunks(read)
    log_decay, step = chunks(log_decay.unsqueeze(-1)).squeeze(-1), chunks(step.unsqueeze(-1))
    value = step * value
    between = decays(log_decay)
    since_start = log_decay.cumsum(-1).exp().unsqueeze(-1)
    within = (read @ write.transpose(-1, -2) * between) @ value
    written = (write * between[..., -1, :].unsqueeze(-1)).transpose(-1, -2) @ value

    state = value.new_zeros(batch, groups, value.size(2), state_dim, value.size(-1))
    outputs = []
    parts = (x.unbind(3) for x in (within, written, read, since_start))
    for own, added, asked, decay in zip(*parts, strict=True):
        outputs.append(own + decay * (asked @ state))
        state = decay[..., -1:, :] * state + added
    out = torch.stack(outputs, 3).flatten(3, 4)[..., :length, :]
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)
