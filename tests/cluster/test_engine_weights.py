"""Engines that fail to take weights, or that die: started again, on the current weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from megatron_retool.cluster.engine_weights import EngineWeights
from megatron_retool.cluster.gpu_phases import GpuPhases
from megatron_retool.cluster.learner_failures import LearnerDied
from megatron_retool.runs.step_timer import StepTimer
from sglang_rollout.engine.base import EngineStartError
from sglang_rollout.engine.weight_sync.errors import WeightSyncError


class FakeEngine:
    """Remembers which versions it was told that engines have."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    async def serve(self, version: int, urls: Sequence[str]) -> None:
        self.told.append(("serve", version, list(urls)))

    def restarted(self, url: str) -> None:
        self.told.append(("restarted", url))


class FakeEngines:
    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.by_number = {0: "http://e0", 1: "http://e1"}
        self.failing_starts = 0
        self.stopped = False

    @property
    def urls(self) -> list[str]:
        return list(self.by_number.values())

    def url(self, number: int) -> str:
        return self.by_number[number]

    def number(self, url: str) -> int | None:
        return next((number for number, own in self.by_number.items() if own == url), None)

    def by_sender(self, urls: list[str]) -> dict[int, list[str]]:
        return {0: list(urls)}

    async def _start(self) -> None:
        await asyncio.sleep(0.02)
        if self.failing_starts:
            self.failing_starts -= 1
            raise EngineStartError("ended while it was starting")

    async def restart(self, number: int, model_path: str) -> str:
        await self._start()
        self.by_number[number] += "-again"
        return self.by_number[number]

    async def add(self, model_path: str) -> int:
        await self._start()
        number = 1 + max(self.by_number)
        self.by_number[number] = f"http://e{number}"
        return number

    async def remove(self, number: int) -> None:
        del self.by_number[number]

    def give_up(self, number: int) -> None:
        del self.by_number[number]


class FakeLearner:
    """Raises ``errors`` one after another, and then syncs."""

    sending = False

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.sent: list[tuple[list[str], int]] = []

    async def sync_weights(self, senders: dict[int, list[str]], version: int) -> dict[str, float]:
        if self.errors:
            raise self.errors.pop(0)
        self.sent.append((senders[0], version))
        assert not self.sending
        self.sending = True
        await asyncio.sleep(0.01)
        self.sending = False
        return {"weight_sync/seconds": 1.0}


def weights_of(learner: FakeLearner | None) -> tuple[EngineWeights, list[tuple[str, str]], Console]:
    replaced: list[tuple[str, str]] = []

    async def replace(url: str, new_url: str) -> None:
        replaced.append((url, new_url))

    console = Console(record=True, width=300)
    engines: Any = FakeEngines()
    source = None if learner is None else lambda: learner
    phases = GpuPhases(False, list, list)
    return EngineWeights(engines, "model", source, phases, replace, StepTimer(), console), replaced, console


def test_an_engine_that_fails_to_take_weights_is_started_anew_and_gets_them() -> None:
    learner = FakeLearner(WeightSyncError("no answer", ["http://e1"]))
    weights, replaced, console = weights_of(learner)
    assert asyncio.run(weights.sync(3)) == {"weight_sync/seconds": 1.0}
    assert learner.sent == [(["http://e0", "http://e1-again"], 3)] and weights.version == 3
    assert replaced == [("http://e1", "http://e1-again")]
    assert "weight sync failed, restarting http://e1: no answer" in console.export_text()


@pytest.mark.parametrize(
    "errors",
    [
        [WeightSyncError("the learner's side", [])],
        [WeightSyncError("no answer", [f"http://e0{'-again' * restarts}"]) for restarts in range(3)],
    ],
    ids=["nobody_to_blame", "again_and_again"],
)
def test_what_a_restart_does_not_help_is_raised(errors: list[Exception]) -> None:
    weights, _, _ = weights_of(FakeLearner(*errors))
    with pytest.raises(WeightSyncError):
        asyncio.run(weights.sync(3))
    assert weights.version == 0


