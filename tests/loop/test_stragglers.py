"""A slow rank is named together with its node, and only one that stays slow."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from rich.console import Console

from megatron_retool.cluster.learner_group import LearnerGroup
from megatron_retool.config import load_config
from megatron_retool.loop.faults import StragglerWatch
from megatron_retool.loop.update import peak_memory


def group_with(seconds: list[float], role: str = "learner") -> Any:
    nodes = [f"node{rank // 2}" for rank in range(len(seconds))]
    return SimpleNamespace(role=role, nodes=nodes, take_rank_seconds=lambda: seconds)


def watch(*overrides: str) -> tuple[StragglerWatch, Console]:
    console = Console(record=True, width=400)
    return StragglerWatch(load_config(None, list(overrides)), console), console


def test_rank_that_stays_slow_is_named_with_its_node() -> None:
    stragglers, console = watch()
    slow = group_with([10.0, 10.5, 9.5, 30.0])
    for _ in range(2):
        assert stragglers.record(slow, None) == {"perf/slowest_rank_ratio": 3.0}
    assert console.export_text() == ""
    assert stragglers.seconds == {"learner": [10.0, 10.5, 9.5, 30.0]}
    stragglers.record(slow)
    text = console.export_text()
    assert "learner rank 3 on node1 needed 30.0 s" in text and "others is 10.0 s, 3 steps in a row" in text
    assert text.count("straggler") == 1


def test_a_slow_step_now_and_then_is_none() -> None:
    stragglers, console = watch()
    for step in range(9):
        stragglers.record(group_with([10.0, 30.0 if step % 3 else 10.0]))
    assert console.export_text() == ""


@pytest.mark.parametrize(
    ("seconds", "overrides"),
    [([0.1, 0.9], []), ([10.0, 14.0], []), ([10.0, 30.0], ["trainer.straggler_factor=0"])],
    ids=["milliseconds", "within_the_factor", "turned_off"],
)
def test_what_is_not_worth_a_warning(seconds: list[float], overrides: list[str]) -> None:
    stragglers, console = watch(*overrides)
    for _ in range(4):
        assert stragglers.record(group_with(seconds))["perf/slowest_rank_ratio"] == seconds[1] / seconds[0]
    assert console.export_text() == ""


def test_single_ranks_and_steps_without_updates_have_no_ratio() -> None:
    stragglers, _ = watch()
    assert stragglers.record(group_with([5.0]), None) == {}
    assert stragglers.record(group_with([0.0, 0.0])) == {}
    assert stragglers.record(group_with([1.0, 1.0], "critic")) == {"perf/slowest_rank_ratio/critic": 1.0}


def test_group_adds_up_each_ranks_own_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "put", lambda value: value)

    async def answer(rank: int) -> tuple[dict[str, float] | None, float]:
        return ({"actor/lr": 1.0} if rank == 0 else None), 1.0 + rank

    group = LearnerGroup.__new__(LearnerGroup)
    calls = [SimpleNamespace(remote=lambda *_, rank=rank, **__: answer(rank)) for rank in range(2)]
    group.workers = [SimpleNamespace(update=call, update_fused=call) for call in calls]
    group._seconds = [0.0, 0.0]
    for update in (group.update, group.update_fused):
        assert asyncio.run(update(None, sampling=None)) == {"actor/lr": 1.0}
    assert group.take_rank_seconds() == [2.0, 4.0]
    assert group.take_rank_seconds() == [0.0, 0.0]


def test_peak_memory_is_that_of_the_rank_with_the_most() -> None:
    def group_of(role: str, *ranks: dict[str, float]) -> LearnerGroup:
        async def answer(peaks: dict[str, float]) -> dict[str, float]:
            return peaks

        group = LearnerGroup.__new__(LearnerGroup)
        group.role = role
        group.workers = [
            SimpleNamespace(peak_memory=SimpleNamespace(remote=lambda peaks=peaks: answer(peaks))) for peaks in ranks
        ]
        return group

    names = ("max_memory_allocated_gb", "max_memory_reserved_gb", "max_process_memory_gb")
    on_gpus = [dict(zip(names, peaks, strict=True)) for peaks in ((20.0, 31.0, 3.0), (21.0, 30.0, 2.0))]
    groups = group_of("learner", *on_gpus), group_of("critic", {"max_process_memory_gb": 5.0}), None
    assert asyncio.run(peak_memory(*groups)) == {
        "perf/max_memory_allocated_gb": 21.0, "perf/max_memory_reserved_gb": 31.0,
        "perf/max_process_memory_gb": 3.0, "perf/max_process_memory_gb/critic": 5.0,
    }  # fmt: skip
