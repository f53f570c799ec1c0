"""What the server has answered from files that have not changed since, within a bound of memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

MOST_BYTES = 64 * 2**20

_State = tuple[tuple[int, int] | None, ...]


class PageCache:
    """Answers by name, the longest unused given up first.

    Args:
        most_bytes: of all answers together; a larger one is not kept.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, tuple[_State, bytes]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def answer(self, name: str, files: Sequence[Path], make: Callable[[], bytes]) -> bytes:
        """The answer ``name``: as kept if ``files`` are what they were then, else what ``make`` returns."""
        # Before the files are read: one that changes meanwhile makes the answer stale, never the reverse.
        state = tuple(_state_of(path) for path in files)
        with self._lock:
            kept = self._kept.get(name)
            if kept is not None and kept[0] == state:
                self._kept.move_to_end(name)
                return kept[1]
        made = make()
        with self._lock:
            self._give_up(name)
            if len(made) <= self._most_bytes:
                self._kept[name] = state, made
                self._bytes += len(made)
            while self._bytes > self._most_bytes:
                self._give_up(next(iter(self._kept)))
        return made

    def _give_up(self, name: str) -> None:
        if name in self._kept:
            self._bytes -= len(self._kept.pop(name)[1])


def _state_of(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
