"""Starts and stops a sandbox server as a child process of the trainer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from code_interpreter.settings import TOKEN_VARIABLE
from untrusted.errors import OperationError

_STARTS = 3
_END_SECONDS = 40.0
"""How long a server that was asked to stop may take to end its workers."""
CHECK_SECONDS = 1.0
RETRY_SECONDS = 10.0
"""Until the next try, where a server could not be started again."""


class SandboxServerError(OperationError):
    """The server did not start; the message carries what it said."""


class SandboxServerKilled(SandboxServerError):
    """A signal ended the server before it was ready."""


class _ServerSettings(Protocol):
    """What a server is started with: these fields of ``settings.SandboxSettings``."""

    @property
    def workers(self) -> int: ...
    @property
    def isolation(self) -> str: ...
    @property
    def memory_limit_mb(self) -> int: ...
    @property
    def max_sessions(self) -> int | None: ...
    @property
    def session_idle_seconds(self) -> float: ...
    @property
    def print_last_expression(self) -> bool: ...
    @property
    def preimport(self) -> Sequence[str]: ...


class SandboxServerProcess:
    """A server that ends when it is asked to, when this process ends, or when this process is killed."""

    def __init__(
        self,
        settings: _ServerSettings,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        log_file: str | Path | None = None,
        extra_arguments: tuple[str, ...] = (),
        command_prefix: tuple[str, ...] = (),
        start_timeout_seconds: float = 180.0,
    ) -> None:
        """Prepare; ``start`` starts it.

        Args:
            settings: workers, limits, isolation; further ones are extra_arguments.
            host: address that the server listens on.
            port: 0: any free one, and a server that is started again takes the same.
            token: what its requests must show; None: nothing, unless this process's environment has a token.
            log_file: where the server's output goes; by default only what a failing start says is kept.
            extra_arguments: passed to the server's command line as they are.
            command_prefix: a program (and its arguments) that executes the server in its own place, like setpriv.
        """
        self.host = host
        self.port = port
        self._settings = settings
        # Not on the command line, which every user of the host can read.
        self._environment = {**os.environ, TOKEN_VARIABLE: token} if token else None
        self._log_file = Path(log_file) if log_file is not None else None
        self._extra_arguments = extra_arguments
        self._command_prefix = command_prefix
        self._start_timeout = start_timeout_seconds
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where the server listens."""
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """The server's process id."""
        assert self._process is not None, "the server is not started"
        return self._process.pid

    def start(self) -> str:
        """Start the server, wait until it answers, and return its URL. One that is killed meanwhile is started again.

        A second start, after the server died, takes the same port again, so that clients find it.

        Raises:
            SandboxServerError: it ended or did not become ready in time.
        """
        for _ in range(_STARTS - 1):
            with contextlib.suppress(SandboxServerKilled):
                return self._start_once()
        return self._start_once()

    def _start_once(self) -> str:
        if self._log_file is None:
            descriptor, name = tempfile.mkstemp(prefix="retool-sandbox-", suffix=".log")
            os.close(descriptor)
            log_file = Path(name)
        else:
            log_file = self._log_file
            log_file.parent.mkdir(parents=True, exist_ok=True)
        reader, writer = os.pipe()
        try:
            with log_file.open("ab") as log:
                start_of_log = log.tell()
                self._process = subprocess.Popen(
                    self._command(writer),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._environment,
                    cwd=Path(__file__).resolve().parents[1],
                    pass_fds=(writer,),
                    start_new_session=True,  # Ctrl-C reaches only the trainer, which then stops the server in order
                )
        finally:
            os.close(writer)
        try:
            with selectors.DefaultSelector() as selector:  # select() itself refuses descriptors above 1023
                selector.register(reader, selectors.EVENT_READ)
                answered = bool(selector.select(self._start_timeout))
            port = os.read(reader, 16) if answered else b""
            if not port:
                code = None
                if answered:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        code = self._process.wait(_END_SECONDS)
                said = log_file.read_bytes()[start_of_log:][-2000:].decode(errors="replace").strip()
                how = "ended" if answered else f"was not ready after {self._start_timeout:g} s"
                # One that was told to stop ends with 0; a start that cannot succeed ends with 1 and a reason.
                kind = SandboxServerKilled if code is not None and code <= 0 else SandboxServerError
                raise kind(f"the sandbox server {how}: {said or 'no output'}")
        except BaseException:
            self.stop()
            raise
        finally:
            os.close(reader)
            if self._log_file is None:
                log_file.unlink()
        self.port = int(port)
        return self.url

    def is_running(self) -> bool:
        """Whether the server's process runs."""
        return self._process is not None and self._process.poll() is None

    def stop(self, timeout_seconds: float = 10.0) -> None:
        """End the server with all its workers and wait until it is gone. Harmless when it is not running."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def __enter__(self) -> SandboxServerProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _command(self, ready_fd: int) -> list[str]:
        settings = self._settings
        command = [*self._command_prefix, sys.executable, "-m", "code_interpreter.server", "--die-with-parent"]
        command += ["--host", self.host, "--port", str(self.port), "--ready-fd", str(ready_fd)]
        command += ["--workers", str(settings.workers), "--isolation", settings.isolation]
        command += ["--memory-limit-mb", str(settings.memory_limit_mb)]
        command += ["--session-idle-seconds", str(settings.session_idle_seconds)]
        if settings.max_sessions is not None:
            command += ["--max-sessions", str(settings.max_sessions)]
        if settings.print_last_expression:
            command.append("--print-last-expression")
        return [*command, *self._extra_arguments, "--preimport", *settings.preimport]


async def kept_running(server: SandboxServerProcess, say: Callable[[str], None]) -> None:
    """Start ``server`` again, on its port, whenever it ends, until cancelled; callers wait and repeat meanwhile.

    Args:
        say: told of every end, and of every start that fails.
    """
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        if not server.is_running():
            say("the code interpreter server ended: starting it again")
            try:
                # Not in another thread: the server dies with the thread that started it.
                server.start()
            except SandboxServerError as error:
                say(f"the code interpreter server does not start again: {error}")
                await asyncio.sleep(RETRY_SECONDS)
