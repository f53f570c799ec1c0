"""torch's memory-efficient attention of a GPU, as plain sums: what ``learner.sinks`` calls there.

It holds the kernels' terms: a mask has the shape of the scores, its strides are multiples of 8 (preprocess_mask of
torch's attention.cpp), and rows of logarithms are padded to multiples of 32 with infinities (kAlignLSE).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_retool.learner import sinks

ALIGNED_ROWS, ALIGNED_STRIDES = 32, 8


def install(kernel: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function) -> None:
    """Put both in the kernels' place; ``kernel`` says what they stand in for."""
    sinks._gpu_forward, sinks._gpu_backward = kernel(forward), kernel(backward)


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    if mask is not None:
        assert not causal and mask.shape == scores.shape and mask.dtype == query.dtype
        assert mask.stride(-1) == 1 and not any(stride % ALIGNED_STRIDES for stride in mask.stride()[:-1])
        scores = scores + mask.float()
    if causal:
        above = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(above, -torch.inf)
    return scores


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    with_logarithms: bool,
    dropout: float,
    causal: bool,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, logarithms of sums, and the dropout's seed and offset."""
    assert with_logarithms and dropout == 0.0
    scores = _scores(query, key, mask, causal, scale)
    logarithms = scores.logsumexp(-1)
    out = (scores - logarithms.unsqueeze(-1)).exp() @ value.float()
    padding = -query.size(2) % ALIGNED_ROWS
    padded = torch.nn.functional.pad(logarithms, (0, padding), value=torch.inf)
    return out.to(query.dtype), padded, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logarithms: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout: float,
    wanted: list[bool],
    causal: bool,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """Gradients of query, key and value, from the output and the logarithms that it is given."""
    assert dropout == 0.0 and wanted == [True, True, True, False] and seed.dim() == offset.dim() == 0
    assert logarithms.size(-1) % ALIGNED_ROWS == 0 and logarithms.dtype == torch.float32
    scores = _scores(query, key, mask, causal, scale)
    share = (scores - logarithms[..., : query.size(2)].unsqueeze(-1)).exp()
    grad, value = grad.float(), value.float()
    of_scores = share * (grad @ value.transpose(-1, -2) - (grad * out.float()).sum(-1, keepdim=True)) * scale
    grads = of_scores @ key.float(), of_scores.transpose(-1, -2) @ query.float(), share.transpose(-1, -2) @ grad
    return (*(each.to(query.dtype) for each in grads), None)  # type: ignore[return-value]
