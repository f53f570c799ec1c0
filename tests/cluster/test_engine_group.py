"""An engine whose actor is gone, however Ray says so, is replaced."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, NodeDiedError, OutOfMemoryError, WorkerCrashedError

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


class OneEngine(EngineGroup):
    """A group of one engine whose actors are ``Worker``."""

    def __init__(self, first: Worker) -> None:
        self._workers, self._urls, self.stopped = {0: first}, {0: "http://old"}, False

    def _new_worker(self, number: int) -> Worker:
        return Worker(None, "http://new")


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


def test_a_death_for_memory_names_memory() -> None:
    assert "memory is used up" in in_one_line(OutOfMemoryError("Task was killed"))
