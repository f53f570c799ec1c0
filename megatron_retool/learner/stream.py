"""The tokens of a batch in one row, and where each of its sequences and responses lies in it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from megatron_retool.learner.micro_batch import Int64Array
from megatron_retool.trajectory import TrajectoryBatch


def numbered(units: Int64Array) -> Int64Array:
    """``units`` as 0, 1, … in the order in which they first occur."""
    _, first, places = np.unique(units, return_index=True, return_inverse=True)
    numbers: Int64Array = np.argsort(np.argsort(first))[places]
    return numbers


def ramp(counts: Int64Array) -> Int64Array:
    """0 .. c - 1 for each count c, end to end."""
    counts = np.asarray(counts, dtype=np.int64)
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


@dataclass(frozen=True)
class Responses:
    """The R response tokens of some rows, in row order.

    Attributes:
        owner: int64 [R], whose token it is, as an index into the rows.
        places: int64 [R], its position in its sequence; it is predicted from the one before.
        positions: int64 [R], its position in the batch's columns.
    """

    owner: Int64Array
    places: Int64Array
    positions: Int64Array

    @classmethod
    def of(cls, batch: TrajectoryBatch, stream: Stream, rows: Int64Array) -> Responses:
        """The responses of ``rows`` in the stream."""
        lengths = batch.response_lengths[rows].astype(np.int64)
        owner, inside = np.repeat(np.arange(len(rows)), lengths), ramp(lengths)
        return cls(owner, batch.prompt_lengths[rows][owner] + inside, stream.response_starts[rows][owner] + inside)

    def slots(self, batch: TrajectoryBatch, head_on: str) -> Int64Array:
        """int64 [n]: those that the head reads; see ``Packer.micro_batches``."""
        return np.flatnonzero(batch.loss_mask[self.positions]) if head_on == "loss_mask" else np.arange(len(self.owner))


class Stream:
    """All sequences of a batch, prompt and response joined, end to end."""

    def __init__(self, batch: TrajectoryBatch) -> None:
        prompts, responses = batch.prompt_lengths.astype(np.int64), batch.response_lengths.astype(np.int64)
        self.prompt_lengths, self.lengths = prompts, prompts + responses
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.response_starts = np.cumsum(responses) - responses
        self.ids = np.empty(int(self.lengths.sum()), np.int64)
        self.ids[np.repeat(self.starts, prompts) + ramp(prompts)] = batch.prompt_ids
        self.ids[np.repeat(self.starts + prompts, responses) + ramp(responses)] = batch.response_ids

    def positions(self, rows: Int64Array) -> Int64Array:
        """Where the tokens of ``rows``, end to end, are in ``ids``."""
        counts = self.lengths[rows]
        positions: Int64Array = np.repeat(self.starts[rows], counts) + ramp(counts)
        return positions

    @functools.cached_property
    def sequences(self) -> list[Int64Array]:
        """The token ids of each row."""
        return np.split(self.ids, self.starts[1:]) if len(self.starts) else []
