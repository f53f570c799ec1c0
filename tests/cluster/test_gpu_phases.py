"""Who is on the GPUs when: learner and engines that share them are never there together, apart from a weight sync."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from megatron_retool.cluster.gpu_phases import GpuPhases
from sglang_rollout.engine.base import EngineRejected, EngineUnavailable
from sglang_rollout.engine.client import SGLangClient


class Machine:
    """One GPU with a learner, a critic and an engine; remembers every move and refuses impossible ones."""

    def __init__(self, enabled: bool = True) -> None:
        self.moves: list[str] = []
        self.busy = self.gone = False
        self.urls: list[str] = []
        self.phases = GpuPhases(
            enabled, lambda: [FakeModel(self, "learner"), FakeModel(self, "critic")], lambda: self.urls, self.client
        )

    def client(self, url: str) -> Any:
        return FakeEngine(self, url)

    def take(self) -> list[str]:
        moves, self.moves = self.moves, []
        return moves


class FakeModel:
    def __init__(self, machine: Machine, name: str) -> None:
        self.machine, self.name = machine, name

    async def offload(self, *parts: str) -> None:
        self.machine.moves.append(f"{self.name} offload {' '.join(parts)}")

    async def reload(self, *parts: str) -> None:
        self.machine.moves.append(f"{self.name} reload {' '.join(parts)}")


class FakeEngine(SGLangClient):
    def __init__(self, machine: Machine, url: str) -> None:
        super().__init__(url)
        self.machine = machine

    async def flush_cache(self) -> None:
        if self.machine.gone:
            raise EngineUnavailable(self.base_url, "connection refused")
        if self.machine.busy:
            self.machine.busy = False
            self.machine.moves.append("engine busy")
            raise EngineRejected(self.base_url, "/flush_cache: HTTP 400")

    async def request(self, path: str, body: Any = None, *limits: Any, **options: Any) -> Any:
        self.machine.moves.append(f"engine {path.removeprefix('/').partition('_')[0]} {' '.join(body['tags'])}")


ALL_AWAY = ["learner offload weights optimizer gradients", "critic offload weights optimizer gradients"]
ALL_BACK = ["learner reload weights optimizer gradients", "critic reload weights optimizer gradients"]


def started() -> Machine:
    """The learner has left, and the engine has started after it."""
    machine = Machine()
    asyncio.run(machine.phases.engines_only())
    assert machine.take() == ALL_AWAY
    machine.urls = ["http://e0"]
    return machine


def test_a_step() -> None:
    machine = started()
    machine.busy = True  # what was aborted is still ending
    asyncio.run(machine.phases.training())
    assert machine.take() == ["engine busy", "engine release kv_cache weights", *ALL_BACK]
    asyncio.run(machine.phases.training())
    assert not [move for move in machine.take() if move.startswith("engine")]

    async def push() -> None:
        async with machine.phases.syncing():
            machine.moves.append("PUSH")

    asyncio.run(push())
    moves = machine.take()
    pushed = moves.index("PUSH")
    assert moves[:pushed] == [
        "learner offload optimizer gradients",
        "critic offload optimizer gradients",
        "critic offload weights",
        "engine resume weights",
        "learner reload weights",
    ]
    assert moves[pushed + 1 :] == [*ALL_AWAY, "engine resume kv_cache"]


def test_a_sync_without_training_makes_room_for_the_learners_weights() -> None:
    machine = started()

    async def push() -> None:
        async with machine.phases.syncing():
            machine.moves.append("PUSH")

    asyncio.run(push())
    moves = machine.take()
    assert moves.index("engine release kv_cache") < moves.index("learner reload weights") < moves.index("PUSH")
    assert moves[-1] == "engine resume kv_cache" and "engine resume weights" not in moves


def test_saving_keeps_the_engines_weights_and_ends_in_generation_whatever_happens() -> None:
    machine = started()

    async def save() -> None:
        async with machine.phases.saving():
            raise OSError("disk full")

    with pytest.raises(OSError):
        asyncio.run(save())
    back = ["learner reload weights optimizer", "critic reload weights optimizer"]
    assert machine.take() == ["engine release kv_cache", *back, *ALL_AWAY, "engine resume kv_cache"]


def test_restarted_and_dead_engines() -> None:
    machine = started()
    machine.gone = True
    asyncio.run(machine.phases.training())
    assert machine.take() == ALL_BACK
    machine.phases.restarted("http://e0")
    asyncio.run(machine.phases.engines_only())
    assert machine.take() == ALL_AWAY  # it never slept: nothing to resume


def test_one_engine_is_brought_up_to_date_while_the_others_go_on() -> None:
    machine = started()

    async def send() -> None:
        async with machine.phases.sending_to_one():
            machine.moves.append("PUSH")

    asyncio.run(send())
    assert machine.take() == ["learner reload weights", "PUSH", "learner offload weights"]


def test_with_gpus_of_their_own_nobody_moves() -> None:
    machine = Machine(enabled=False)
    machine.urls = ["http://e0"]

    async def all_phases() -> None:
        await machine.phases.training()
        async with machine.phases.syncing():
            pass
        async with machine.phases.saving():
            pass
        async with machine.phases.sending_to_one():
            pass
        await machine.phases.engines_leave()

    asyncio.run(all_phases())
    assert machine.moves == []
