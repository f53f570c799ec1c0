"""The experts that each token went through, as the engine or the learner chose them in a mixture of experts.

A row belongs to one input token of a sequence (prompt, tool results and sampled tokens alike) and has the shape
[layers, k]: for each layer the k experts, without order. Rows are uint8, or int16 where a model has more experts than
uint8 can name. A row that nobody knows has the largest value of its type in every place (uint8: 255): whoever replays
the column chooses for that token itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

ExpertArray = npt.NDArray[np.uint8] | npt.NDArray[np.int16]


def expert_dtype(num_experts: int) -> type[np.uint8] | type[np.int16]:
    """The type of a column for a model of so many experts."""
    return np.uint8 if num_experts <= np.iinfo(np.uint8).max else np.int16


def missing_expert(dtype: Any) -> int:
    """The value that stands for "not known" in a column of this type: its largest."""
    return int(np.iinfo(dtype).max)


def missing_rows(count: int, like: ExpertArray) -> ExpertArray:
    """``count`` rows [count, layers, k] that nobody knows, of the type and shape of ``like``'s."""
    return np.full((count, *like.shape[1:]), missing_expert(like.dtype), like.dtype)


def is_missing(rows: ExpertArray) -> npt.NDArray[np.bool_]:
    """bool [n] for rows [n, layers, k]."""
    found: npt.NDArray[np.bool_] = rows[:, 0, 0] == missing_expert(rows.dtype)
    return found


def check_rows(rows: Any, length: int, label: str) -> None:
    """Raise ValueError, beginning with ``label``, where ``rows`` are not those of a sequence of ``length`` tokens."""
    if rows.dtype not in (np.uint8, np.int16) or rows.ndim != 3:
        raise ValueError(
            f"{label}: routed_experts is {rows.dtype} {rows.shape}, not uint8 or int16 [tokens, layers, k]"
        )
    if len(rows) != length:
        raise ValueError(f"{label}: routed_experts has {len(rows)} rows for {length} tokens")
    unknown = (rows == missing_expert(rows.dtype)).reshape(len(rows), -1)
    if (unknown.any(-1) != unknown.all(-1)).any():
        raise ValueError(f"{label}: a row of routed_experts is known in part")


@dataclass(frozen=True)
class RoutedExperts:
    """The column of a batch: where each sequence's rows begin in one array, which selections share.

    Attributes:
        rows: [M, layers, k], sequences end to end.
        starts: int64 [N], the first row of each sequence of the batch, which has as many as the sequence has tokens.
    """

    rows: ExpertArray
    starts: npt.NDArray[np.int64]

    @classmethod
    def of_sequences(cls, columns: Sequence[ExpertArray | None], lengths: npt.NDArray[Any]) -> RoutedExperts | None:
        """The column of a batch of sequences of ``lengths`` tokens; None where no sequence has one."""
        like = next((column for column in columns if column is not None), None)
        if like is None:
            return None
        parts = [
            missing_rows(int(length), like) if column is None else column
            for column, length in zip(columns, lengths, strict=True)
        ]
        rows: Any = np.concatenate(parts)
        return cls.end_to_end(rows, lengths)

    @classmethod
    def end_to_end(cls, rows: ExpertArray, lengths: npt.NDArray[Any]) -> RoutedExperts:
        """The column whose ``rows`` are in the order of the batch's sequences, which have ``lengths`` [N] tokens."""
        return cls(rows, np.cumsum(lengths, dtype=np.int64) - np.asarray(lengths, np.int64))

    def select(self, sequences: npt.NDArray[np.int64]) -> RoutedExperts:
        """The column of these sequences, in that order; no row is copied."""
        return RoutedExperts(self.rows, self.starts[sequences])
