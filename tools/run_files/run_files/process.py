"""The process that environment.json names."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def process_start(process: int) -> int | None:
    """Ticks from the host's start to the process's: with its number it names one process only. None: it is gone."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def still_runs(recorded: Mapping[str, Any]) -> bool | None:
    """Whether the process that wrote environment.json, ``recorded``, is at work; None: it was on another host."""
    if recorded.get("host") != socket.gethostname():
        return None
    start = recorded.get("process_start")
    return start is not None and process_start(int(recorded.get("process") or 0)) == start
