"""Runs one command and guarantees that nothing of it survives: neither a stop nor the death of its parent.

    python process_guard.py PARENT_PID GRACE_SECONDS command …

The guard is a small process of its own between the trainer and the engine (standard library alone). It ends the
whole tree of the command when it is told to (SIGTERM, SIGINT), when the command's first process ends, when a process of
it stays stopped (SIGSTOP: it would keep its requests waiting for ever), and when PARENT_PID is no longer its parent,
which covers SIGKILL of the trainer. PR_SET_PDEATHSIG in the trainer itself would
not do: it fires when the *thread* that started the child ends, and would then kill a healthy engine.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.25
LOOK_SECONDS = 1.0
STOPPED_LOOKS = 10
"""Looks, one each LOOK_SECONDS, that must all find a stopped process. Not a time: whoever suspends and continues a
whole job does so to the guard as well."""
STOPPED_EXIT = 1
SHARED_MEMORY_PREFIX = "/dev/shm/sglang_"


def descendants(root: int) -> list[int]:
    """Process ids below ``root``, wherever their sessions and groups are."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The command's name is in parentheses and may hold spaces.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found.extend(below)
        queue.extend(below)
    return found


def end_tree(grace_seconds: float) -> None:
    """SIGTERM to every descendant of this process, SIGKILL to what is left after ``grace_seconds``; reaps them.

    SGLang leaves its own shared-memory file behind however it ends; it is removed here. Memory of other names is not
    touched: it may belong to the learner.
    """
    left_behind = _shared_memory()
    deadline = time.monotonic() + grace_seconds
    _signal_all(signal.SIGTERM)
    while _reap() and time.monotonic() < deadline:
        time.sleep(0.02)
    while _reap():
        _signal_all(signal.SIGKILL)
        time.sleep(0.02)
    for path in left_behind:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _shared_memory() -> set[str]:
    """SGLang's shared-memory files that a descendant has mapped."""
    found = set()
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                path = line.rpartition(" ")[2]
                if path.startswith(SHARED_MEMORY_PREFIX):
                    found.add(path)
    return found


def _signal_all(number: int) -> None:
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _reap() -> bool:
    """Collect ended children; True while any child is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def main() -> int:
    parent, grace_seconds, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    # Blocked signals are taken by sigtimedwait below, never between a fork and its bookkeeping.
    awaited = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    libc = ctypes.CDLL(None, use_errno=True)
    # Grandchildren whose parent died become children of the guard, so that they can be found and reaped.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != guard:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"cannot run {command[0]}: {error}", file=sys.stderr, flush=True)
            os._exit(127)
    stopped_looks, next_look = 0, time.monotonic()
    while True:
        received = signal.sigtimedwait(awaited, POLL_SECONDS)
        if os.getppid() != parent or (received is not None and received.si_signo != signal.SIGCHLD):
            end_tree(grace_seconds)
            return 0
        ended, status = _first_ended(child)
        if ended:
            end_tree(grace_seconds)
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if time.monotonic() < next_look:
            continue
        next_look = time.monotonic() + LOOK_SECONDS
        stopped = stopped_process(child)
        stopped_looks = stopped_looks + 1 if stopped is not None else 0
        if stopped_looks >= STOPPED_LOOKS:
            print(
                f"process {stopped} of the engine was stopped and not continued: ending it", file=sys.stderr, flush=True
            )
            end_tree(grace_seconds)
            return STOPPED_EXIT


def stopped_process(root: int) -> int | None:
    """A process of the tree below and at ``root`` that a signal has stopped; a debugger's stop is another state."""
    queue = [root]
    while queue:
        pid = queue.pop()
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                return pid
            for task in Path(f"/proc/{pid}/task").iterdir():
                queue.extend(int(child) for child in (task / "children").read_text().split())
    return None


def _first_ended(child: int) -> tuple[bool, int]:
    """Reap whatever ended; whether ``child`` is among it, and its status."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True, 0
        if pid == child:
            return True, status
        if pid == 0:
            return False, 0


if __name__ == "__main__":
    sys.exit(main())
