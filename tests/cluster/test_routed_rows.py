"""Routed experts between processes: put once a step, gone after it, and never at the critic."""

from __future__ import annotations

import asyncio
import gc
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import ray
from ray._private.internal_api import node_stats
from ray.exceptions import ObjectLostError

from megatron_retool.cluster import learner_group, routed_rows
from megatron_retool.cluster.learner_group import LearnerDied, LearnerGroup, LearnerWorker
from megatron_retool.cluster.routed_rows import RowStore
from megatron_retool.cluster.runtime import ray_runtime
from megatron_retool.config import Config, SamplingConfig, load_config
from megatron_retool.routed_experts import RoutedExperts
from megatron_retool.trajectory import TrajectoryBatch
from tests.test_routed_experts import make_rows, make_trajectory

SAMPLING = SamplingConfig()
LENGTHS = ((3, 40), (5, 0), (2, 300), (1, 80))


class RecordingLearner:
    """Answers with what it was given."""

    own_seconds = 0.0

    def log_probs(self, batch: TrajectoryBatch, **_: Any) -> Any:
        return described(batch)

    def values(self, batch: TrajectoryBatch) -> Any:
        return described(batch)

    def update(self, batch: TrajectoryBatch, **_: Any) -> Any:
        return described(batch)

    def update_critic(self, batch: TrajectoryBatch) -> Any:
        return described(batch)


def described(batch: TrajectoryBatch) -> dict[str, Any]:
    column = batch.routed_experts
    if column is None:
        return {"rows": None, "tokens": batch.response_ids}
    return {
        "rows": [column.rows[a : a + n].copy() for a, n in zip(column.starts, batch.total_lengths, strict=True)],
        "type": type(column).__name__,
        "writeable": column.rows.flags.writeable,
        "tokens": batch.response_ids,
    }


class Rank(LearnerWorker):
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.learner: Any = RecordingLearner()


class LosingRank(Rank):
    """Its node cannot give it the rows any more."""

    def log_probs(self, *arguments: Any) -> Any:
        def lost(_: Any) -> Any:
            raise ObjectLostError("00ff", None, "a call site")

        routed_rows.ray = type("Ray", (), {"get": staticmethod(lost)})
        return super().log_probs(*arguments)


def config_of(mode: str = "rollout") -> Config:
    return load_config(None, ["learner.world_size=2", f"learner.routing_replay={mode}"])


@pytest.fixture(scope="module")
def runtime() -> Iterator[None]:
    with ray_runtime(config_of()):
        yield


def group_of(role: str = "learner", mode: str = "rollout", kinds: tuple[type[Rank], ...] = (Rank, Rank)) -> Any:
    group = LearnerGroup.__new__(LearnerGroup)
    group.config, group.role, group.nodes = config_of(mode), role, []
    group.workers = [ray.remote(kind).remote(rank) for rank, kind in enumerate(kinds)]
    group._seconds, group._rows = [0.0] * len(kinds), RowStore()
    return group


@pytest.fixture(scope="module")
def group(runtime: None) -> Iterator[Any]:
    made = group_of()
    yield made
    made.kill()


def make_batch(layers: int = 2, seed: int = 0) -> TrajectoryBatch:
    made = [make_trajectory(p, r, index, seed=index) for index, (p, r) in enumerate(LENGTHS)]
    return TrajectoryBatch.from_trajectories(
        [replace(t, routed_experts=make_rows(sum(n), layers, seed=seed)) for t, n in zip(made, LENGTHS, strict=True)]
    )


