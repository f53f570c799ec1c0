"""What the programs of task agents use, by looking through /proc once for all of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from untrusted.process_tree import below, children

LOOK_SECONDS = 0.5
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Usage:
    """Of a process and all that descends from it: processes, and their resident memory (shared pages count in each)."""

    processes: int = 0
    memory_bytes: int = 0


class UsageWatch:
    """Measures processes as long as somebody waits for one of them."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Callable[[Usage], bool], asyncio.Future[Usage]]] = {}
        self._looking: asyncio.Task[None] | None = None

    async def until(self, pid: int, beyond: Callable[[Usage], bool]) -> Usage:
        """Return when ``beyond`` is true of what ``pid``, which is no longer looked at once no caller waits, uses."""
        result: asyncio.Future[Usage] = asyncio.get_running_loop().create_future()
        self._waiting[pid] = beyond, result
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            return await result
        finally:
            self._waiting.pop(pid, None)

    async def _look(self) -> None:
        while self._waiting:
            await asyncio.sleep(LOOK_SECONDS)
            used = await asyncio.to_thread(usage_of, list(self._waiting))
            for pid, (beyond, result) in list(self._waiting.items()):
                if pid in used and not result.done() and beyond(used[pid]):
                    result.set_result(used[pid])


def usage_of(roots: list[int]) -> dict[int, Usage]:
    """What each of ``roots`` uses."""
    known = children()
    trees = {root: [root, *below(root, known)] for root in roots}
    return {root: Usage(len(tree), sum(map(_resident, tree))) for root, tree in trees.items()}


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0
