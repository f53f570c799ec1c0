"""Processes of this host and whose children they are, from /proc. Standard library only: guards of processes use it."""

from __future__ import annotations

import contextlib
from pathlib import Path


def descendants(root: int) -> list[int]:
    """Process ids below ``root``, wherever their sessions and groups are."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                children.setdefault(int(process_fields(int(entry.name))[1]), []).append(int(entry.name))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def process_fields(pid: int) -> list[str]:
    """State, parent, … of /proc/PID/stat: what follows the name, which may hold spaces. Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
