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
from megatron_retool.cluster.learner_failures import OutOfStep
from megatron_retool.cluster.learner_group import LearnerGroup
from megatron_retool.cluster.learner_worker import LearnerWorker
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
        self.last = described(batch)
        return self.last

    def values(self, batch: TrajectoryBatch) -> Any:
        return described(batch)

    def update(self, batch: TrajectoryBatch, *, sampling: Any, kl_in_loss: float | None = None) -> Any:
        return {**described(batch), "kl_in_loss": kl_in_loss}

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


def config_of(mode: str = "rollout") -> Config:
    return load_config(None, ["learner.world_size=2", f"learner.routing_replay={mode}"])


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[Any]]:
    with ray_runtime(config_of().cluster):
        yield [ray.remote(Rank).remote(rank) for rank in range(2)]


def group_of(ranks: list[Any], role: str = "learner", mode: str = "rollout") -> Any:
    group = LearnerGroup.__new__(LearnerGroup)
    group.config, group.role, group.nodes, group.workers = config_of(mode), role, [], ranks
    group._seconds, group._rows = [0.0] * len(ranks), RowStore()
    return group


@pytest.fixture(scope="module")
def group(ranks: list[Any]) -> Any:
    return group_of(ranks)


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


def test_ranks_are_told_the_steps_kl_coefficient():
    class Group(LearnerGroup):
        def __init__(self) -> None:
            self._seconds = [0.0]

        async def _on_all_ranks(self, method: Any, *arguments: Any) -> list[Any]:
            return [method(Rank(0), *arguments)]

    update = Group().update(make_batch(), sampling=SAMPLING, kl_in_loss=0.25)
    assert asyncio.run(update)["kl_in_loss"] == 0.25


def wait_for(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def used_by_store() -> int:
    (node,) = ray.nodes()
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"])
    return int(stats.store_stats.object_store_bytes_used)


def test_every_rank_has_the_rows(group):
    batch = make_batch()
    asyncio.run(group.log_probs(batch, sampling=SAMPLING))
    for worker in group.workers:
        rows = ray.get(worker.__ray_call__.remote(lambda self: self.learner.last["rows"]))
        np.testing.assert_array_equal(np.concatenate(rows), batch.routed_experts.rows)


def test_steps_leave_nothing_in_the_object_store(group):
    """Rows of 8 MB, step after step: while a batch lives its rows are there once, afterwards not at all."""
    before = used_by_store()
    for seed in range(4):
        batch = make_batch(layers=6_000, seed=seed)
        size = batch.routed_experts.rows.nbytes
        assert size > 7e6
        asyncio.run(group.log_probs(batch, sampling=SAMPLING))
        assert wait_for(lambda size=size: 0.9 * size < used_by_store() - before < 1.1 * size)
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
def test_who_does_not_replay_gets_no_rows(ranks, monkeypatch, role, mode):
    group, batch = group_of(ranks, role, mode), make_batch()
    sizes = bytes_put(monkeypatch)
    if role == "critic":
        calls = [group.values(batch), group.update_critic(batch)]
    else:
        calls = [group.log_probs(batch, sampling=SAMPLING), group.update(batch, sampling=SAMPLING)]
    assert [asyncio.run(call)["rows"] for call in calls] == [None, None]
    assert sizes == [len(pickle_of(replace(batch, routed_experts=None)))] * 2
    assert batch.routed_experts is not None


def test_a_group_that_follows_one_that_died_puts_the_rows_again(ranks, monkeypatch):
    batch, sizes = make_batch(), bytes_put(monkeypatch)
    first, second = group_of(ranks), group_of(ranks)
    asyncio.run(first.log_probs(batch, sampling=SAMPLING))
    first.workers = []
    first.kill()
    assert first._rows._reference is None
    found = asyncio.run(second.log_probs(batch, sampling=SAMPLING))
    np.testing.assert_array_equal(np.concatenate(found["rows"]), batch.routed_experts.rows)
    assert sizes.count(batch.routed_experts.rows.nbytes) == 2


def test_a_rank_that_cannot_have_the_rows_leaves_its_group(monkeypatch):
    """The others may have them and wait for it in a collective."""

    def lost(reference: Any) -> Any:
        raise ObjectLostError("00ff", None, "a call site")

    monkeypatch.setattr(ray, "put", lambda rows: "00ff")
    sent = RowStore().without_rows(make_batch())
    monkeypatch.setattr(ray, "get", lost)
    for call in (lambda: Rank(0).log_probs(sent, False, SAMPLING), lambda: Rank(1).update(sent, SAMPLING)):
        with pytest.raises(OutOfStep, match="the step's routed experts are lost: .*00ff"):
            call()
