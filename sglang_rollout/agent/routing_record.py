"""The rows of routed experts of a trajectory under way: consecutive chunks from its first token on, one an answer.

Chunks are shared by forks and by what is paused, so nothing here changes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_retool.routed_experts import ExpertArray, missing_rows

IntArray = npt.NDArray[np.int32]


def still_true(chunks: list[ExpertArray], received_for: IntArray | None, ids: IntArray) -> list[ExpertArray]:
    """The rows without those that tell of tokens which are not there any more.

    An agent may take back what was sampled last. A row tells of its token and of all before it.

    Args:
        chunks: [n, layers, k] each.
        received_for: int32, the tokens that the rows are of; None: of those in ``ids``.
        ids: int32, the trajectory's tokens now.
    """
    known = sum(map(len, chunks))
    valid = min(known, len(ids))
    if received_for is not None:
        changed = np.flatnonzero(ids[:valid] != received_for[:valid])
        valid = int(changed[0]) if len(changed) else valid
    if valid == known:
        return chunks
    if not valid:
        return []
    together: Any = np.concatenate(chunks)
    return [together[:valid]]


def whole_column(chunks: Sequence[ExpertArray], length: int) -> ExpertArray:
    """Rows [length, layers, k], at least one chunk of them; those behind the last chunk are missing."""
    return np.concatenate([*chunks, missing_rows(length - sum(map(len, chunks)), chunks[0])])