def bytes_put(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what the driver puts, from here on."""
    sizes: list[int] = []
    put = ray.put

    def counting(value: Any) -> Any:
        sizes.append(value.nbytes if isinstance(value, np.ndarray) else len(pickle_of(value)))
        return put(value)

    for module in (learner_group, routed_rows):
        monkeypatch.setattr(module.ray, "put", counting)
    return sizes


def pickle_of(batch: TrajectoryBatch) -> bytes:
    column: Any = batch.routed_experts
    return pickle.dumps(batch if column is None else replace(batch, routed_experts=replace(column, reference=None)))


def step(group: Any, batch: TrajectoryBatch) -> list[tuple[TrajectoryBatch, dict[str, Any]]]:
    """What a step sends, with what rank 0 was given of it."""
    mini_batches = [batch.select([2, 0]), batch.select([3, 1])]

    async def run() -> list[Any]:
        sent: list[tuple[TrajectoryBatch, Any]] = []
        for reference in (False, True):
            sent.append((batch, await group.log_probs(batch, sampling=SAMPLING, reference=reference)))
        for part in mini_batches:
            sent.append((part, await group.update(part, sampling=SAMPLING)))
        return sent

    return asyncio.run(run())


def test_each_rank_finds_the_rows_of_every_batch_and_they_are_put_once(group, monkeypatch):
    batch, sizes = make_batch(), bytes_put(monkeypatch)
    rows = batch.routed_experts.rows
    for sent, found in step(group, batch):
        expected = described(sent)
        assert (found["type"], found["writeable"]) == ("RoutedExperts", False)
        np.testing.assert_array_equal(found["tokens"], expected["tokens"])
        for one, other in zip(found["rows"], expected["rows"], strict=True):
            np.testing.assert_array_equal(one, other)
    assert sizes.count(rows.nbytes) == 1 and len(sizes) == 5
    without = pickle_of(replace(batch, routed_experts=None))
    assert max(size for size in sizes if size != rows.nbytes) < len(without) + 1000


def test_the_second_rank_has_them_too(runtime):
    group = group_of()
    try:
        group.workers.reverse()
        for worker, rank in zip(group.workers, (0, 1), strict=True):
            ray.get(worker.__ray_call__.remote(lambda self, rank=rank: setattr(self, "rank", rank)))
        batch = make_batch()
        found = asyncio.run(group.log_probs(batch, sampling=SAMPLING))
        np.testing.assert_array_equal(np.concatenate(found["rows"]), batch.routed_experts.rows)
    finally:
        group.kill()


def wait_for(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def stored_bytes() -> int:
    return int(node_stats()["storeStats"].get("objectStoreBytesUsed", 0)) if False else used_by_store()


def used_by_store() -> int:
    return int(node_stats().store_stats.object_store_bytes_used)


def test_steps_leave_nothing_in_the_object_store(group):
    """Rows of 8 MB, step after step: while a batch lives its rows are there once, afterwards not at all."""
    before = used_by_store()
    for seed in range(4):
        batch = make_batch(layers=6_000, seed=seed)
        size = batch.routed_experts.rows.nbytes
        assert size > 7e6
        asyncio.run(group.log_probs(batch, sampling=SAMPLING))
        assert wait_for(lambda size=size: size <= used_by_store() - before < 1.5 * size)
    batch = None
    gc.collect()
    assert wait_for(lambda: used_by_store() - before < 1e6)
    assert group._rows._reference is None


def test_rows_that_a_step_replaces_leave_the_store_first(group, monkeypatch):
    """learner.routing_replay=old_log_probs: the same batch with other rows."""
    batch, sizes = make_batch(), bytes_put(monkeypatch)
    other = replace(batch, routed_experts=RoutedExperts(batch.routed_experts.rows.copy(), batch.routed_experts.starts))
    for sent in (batch, other, other.select([1]), other.select([0, 1, 2, 3])):
        asyncio.run(group.log_probs(sent, sampling=SAMPLING))
    assert sizes.count(batch.routed_experts.rows.nbytes) == 2


@pytest.mark.parametrize(("role", "mode"), [("critic", "rollout"), ("learner", "none")])
def test_who_does_not_replay_gets_no_rows(runtime, monkeypatch, role, mode):
    group, batch = group_of(role, mode), make_batch()
    sizes = bytes_put(monkeypatch)
    try:
        calls = (
            [group.values(batch), group.update_critic(batch)]
            if role == "critic"
            else [group.log_probs(batch, sampling=SAMPLING), group.update(batch, sampling=SAMPLING)]
        )
        assert [asyncio.run(call)["rows"] for call in calls] == [None, None]
    finally:
        group.kill()
    assert len(sizes) == 2 and max(sizes) < batch.routed_experts.rows.nbytes + len(
        pickle_of(replace(batch, routed_experts=None))
    )
    assert batch.routed_experts is not None


def test_ranks_that_died_are_followed_by_others_with_the_same_rows(runtime):
    batch, first = make_batch(), group_of()
    asyncio.run(first.log_probs(batch, sampling=SAMPLING))
    ray.kill(first.workers[1])
    with pytest.raises(LearnerDied, match="learner rank 1 died"):
        asyncio.run(first.update(batch, sampling=SAMPLING))
    assert first._rows._reference is None
    second = group_of()
    try:
        found = asyncio.run(second.log_probs(batch, sampling=SAMPLING))
        np.testing.assert_array_equal(np.concatenate(found["rows"]), batch.routed_experts.rows)
    finally:
        second.kill()


def test_rows_that_are_lost_end_the_group_which_can_be_built_anew(runtime, monkeypatch):
    monkeypatch.setattr(learner_group, "DEATH_NOTICE_SECONDS", 0.1)
    group = group_of(kinds=(Rank, LosingRank))
    with pytest.raises(LearnerDied, match="learner rank 1 left the others waiting .*: the step's routed experts are"):
        asyncio.run(group.log_probs(make_batch(), sampling=SAMPLING))
