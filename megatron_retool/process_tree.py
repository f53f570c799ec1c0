"""Processes of this host and whose children they are, from /proc. Standard library only: guards of processes use it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path


def descendants(root: int) -> list[int]:
    """Process ids below ``root``, wherever their sessions and groups are."""
    return below(root, children())


def children() -> dict[int, list[int]]:
    """The children of every process that has any."""
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found.setdefault(int(process_fields(int(entry.name))[1]), []).append(int(entry.name))
    return found


def below(root: int, known: Mapping[int, Sequence[int]]) -> list[int]:
    """``descendants`` of several processes by one look at ``children``."""
    found: list[int] = []
    queue = [root]
    while queue:
        own = known.get(queue.pop(), [])
        found += own
        queue += own
    return found


def process_fields(pid: int) -> list[str]:
    """State, parent, … of /proc/PID/stat: what follows the name, which may hold spaces. Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
