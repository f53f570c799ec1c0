"""Weights from every rank of the learner that holds some, without gathering a tensor.

    with ShardedWeightSync(base_urls) as sync:                              # on every rank of the learner
        report = sync.push(learner.own_parts(bucket_bytes), version=step)

Each rank broadcasts its parts of the weights to the ranks of one engine after another, in a process group of it and
that engine, beginning with another engine than the rank before it.  The engine's ranks keep what they need of each
part (``sglang_plugins/weight_parts.py``).  Rank 0 takes the steps that concern a whole engine: hold it, open and close
the update, set the version.  All ranks agree after each of three stages, so that all of them know of a failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist

from sglang_rollout.engine.base import SyncReport
from sglang_rollout.engine.weight_sync.base import Bucket, ServerWeightSync
from sglang_rollout.engine.weight_sync.distributed import DistributedWeightSync
from sglang_rollout.engine.weight_sync.errors import WeightSyncError


class ShardedWeightSync(ServerWeightSync):
    """Parts from every rank to every engine. Every rank makes the same calls."""

    def __init__(self, engines: Sequence[str], *, backend: str | None = None, **common: Any) -> None:
        super().__init__(engines, **common)
        rank = _rank() % len(self.engines)
        # An engine takes one bucket at a time: ranks that begin with different engines do not wait for one another.
        ordered = (*self.engines[rank:], *self.engines[:rank])
        self._ways = {url: DistributedWeightSync([url], backend=backend, **common) for url in ordered}

    def push(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        """``WeightSync.push`` of sglang_rollout.engine.base, of this rank's parts.

        Args:
            buckets: parts by ``HFPart.wire_name``; walked over once for each engine.

        Raises:
            WeightSyncError: on every rank, naming the engines that are dead or too slow, refuse the weights or report
                another version.
        """
        began = time.monotonic()
        leads = _rank() == 0
        try:
            agreed(self._open if leads else self._probe)
            try:
                tensors, sent_bytes = agreed(lambda: self._send_own(buckets))
            except BaseException:
                if leads:
                    self._give_up()
                raise
            agreed(lambda: self._take(version) if leads else None)
        finally:
            if leads:
                self._let_go()
        agreed(lambda: self._check_version(version) if leads else None)
        return SyncReport(version, tensors, sent_bytes, time.monotonic() - began, 0, sent_bytes)

    def close(self) -> None:
        """Leave all process groups, and close the connections."""
        for way in self._ways.values():
            way.close()
        super().close()

    def _open(self) -> None:
        self._probe()
        self._hold()
        self._begin()

    def _send_own(self, buckets: Iterable[Bucket]) -> tuple[int, int]:
        """Send this rank's parts to every engine.

        Returns:
            parts and bytes that each engine got.
        """
        parts = sent_bytes = 0
        for way in self._ways.values():
            parts = sent_bytes = 0
            for bucket in self._wire_buckets(buckets):
                parts += len(bucket)
                sent_bytes += sum(tensor.nbytes for _, tensor in bucket)
                way.send_to(self._infos, bucket)
        return parts, sent_bytes

    def _send(self, bucket: Bucket) -> None:
        raise NotImplementedError("each way sends by itself")


def agreed[Result](work: Callable[[], Result]) -> Result:
    """What ``work`` returns, once it has ended well on every rank of the learner.

    Raises:
        WeightSyncError: on every rank, with what failed on any.
    """
    result, failure = None, None
    try:
        result = work()
    except WeightSyncError as error:
        failure = (str(error), list(error.engines))
    failures = [each for each in _of_all_ranks(failure) if each is not None]
    if failures:
        engines = dict.fromkeys(url for _, urls in failures for url in urls)
        raise WeightSyncError("; ".join(dict.fromkeys(text for text, _ in failures)), list(engines))
    return result  # type: ignore[return-value]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _of_all_ranks(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    result = [value] * dist.get_world_size()
    dist.all_gather_object(result, value)
    return result