def test_another_engine_may_die_while_the_first_is_started_anew() -> None:
    learner = FakeLearner(*(WeightSyncError("no answer", [f"http://e{index}"]) for index in (1, 0)))
    weights, replaced, _ = weights_of(learner)
    asyncio.run(weights.sync(3))
    assert learner.sent == [(["http://e0-again", "http://e1-again"], 3)] and len(replaced) == 2


def test_a_dead_engine_comes_back_with_the_version_that_the_others_serve() -> None:
    learner = FakeLearner()
    weights, _, _ = weights_of(learner)
    asyncio.run(weights.sync(5))
    assert asyncio.run(weights.restart("http://e0")) == "http://e0-again"
    assert learner.sent[1:] == [(["http://e0-again"], 5)]


def test_an_engine_may_die_again_while_it_starts_and_before_it_has_its_weights() -> None:
    learner = FakeLearner(WeightSyncError("no answer", ["http://e0-again"]))
    weights, _, console = weights_of(learner)
    weights._engines.failing_starts = 1  # type: ignore[attr-defined]
    assert asyncio.run(weights.restart("http://e0")) == "http://e0-again-again"
    assert learner.sent == [(["http://e0-again-again"], 0)]
    assert "http://e0 did not restart, trying once more" in console.export_text()


def test_an_engine_that_does_not_start_again_is_left_out_but_for_the_last() -> None:
    learner = FakeLearner(WeightSyncError("no answer", ["http://e1"]))
    weights, replaced, console = weights_of(learner)
    weights._engines.failing_starts = 2  # type: ignore[attr-defined]
    asyncio.run(weights.sync(3))
    assert learner.sent == [(["http://e0"], 3)] and not replaced
    assert "http://e1 does not start again, the run continues with 1 engine: ended while" in console.export_text()
    assert asyncio.run(weights.restart("http://e1")) is None
    weights._engines.failing_starts = 2  # type: ignore[attr-defined]
    with pytest.raises(EngineStartError):
        asyncio.run(weights.restart("http://e0"))


def test_an_added_engine_gets_the_weights_that_the_others_serve() -> None:
    learner = FakeLearner()
    weights, _, _ = weights_of(learner)
    asyncio.run(weights.sync(5))
    assert asyncio.run(weights.add()) == 2
    assert learner.sent[1:] == [(["http://e2"], 5)]
    asyncio.run(weights.sync(6))
    asyncio.run(weights.remove(0))
    asyncio.run(weights.sync(7))
    assert learner.sent[2:] == [(["http://e0", "http://e1", "http://e2"], 6), (["http://e1", "http://e2"], 7)]


def test_rollout_gets_an_engine_that_a_sync_replaced_only_with_its_weights() -> None:
    """In asynchronous training it would sample at once, from weights of no version."""

    async def run() -> None:
        learner = FakeLearner(*(WeightSyncError("no answer", [f"http://e1{'-again' * times}"]) for times in range(2)))
        weights, replaced, _ = weights_of(learner)
        ended: list[str] = []

        async def replace(url: str, new_url: str) -> None:
            assert learner.sent == [(["http://e0", "http://e1-again-again"], 3)] and not ended
            replaced.append((url, new_url))

        async def meet_the_death() -> None:
            await asyncio.sleep(0.03)  # the first new one is there, and has no weights
            assert await weights.restart("http://e1") is None
            ended.append("restart")

        weights._replaced = replace
        await asyncio.gather(weights.sync(3), meet_the_death())
        assert replaced == [("http://e1", "http://e1-again-again")] and ended

    asyncio.run(run())


