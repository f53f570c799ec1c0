"""Runs one command and guarantees that nothing of it survives: neither a stop nor the death of its parent.

    python process_guard.py PARENT_PID GRACE_SECONDS command …

The guard is a small process of its own between the trainer and the engine (only the standard library). It ends the
whole tree of the command when asked to (SIGTERM, SIGINT), when the command's first process ends, when a process of
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

if __name__ == "__main__":  # started without site-packages, so what it imports is found only beside this file
    _beside = Path(__file__).resolve().parents[2]  # a checkout, or the directory of installed packages
    sys.path[:1] = [str(_beside), str(_beside / "tools" / "untrusted")]

from untrusted.process_tree import descendants, process_fields

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.25
LOOK_SECONDS = 1.0
STOPPED_LOOKS = 10
"""Looks, one each LOOK_SECONDS, that must all find a stopped process. Not a time: whoever suspends and continues a
whole job does so to the guard as well."""
STOPPED_EXIT = 1
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_PREFIXES = ("sglang_", "sem.mp-")
"""SGLang's own files, and the semaphores of its processes, which Python removes unless it is killed."""
LOOKS_AT_A_FILE = 20
SCRATCH_VARIABLE = "MEGATRON_RETOOL_SCRATCH"


class SharedMemory:
    """Files of SGLang in shared memory, which descendants have mapped and are left behind where they are killed.

    Files of other names are not touched, nor are another server's: those may be in use.
    """

    def __init__(self) -> None:
        self._own: set[Path] = set()
        self._looks: dict[str, int] = {}

    def look(self) -> None:
        """Learn whose the new files are, while the processes live that map them.

        Each is noted with the run's temporary files (megatron_retool/scratch.py), for the case that this process is
        killed too.
        """
        with contextlib.suppress(OSError):
            names = [name for name in os.listdir(SHARED_MEMORY) if name.startswith(SHARED_MEMORY_PREFIXES)]
            unknown = [name for name in names if self._looks.get(name, 0) < LOOKS_AT_A_FILE]
            if not unknown:
                return
            mapped = self._mapped()
            for name in unknown:
                # A file is made first and mapped then, so one that is not mapped yet is looked at again.
                self._looks[name] = LOOKS_AT_A_FILE if name in mapped else self._looks.get(name, 0) + 1
                if name in mapped:
                    self._own.add(SHARED_MEMORY / name)
                    self._note(name)

    def remove(self) -> None:
        """Remove the files of shared memory that the guarded processes have left."""
        for path in self._own:
            with contextlib.suppress(OSError):
                path.unlink()

    @staticmethod
    def _mapped() -> set[str]:
        """Names of those that a descendant has mapped."""
        result = set()
        for pid in descendants(os.getpid()):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                    path = Path(line.rpartition(" ")[2])
                    if path.parent == SHARED_MEMORY and path.name.startswith(SHARED_MEMORY_PREFIXES):
                        result.add(path.name)
        return result

    @staticmethod
    def _note(name: str) -> None:
        if scratch := os.environ.get(SCRATCH_VARIABLE):
            notes = Path(scratch) / "shared_memory"
            notes.mkdir(exist_ok=True)
            (notes / name).touch()


def end_tree(grace_seconds: float, shared_memory: SharedMemory) -> None:
    """SIGTERM to every descendant of this process, SIGKILL to what is left after ``grace_seconds``; reaps them."""
    shared_memory.look()
    deadline = time.monotonic() + grace_seconds
    _signal_all(signal.SIGTERM)
    while _reap() and time.monotonic() < deadline:
        time.sleep(0.02)
    while _reap():
        _signal_all(signal.SIGKILL)
        time.sleep(0.02)
    shared_memory.remove()


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
    """Run a command, and end it with all that it started when the parent ends; the command's exit status."""
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
        try:
            os.setpgid(0, 0)
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != guard:
                os._exit(1)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
            os.execvp(command[0], command)
        except Exception as error:
            print(f"cannot run {command[0]}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(127)
    stopped_looks, next_look = 0, time.monotonic()
    shared_memory = SharedMemory()
    while True:
        received = signal.sigtimedwait(awaited, POLL_SECONDS)
        if os.getppid() != parent or (received is not None and received.si_signo != signal.SIGCHLD):
            end_tree(grace_seconds, shared_memory)
            return 0
        ended, status = _first_ended(child)
        if ended:
            end_tree(grace_seconds, shared_memory)
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        shared_memory.look()
        if time.monotonic() < next_look:
            continue
        next_look = time.monotonic() + LOOK_SECONDS
        stopped = stopped_process(child)
        stopped_looks = stopped_looks + 1 if stopped is not None else 0
        if stopped_looks >= STOPPED_LOOKS:
            print(
                f"process {stopped} of the engine was stopped and not continued: ending it", file=sys.stderr, flush=True
            )
            end_tree(grace_seconds, shared_memory)
            return STOPPED_EXIT


def stopped_process(root: int) -> int | None:
    """A process of the tree below and at ``root`` that a signal has stopped; a debugger's stop is another state."""
    queue = [root]
    while queue:
        pid = queue.pop()
        with contextlib.suppress(OSError):
            if process_fields(pid)[0] == "T":
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
