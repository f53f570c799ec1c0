"""Ends the processes below this one, however fast they fork, for hosts on which no pid namespace does that."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from untrusted.process_tree import below, children

_END_SECONDS = 5.0
_PAUSE_SECONDS = 0.002


def end(spared: int | None = None) -> bool:
    """End and reap all descendants of this process, which must be a child subreaper; whether none is left.

    All are stopped before the first is killed: a stopped process forks no more and still counts against the limit of
    processes, whereas each one killed by itself makes room for another fork.

    Args:
        spared: a child that is left alive, with its own descendants.
    """
    deadline = time.monotonic() + _END_SECONDS
    while _has_children():
        stopped: set[int] = set()
        while time.monotonic() < deadline and (result := _descendants(spared) - stopped):
            _signal(result, signal.SIGSTOP)
            stopped |= result
        if not stopped:
            return not _descendants(spared)
        _signal(stopped, signal.SIGKILL)
        for process in stopped:
            with contextlib.suppress(ChildProcessError):  # a child of another one, until that one is reaped
                os.waitpid(process, os.WNOHANG)
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_SECONDS)
    return True


def _has_children() -> bool:
    """Whether this process has children, ended ones included; its other descendants would be below one of them."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _descendants(spared: int | None) -> set[int]:
    known = children()
    result = set(below(os.getpid(), known))
    return result if spared is None else result - {spared, *below(spared, known)}


def _signal(processes: set[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, number)
