"""Processes of this host and whose children they are, from /proc. Standard library only: guards of processes use it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence


def descendants(root: int) -> list[int]:
    """Process ids below ``root``, wherever their sessions and groups are."""
    return below(root, children())


def children() -> dict[int, list[int]]:
    """The children of every process that has any."""
    result: dict[int, list[int]] = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            result.setdefault(int(process_fields(pid)[1]), []).append(pid)
    return result


def below(root: int, known: Mapping[int, Sequence[int]]) -> list[int]:
    """``descendants`` of several processes by one look at ``children``."""
    result: list[int] = []
    queue = [root]
    while queue:
        own = known.get(queue.pop(), [])
        result += own
        queue += own
    return result


def process_fields(pid: int) -> list[str]:
    """State, parent, … of /proc/PID/stat: what follows the name, which may hold spaces. Raises OSError."""
    with open(f"/proc/{pid}/stat", errors="replace") as file:
        return file.read().rpartition(")")[2].split()