def test_an_engine_that_a_sync_gave_up_while_it_waited_is_not_sent_to() -> None:
    async def run() -> str | None:
        learner = FakeLearner(WeightSyncError("no answer", ["http://e1-again"]))
        weights, _, _ = weights_of(learner)
        await weights.before_update()
        back = asyncio.create_task(weights.restart("http://e1"))
        await asyncio.sleep(0.1)
        weights._engines.failing_starts = 2  # type: ignore[attr-defined]
        await weights.sync(6)
        assert learner.sent == [(["http://e0"], 6)]
        return await back

    assert asyncio.run(run()) is None


def test_no_engine_gets_weights_of_no_version() -> None:
    """While the learner changes its weights an engine that has started waits, and the sync serves it."""

    async def run() -> list[tuple[list[str], int]]:
        learner = FakeLearner()
        weights, _, _ = weights_of(learner)
        await weights.sync(5)
        await weights.before_update()
        added, back = asyncio.create_task(weights.add()), asyncio.create_task(weights.restart("http://e0"))
        await asyncio.sleep(0.1)
        assert not added.done() and not back.done() and len(learner.sent) == 1
        await weights.sync(6)
        assert (await added, await back) == (2, "http://e0-again")
        return learner.sent[1:]

    assert asyncio.run(run()) == [(["http://e0-again", "http://e1", "http://e2"], 6)]


def test_an_engine_comes_back_where_the_learner_is_dead_or_there_is_none() -> None:
    weights, _, console = weights_of(FakeLearner(LearnerDied("learner rank 0 died")))
    assert asyncio.run(weights.restart("http://e0")) == "http://e0-again"
    assert "is there without the current weights: learner rank 0 died" in console.export_text()
    weights, _, _ = weights_of(None)
    assert asyncio.run(weights.restart("http://e1")) == "http://e1-again"


def test_a_death_that_rollout_and_a_sync_meet_is_one_restart() -> None:
    async def both(first_is_rollout: bool) -> tuple[FakeLearner, str | None, list[str]]:
        learner = FakeLearner(*([] if first_is_rollout else [WeightSyncError("no answer", ["http://e1"])]))
        weights, _, _ = weights_of(learner)
        if first_is_rollout:
            restart, sync = asyncio.create_task(weights.restart("http://e1")), asyncio.create_task(weights.sync(4))
        else:
            sync = asyncio.create_task(weights.sync(4))
            await asyncio.sleep(0.005)
            restart = asyncio.create_task(weights.restart("http://e1"))
        await sync
        return learner, await restart, weights._engines.urls

    for first_is_rollout in (True, False):
        learner, new_url, urls = asyncio.run(both(first_is_rollout))
        assert new_url == "http://e1-again" and urls == ["http://e0", "http://e1-again"]
        assert (urls, 4) in learner.sent
        # Whichever comes last, the engine is told the version of the weights that it has.
        assert learner.sent[-1][1] == 4


def test_an_engine_that_a_sync_has_replaced_is_not_started_once_more() -> None:
    weights, _, _ = weights_of(FakeLearner(WeightSyncError("no answer", ["http://e1"])))

    async def sync_then_notice() -> str | None:
        await weights.sync(4)
        return await weights.restart("http://e1")

    assert asyncio.run(sync_then_notice()) is None
    assert weights._engines.urls == ["http://e0", "http://e1-again"]


def test_the_engine_is_told_which_engines_have_which_version() -> None:
    """Also of one that came back while the learner was dead: it has none."""
    learner = FakeLearner(WeightSyncError("no answer", ["http://e1"]))
    weights, _, _ = weights_of(learner)
    asyncio.run(weights.sync(3))
    both = ["http://e0", "http://e1-again"]
    told = weights._engines.engine.told  # type: ignore[attr-defined]
    assert told == [("restarted", "http://e1-again"), ("serve", 3, both)]
    asyncio.run(weights.restart("http://e0"))
    assert told[2:] == [("restarted", "http://e0-again"), ("serve", 3, ["http://e0-again"])]
    learner.errors = [LearnerDied("learner rank 0 died")]
    asyncio.run(weights.restart("http://e0-again"))
    assert told[4:] == [("restarted", "http://e0-again-again")]
