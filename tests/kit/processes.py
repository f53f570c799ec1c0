"""What is asked about processes of the host, each of which may end while it is asked."""

from __future__ import annotations

import contextlib

import psutil


def is_alive(process: psutil.Process | int) -> bool:
    """Not ended, and no zombie that nobody has waited for. A process may end between the two questions."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def descendants_named(pid: int, words: str) -> list[psutil.Process]:
    """Living children of ``pid``, theirs and so on, whose command line contains ``words``."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if words in " ".join(child.cmdline()):
                found.append(child)
    return found
