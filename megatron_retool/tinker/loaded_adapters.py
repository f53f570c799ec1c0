"""Which snapshots the engines have loaded. They have room for a few, and clients hold on to many: what was not used for
the longest time makes way, and is read again when a client comes back to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron_retool.tinker.requests import CheckpointPath
from megatron_retool.tinker.sampler import PromptSampler


@dataclass(eq=False)
class _Slot:
    """
    Attributes:
        retired: its snapshot was deleted, and another may have its path.
    """

    name: str
    users: int = 0
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_loaded: bool = False
    retired: bool = False


class LoadedAdapters:
    """Adapters by the path of their snapshot.

    Args:
        most: that are loaded at the same time.
    """

    def __init__(self, sampler: PromptSampler, most: int) -> None:
        self._sampler = sampler
        self._most = most
        # From the one that was not used for the longest time to the newest.
        self._slots: dict[CheckpointPath, _Slot] = {}
        self._taken = 0
        self._changed = asyncio.Condition()
        self._numbers = itertools.count(1)

    @contextlib.asynccontextmanager
    async def use(self, path: CheckpointPath, directory: Path) -> AsyncIterator[str]:
        """The adapter's name, which stays loaded for the length of the block.

        Args:
            directory: with its files.
        """
        slot = await self._slot(path)
        try:
            async with slot.loading:
                if not slot.is_loaded:
                    await self._sampler.load_adapter(slot.name, directory)
                    slot.is_loaded = True
            yield slot.name
        finally:
            async with self._changed:
                slot.users -= 1
                self._changed.notify_all()
                if not slot.users and (slot.retired or not slot.is_loaded):
                    await self._remove(path, slot)

    async def forget(self, path: CheckpointPath) -> None:
        """Unload a snapshot that was deleted, once no sample uses it."""
        async with self._changed:
            slot = self._slots.get(path)
            if slot is None:
                return
            slot.retired = True
            if slot.users:
                del self._slots[path]
            else:
                await self._remove(path, slot)
                self._changed.notify_all()

    async def _slot(self, path: CheckpointPath) -> _Slot:
        async with self._changed:
            while path not in self._slots and self._taken >= self._most:
                idle = next(((each, slot) for each, slot in self._slots.items() if not slot.users), None)
                if idle is None:
                    await self._changed.wait()
                else:
                    await self._remove(*idle)
            slot = self._slots.pop(path, None)
            if slot is None:
                slot = _Slot(f"{path.run.replace(':', '_')}-{path.name}-{next(self._numbers)}")
                self._taken += 1
            self._slots[path] = slot
            slot.users += 1
            return slot

    async def _remove(self, path: CheckpointPath, slot: _Slot) -> None:
        if self._slots.get(path) is slot:
            del self._slots[path]
        self._taken -= 1
        if slot.is_loaded:
            await self._sampler.unload_adapter(slot.name)
