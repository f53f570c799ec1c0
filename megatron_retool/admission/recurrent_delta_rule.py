"""The gated delta rule token by token, in place of transformers' own, which is float32 whatever the model is.

Its chunks cost digits where decays are fast: against float64 the logits of a tiny Qwen3-Next are off by 1e-5, all that
a learner may be.  And it computes more than the recurrence, which is what the planner counts.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_NAME = "torch_chunk_gated_delta_rule"


@contextlib.contextmanager
def recurrent(model: Any) -> Iterator[None]:
    """Within, a transformers model's gated delta nets compute ``delta_rule``. Others stay as they are."""
    module = sys.modules[type(model).__module__]
    chunked = getattr(module, _NAME, None)
    if chunked is None:
        yield
        return
    setattr(module, _NAME, _in_its_place)
    try:
        yield
    finally:
        setattr(module, _NAME, chunked)


def _in_its_place(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, initial_state: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    assert initial_state is None, "sequences are read whole"
    return delta_rule(query, key, value, g, beta), None


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
