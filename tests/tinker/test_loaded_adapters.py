"""Engines hold a few snapshots: the one that was not used for the longest time makes way, and none that is in use."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from megatron_retool.tinker.loaded_adapters import LoadedAdapters
from megatron_retool.tinker.requests import CheckpointPath


class Engines:
    def __init__(self) -> None:
        self.loaded: set[str] = set()
        self.events: list[str] = []
        self.broken = False

    async def load_adapter(self, name: str, directory: Path) -> None:
        await asyncio.sleep(0)
        if self.broken:
            raise OSError("no room")
        assert name not in self.loaded
        self.loaded.add(name)
        self.events.append(f"+{directory}")

    async def unload_adapter(self, name: str) -> None:
        self.loaded.remove(name)
        self.events.append("-")


def path(name: str) -> CheckpointPath:
    return CheckpointPath("run", "sampler_weights", name)


async def used(adapters: LoadedAdapters, name: str) -> None:
    async with adapters.use(path(name), Path(name)):
        await asyncio.sleep(0)


def test_the_least_used_makes_way():
    async def main():
        engines = Engines()
        adapters = LoadedAdapters(engines, 2)
        for name in ("a", "b", "a", "c", "a", "b"):
            await used(adapters, name)
            assert len(engines.loaded) <= 2
        assert engines.events == ["+a", "+b", "-", "+c", "-", "+b"]

    asyncio.run(main())


def test_one_in_use_stays_and_others_wait():
    async def main():
        engines = Engines()
        adapters = LoadedAdapters(engines, 1)
        async with adapters.use(path("a"), Path("a")):
            second = asyncio.create_task(used(adapters, "b"))
            together = asyncio.create_task(used(adapters, "a"))
            await together
            assert not second.done()
        await asyncio.wait_for(second, 5)
        assert engines.events == ["+a", "-", "+b"]

    asyncio.run(main())


def test_a_deleted_snapshot_is_not_taken_for_a_new_one_of_its_name():
    async def main():
        engines = Engines()
        adapters = LoadedAdapters(engines, 2)
        async with adapters.use(path("a"), Path("old")) as old:
            await adapters.forget(path("a"))
            async with adapters.use(path("a"), Path("new")) as new:
                assert old != new
                assert engines.loaded == {old, new}
        assert engines.loaded == {new}
        await adapters.forget(path("a"))
        assert not engines.loaded

    asyncio.run(main())


def test_one_that_cannot_be_loaded_takes_no_place():
    async def main():
        engines = Engines()
        adapters = LoadedAdapters(engines, 1)
        engines.broken = True
        with pytest.raises(OSError, match="no room"):
            await used(adapters, "a")
        engines.broken = False
        await asyncio.wait_for(used(adapters, "b"), 5)
        assert engines.events == ["+b"]

    asyncio.run(main())
