"""CPU engines that start in a fraction of the time, for tests of what an engine computes.

Most of a start is the import of SGLang, which is the same each time. One process for each of pytest's imports it, and
engines are forked from that one. Tests of how an engine starts, ends or shows itself among the processes of the host
take ``SGLangServer``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, cast

from sglang_cpu_engine import MODEL_CLASS_VARIABLE, WITHOUT_VARIABLE
from sglang_rollout.engine.launch_command import EXACT_VARIABLE
from sglang_rollout.engine.process import SGLangServer, guard_command
from tests.kit import engine_forker

OF_ONE_ENGINE = (EXACT_VARIABLE, MODEL_CLASS_VARIABLE, WITHOUT_VARIABLE)
"""Variables of an engine's environment that SGLang's modules might read while they are imported."""


class ForkedEngine:
    """Stands for ``subprocess.Popen``: an engine in a process group of its own."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self._connection = _connection(environment)
        self.pid: int = self._ask("start", command, environment, str(log))
        self.returncode: int | None = None

    def _ask(self, *request: Any) -> Any:
        self._connection.send(request)
        return self._connection.recv()

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        if self.returncode is None:
            self.returncode = self._ask("poll", self.pid)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Kill it with all that it has started, whatever the signal: the guard of other engines does so in the end."""
        self.kill()

    def kill(self) -> None:
        """Kill it with all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended."""
        end = time.monotonic() + (3600 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("engine", end)
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode


class ForkedServer(SGLangServer):
    """``SGLangServer`` with a CPU engine that is forked."""

    def _run(self, command: list[str], environment: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        assert self.device == "cpu"
        return cast("subprocess.Popen[bytes]", ForkedEngine(command, environment, Path(log.name)))


_forker: list[Connection] = []


def _connection(environment: dict[str, str]) -> Connection:
    """The other end of ``engine_forker``, in a process that ends with this one."""
    if not _forker:
        ours, theirs = socket.socketpair()
        own = {name: value for name, value in environment.items() if name not in OF_ONE_ENGINE}
        with theirs:
            subprocess.Popen(
                [*guard_command(grace_seconds=1), sys.executable, "-P", engine_forker.__file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=own,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        _forker.append(Connection(ours.detach()))
    return _forker[0]
