"""A run as the campaign sees it: its command, all that belongs to it, and what stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

from tests.kit.processes import is_alive

ROOT = Path(__file__).parents[2]
MARKER = "MEGATRON_RETOOL_CAMPAIGN_RUN"
SHARED_MEMORY = Path("/dev/shm")
LOOK_SECONDS = 2.0
IDLE_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent", "dashboard/agent.py", "runtime_env/agent/main.py")
"""Ray's own, which look for their dead raylet for a minute before they end."""


class WatchedRun:
    """One run, started and started again by the same command.

    Args:
        command: arguments of ``python -m megatron_retool``.
        temporary: TMPDIR of the run, which it leaves empty.
        log: everything that the command prints.
    """

    def __init__(self, command: list[str], temporary: Path, log: Path) -> None:
        self.command = command
        self.temporary = temporary
        self.log = log
        self._marker = uuid.uuid4().hex
        self._seen: dict[int, psutil.Process] = {}
        self._shared_memory: set[Path] = set()
        self._next_look = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {**os.environ, MARKER: self._marker, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        environment.pop("MEGATRON_RETOOL_SCRATCH", None)
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_retool", *self.command],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def driver(self) -> int:
        assert self._process is not None
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while the command runs."""
        assert self._process is not None
        return self._process.poll()

    def processes(self) -> dict[int, str]:
        """Command lines of all living processes of the run, by process id."""
        found = {}
        # By ancestry, for Ray overwrites the environment of its workers; by the marker, for some leave their parents.
        processes = [process for process in psutil.process_iter() if self._is_marked(process.pid)]
        with contextlib.suppress(psutil.Error):
            driver = psutil.Process(self.driver)
            processes += [driver, *driver.children(recursive=True)]
        for process in [*processes, *self._seen.values()]:
            with contextlib.suppress(psutil.Error):
                if is_alive(process):
                    self._seen[process.pid] = process
                    found[process.pid] = " ".join(process.cmdline())
        self._look_at_shared_memory(found)
        return found

    def tail(self, lines: int = 3) -> str:
        """The last lines that the command printed."""
        if not self.log.exists():
            return ""
        with open(self.log, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 8192))
            text = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        return " | ".join(text[-lines:])

    def orphans(self, seconds: float) -> dict[int, str]:
        """What is still alive ``seconds`` after the command's end."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def idle_agents(self, processes: dict[int, str]) -> bool:
        return all(any(words in command for words in IDLE_AGENTS) for command in processes.values())

    def left_behind(self) -> list[str]:
        """Temporary files, and shared memory that a process of the run had mapped."""
        self._look_at_shared_memory(self.processes())
        shared = [str(path) for path in sorted(self._shared_memory) if path.exists()]
        return [str(path) for path in sorted(self.temporary.iterdir())] + shared

    def kill(self) -> None:
        """End all of it, stopped processes too."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def _is_marked(self, process: int) -> bool:
        try:
            return f"{MARKER}={self._marker}".encode() in Path(f"/proc/{process}/environ").read_bytes()
        except OSError:
            return False

    def _look_at_shared_memory(self, processes: dict[int, str]) -> None:
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_SECONDS
        for process in processes:
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines():
                    path = Path(line.rpartition(" ")[2])
                    if path.parent == SHARED_MEMORY:
                        self._shared_memory.add(path)
