"""Routed experts on their way to the learner's ranks: the rows of a step are put into Ray's object store once.

512 responses of 16k tokens, 48 layers and 8 experts a token have 3.2 GB of rows, and a step sends its responses again
and again: for old log-probs, for the reference, and in mini-batches. All these batches share one array. It is stored
when the first of them is sent, and each of them travels with a reference and with where its sequences' rows begin.
A rank maps the memory of its node's store (other nodes fetch one copy each) and touches the rows of its own share.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import ray

from megatron_retool.routed_experts import ExpertArray, RoutedExperts, missing_rows
from megatron_retool.trajectory import TrajectoryBatch


@dataclass(frozen=True)
class StoredExperts(RoutedExperts):
    """A column without its rows ([0, layers, k] here), which lie in Ray's object store."""

    reference: Any = None


class RowStore:
    """The rows that batches were sent with last. They leave the store when the array they were put from is gone, other
    rows are sent, or ``release`` is called, and no batch under way refers to them."""

    def __init__(self) -> None:
        self._rows: weakref.ref[Any] | None = None
        self._reference: Any = None

    def without_rows(self, batch: TrajectoryBatch) -> TrajectoryBatch:
        """The batch as it travels: ``with_rows`` is its counterpart on the other side."""
        column = batch.routed_experts
        if column is None:
            return batch
        stored = StoredExperts(missing_rows(0, column.rows), column.starts, self._reference_to(column.rows))
        return replace(batch, routed_experts=stored)

    def release(self) -> None:
        """Forget the rows."""
        self._rows = self._reference = None

    def _reference_to(self, rows: ExpertArray) -> Any:
        if self._rows is None or self._rows() is not rows:
            self.release()  # before the store has to have room for both
            reference = ray.put(rows)
            self._rows, self._reference = weakref.ref(rows, self._forget), reference
        return self._reference

    def _forget(self, gone: weakref.ref[Any]) -> None:
        if self._rows is gone:
            self.release()


def with_rows(batch: TrajectoryBatch) -> TrajectoryBatch:
    """The batch as it was before ``RowStore.without_rows``; its rows cannot be written to.

    Raises:
        ray.exceptions.ObjectLostError: the node that held the rows is gone.
    """
    column = batch.routed_experts
    if not isinstance(column, StoredExperts):
        return batch
    return replace(batch, routed_experts=RoutedExperts(ray.get(column.reference), column.starts))
