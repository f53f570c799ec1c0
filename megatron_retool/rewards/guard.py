"""Ends all that a reward worker started, however the worker, or the process that wants its rewards, ends.

The guard is the worker's parent. Being a subreaper it inherits every descendant whose own parent ended, so a child that
took a session of its own is found as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time

from untrusted.process_tree import descendants

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_SECONDS = 2.0


def fork_guarded(parent: int) -> None:
    """Return in a child of this process, which stays behind as its guard and ends as the child does.

    Args:
        parent: process id; the guard ends when that is no longer its parent's, or the thread that started it ended.
    """
    awaited = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
    # Blocked signals are taken by sigtimedwait, never between a fork and its bookkeeping.
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        # A worker stuck inside one long C call sees neither the end of its requests nor a Python signal handler.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != guard:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        return
    try:
        os.closerange(3, 1024)  # the worker's end of the channel among them
        _exit_as(_wait(child, parent, awaited))
    finally:
        os._exit(1)


def _wait(child: int, parent: int, awaited: set[signal.Signals]) -> int:
    """End everything when the time has come; the wait status of ``child``."""
    status: int | None = None
    while status is None:
        received = signal.sigtimedwait(awaited, _LOOK_SECONDS)
        if os.getppid() != parent or (received is not None and received.si_signo != signal.SIGCHLD):
            break
        status = _reaped(child)[1]
    while True:
        left, ended = _reaped(child)
        status = ended if ended is not None else status
        if not left:
            return status or 0
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _reaped(child: int) -> tuple[bool, int | None]:
    """Collect what ended: whether any child is left, and the status of ``child`` if it was among these."""
    status = None
    while True:
        try:
            pid, result = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False, status
        if pid == 0:
            return True, status
        if pid == child:
            status = result


def _exit_as(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    sys.stderr.flush()
    os._exit(code)
