"""An engine whose actor is gone, however Ray says so, is replaced."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, NodeDiedError, OutOfMemoryError, WorkerCrashedError

from megatron_retool.cluster import engine_group
from megatron_retool.cluster.engine_group import EngineGroup
from megatron_retool.cluster.learner_failures import in_one_line


class Method:
    """A remote method that answers, or raises what Ray would."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def remote(self, *arguments: Any) -> Any:
        async def answer() -> Any:
            if isinstance(self._answer, BaseException):
                raise self._answer
            return self._answer

        return answer()


class Worker:
    def __init__(self, stop: Any, start: Any) -> None:
        self.stop, self.start = Method(stop), Method(start)
        self.meeting_place, self.is_alive = Method("10.0.0.1:1"), Method(True)


class OneEngine(EngineGroup):
    """A group of one engine whose actors are ``Worker``, as many as it has nodes."""

    def __init__(self, *parts: Worker) -> None:
        self._workers, self._urls, self.stopped = {0: list(parts)}, {0: "http://old"}, False
        self._watches = {}

    def _new_workers(self, number: int) -> list[Worker]:
        return [Worker(None, "http://new") for _ in self._workers[number]]


@pytest.mark.parametrize(
    "death",
    [ActorDiedError(), OutOfMemoryError("killed"), NodeDiedError("gone"), WorkerCrashedError(), TimeoutError()],
    ids=lambda death: type(death).__name__,
)
@pytest.mark.parametrize("at", ["stop", "start"])
def test_a_dead_actor_is_replaced(monkeypatch: pytest.MonkeyPatch, death: BaseException, at: str) -> None:
    killed: list[object] = []
    monkeypatch.setattr(ray, "kill", killed.append)
    first = Worker(death, None) if at == "stop" else Worker(None, death)
    group = OneEngine(first)
    assert asyncio.run(group.restart(0, "model")) == "http://new"
    assert killed == [first] and group.urls == ["http://new"]


@pytest.mark.parametrize("at", ["stop", "start"])
def test_of_an_engine_on_two_nodes_all_actors_are_replaced(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    killed: list[object] = []
    monkeypatch.setattr(ray, "kill", killed.append)
    death = NodeDiedError("gone")
    parts = [Worker(None, "http://old"), Worker(death, None) if at == "stop" else Worker(None, death)]
    group = OneEngine(*parts)
    assert asyncio.run(group.restart(0, "model")) == "http://new"
    assert killed == parts and group.urls == ["http://new"]


@pytest.mark.parametrize("end", [False, NodeDiedError("gone")], ids=["process", "node"])
def test_an_engine_on_two_nodes_ends_with_one_of_them(monkeypatch: pytest.MonkeyPatch, end: Any) -> None:
    monkeypatch.setattr(engine_group, "PART_LOOK_SECONDS", 0.01)
    ended: list[object] = []

    async def stop(workers: Any) -> None:
        ended.extend(workers)

    monkeypatch.setattr(engine_group, "stop_actors", stop)
    parts = [Worker(None, "http://new"), Worker(None, "http://new")]

    async def scenario() -> None:
        group = OneEngine(*parts)
        await group.restart(0, "model")
        await asyncio.sleep(0.05)
        assert not ended
        parts[1].is_alive = Method(end)
        await asyncio.wait_for(group._watches[0], 5)

    asyncio.run(scenario())
    assert ended == parts


def test_a_death_for_memory_names_memory() -> None:
    assert "memory is used up" in in_one_line(OutOfMemoryError("Task was killed"))
