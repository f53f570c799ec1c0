"""Whether processes of the host are alive, asked while they end."""

from __future__ import annotations

import psutil


def is_alive(process: psutil.Process | int) -> bool:
    """Not ended, and no zombie that nobody has waited for. A process may end between the two questions."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
