"""Reductions and scans over sequences that lie end to end in one flat tensor.

The layout: ``T`` tokens, ``sequence_ids`` int64 [T] naming the sequence of each token.  No padding and no loop over
sequences; memory is linear in T.  Reductions accept tokens in any order; scans need each sequence's tokens to lie
together and in order, which ``TrajectoryBatch`` guarantees.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Tokens that exist in double precision at one time.
CHUNK = 2**19


@torch.no_grad()
def sequence_sum(values: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """Sum of each sequence's values, accumulated in float64 and without gradient.

    Double precision keeps the result independent of the order of summation (a GPU's scatter has none) far below what
    float32 can show.

    Args:
        values: [T], any float, integer or bool dtype.
        sequence_ids: int64 [T] in [0, num_sequences).

    Returns:
        float64 [num_sequences]; 0 for a sequence without tokens.
    """
    total = torch.zeros(num_sequences, dtype=torch.float64, device=values.device)
    for start in range(0, len(values), CHUNK):
        piece = slice(start, start + CHUNK)
        total.index_add_(0, sequence_ids[piece], values[piece].to(torch.float64))
    return total


def sequence_max(values: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """Largest value of each sequence: [num_sequences] of ``values``'s dtype, -inf for a sequence without tokens."""
    start = torch.full((num_sequences,), float("-inf"), dtype=values.dtype, device=values.device)
    return start.scatter_reduce(0, sequence_ids, values, reduce="amax")


def sequence_min(values: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """Smallest value of each sequence: [num_sequences] of ``values``'s dtype, inf for a sequence without tokens."""
    start = torch.full((num_sequences,), float("inf"), dtype=values.dtype, device=values.device)
    return start.scatter_reduce(0, sequence_ids, values, reduce="amin")


def last_token(sequence_ids: Tensor) -> Tensor:
    """bool [T]: true at the last token of each sequence. ``sequence_ids`` int64 [T], tokens of one together."""
    last = torch.ones_like(sequence_ids, dtype=torch.bool)
    last[:-1] = sequence_ids[:-1] != sequence_ids[1:]
    return last


def discounted_sum_to_go(values: Tensor, sequence_ids: Tensor, discount: float) -> Tensor:
    """S_t = v_t + discount * S_{t+1} inside each sequence: rewards-to-go, and GAE with ``discount`` = gamma * lambda.

    Recursive doubling: after pass k every S_t holds its next 2**k terms, so log2(longest sequence) passes over the
    flat tensor replace a loop over tokens.  Each sequence's tokens must lie together and in order.

    Args:
        values: [T].
        sequence_ids: int64 [T].
        discount: in [0, 1].

    Returns:
        float64 [T].
    """
    total = values.to(torch.float64, copy=True)
    length, reach, factor = len(total), 1, float(discount)
    while reach < length and factor != 0.0:
        same = sequence_ids[:-reach] == sequence_ids[reach:]
        if not bool(same.any()):
            break
        total[:-reach] += factor * torch.where(same, total[reach:], 0.0)
        reach, factor = 2 * reach, factor * factor
    return total


def contiguous_ids(ids: Tensor) -> tuple[Tensor, int]:
    """Renumber arbitrary integer ids as 0 .. n-1 in ascending order: (int64 tensor of ``ids``'s shape, n)."""
    distinct, inverse = torch.unique(ids, return_inverse=True)
    return inverse, len(distinct)


def require_matching_shapes(**columns: Tensor | None) -> None:
    """Raise ValueError unless all given tensors are one-dimensional and equally long; None is skipped."""
    shapes = {name: tuple(column.shape) for name, column in columns.items() if column is not None}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ValueError("columns must be flat and equally long: " + ", ".join(f"{k} {v}" for k, v in shapes.items()))


def describe(found: object) -> str:
    """What something is that should have been a column, for messages."""
    if isinstance(found, Tensor):
        return f"a {str(found.dtype).removeprefix('torch.')} tensor of shape {list(found.shape)}"
    return f"{type(found).__name__} {str(found)[:60]!r}"
