"""Dynamic context parallelism: only as many ranks share a micro-batch as its longest sequence needs.

Context parallelism exists for the longest sequences, but every sequence pays for it: cut over CP ranks, its keys and
values are exchanged in every layer. With ``learner.dynamic_context_parallel`` a micro-batch is shared by CP, CP / 2, …
or 1 of the CP ranks, and the other ranks compute others at the same time. With CP = 4 and 8k tokens for each rank:

    rank            0       1       2       3
    first       [         a text of 30k         ]
    second      [ texts up to 16k ]   [ 16k     ]
    third       [ 8k ]  [ 8k ]  [ 8k ]  [ 8k ]

Larger groups come first, so those who share a micro-batch have computed equally many before: it is the k-th of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


def context_sizes(context: int) -> list[int]:
    """Ranks that may share a micro-batch, descending from ``context`` to 1; each is a multiple of the next."""
    sizes = [context]
    while sizes[-1] % 2 == 0:
        sizes.append(sizes[-1] // 2)
    return sizes if sizes[-1] == 1 else [*sizes, 1]


def ranks_needed(tokens: npt.NDArray[Any], max_tokens: int, context: int) -> Int64Array:
    """How many ranks share what is never cut: the fewest of ``context_sizes`` that hold it.

    Args:
        tokens: [U], of each such unit, padding included.
        max_tokens: that ``context`` ranks hold together.

    Returns:
        int64 [U].
    """
    result = np.full(len(tokens), context, np.int64)
    for size in context_sizes(context):
        result[tokens <= max_tokens * size // context] = size
    return result


def place(sizes: Sequence[int], costs: Sequence[float], context: int) -> list[range]:
    """The context-parallel ranks of each micro-batch: those with the fewest before it, then with the least work.

    Args:
        sizes: how many ranks share it, in descending order.
        costs: of computing it on one rank.
    """
    counts, work = np.zeros(context, np.int64), np.zeros(context)
    result = []
    for size, cost in zip(sizes, costs, strict=True):
        first = min(range(0, context, size), key=lambda rank: (counts[rank], work[rank : rank + size].max(), rank))
        ranks = range(first, first + size)
        counts[first : ranks.stop] += 1
        work[first : ranks.stop] += cost / size
        result.append(ranks)
    return result
