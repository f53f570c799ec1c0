"""The gated delta rule and Mamba-2's recurrence token by token, in place of transformers' own, which are float32
whatever the model is.

Their chunks cost digits where decays are fast: against float64 the logits of a tiny Qwen3-Next are off by 1e-5, all
that a learner may be.  And they compute more than the recurrence, which is what the planner counts.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


@contextlib.contextmanager
def recurrent(model: Any) -> Iterator[None]:
    """Within, a transformers model computes ``delta_rule`` and ``state_space``. Other models stay as they are."""
    module = sys.modules[type(model).__module__]
    chunked = {name: getattr(module, name) for name in _IN_PLACE_OF if hasattr(module, name)}
    for name in chunked:
        setattr(module, name, _IN_PLACE_OF[name])
    try:
        yield
    finally:
        for name, function in chunked.items():
            setattr(module, name, function)


def _delta_rule(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, initial_state: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    assert initial_state is None, "sequences are read whole"
    return delta_rule(query, key, value, g, beta), None


def _state_space(
    value: Tensor, dt: Tensor, rates: Tensor, write: Tensor, read: Tensor, *, dt_bias: Tensor, **options: Any
) -> Tensor:
    step = torch.nn.functional.softplus(dt + dt_bias)
    skipped = options["D"].unsqueeze(-1) * value
    return state_space(value, write, read, rates.to(step.dtype) * step, step) + skipped


_IN_PLACE_OF = {"torch_chunk_gated_delta_rule": _delta_rule, "mamba2_chunk_scan": _state_space}
"""transformers' names of what computes a whole sequence."""


def delta_rule(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Queries and keys [B, L, heads, d_k], values [B, L, heads, d_v], rates [B, L, heads] -> [B, L, heads, d_v].

    In the tensors' own dtype, by the recurrence of ``learner.delta_rule``; three products of matrices for each token.
    """
    query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    decay = log_decay.exp()[..., None, None]
    state = value.new_zeros(value.size(0), value.size(2), key.size(-1), value.size(-1))
    outputs = []
    for step in range(key.size(1)):
        state = state * decay[:, step]
        remembered = torch.matmul(key[:, step, :, None], state)
        change = beta[:, step, :, None, None] * (value[:, step, :, None] - remembered)
        state = state + torch.matmul(key[:, step, :, :, None], change)
        outputs.append(torch.matmul(query[:, step, :, None], state).squeeze(-2))
    return torch.stack(outputs, 1) * key.size(-1) ** -0.5


def state_space(value: Tensor, write: Tensor, read: Tensor, log_decay: Tensor, step: Tensor) -> Tensor:
    """Values [B, L, heads, d_v], vectors [B, L, groups, d_state], rates [B, L, heads] -> [B, L, heads, d_v].

    In the tensors' own dtype, by the recurrence of ``learner.state_space``; two products of matrices for each token.
    """
    share = value.size(2) // write.size(2)
    write, read = (each.repeat_interleave(share, 2) for each in (write, read))
    decay, value = log_decay.exp()[..., None, None], step.unsqueeze(-1) * value
    state = value.new_zeros(value.size(0), value.size(2), write.size(-1), value.size(-1))
    outputs = []
    for token in range(value.size(1)):
        added = torch.matmul(write[:, token, :, :, None], value[:, token, :, None])
        state = state * decay[:, token] + added
        outputs.append(torch.matmul(read[:, token, :, None], state).squeeze(-2))
    return torch.stack(outputs, 1)
