"""Starts and stops a sandbox server as a child process of the trainer."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_retool.config import CodeInterpreterConfig


class SandboxServerError(RuntimeError):
    """The server did not start; the message carries what it said."""


class SandboxServerProcess:
    """A server that ends when it is told to, when this process ends, or when this process is killed."""

    def __init__(
        self,
        config: CodeInterpreterConfig,
        *,
        host: str = "127.0.0.1",
        log_file: str | Path | None = None,
        extra_arguments: tuple[str, ...] = (),
        start_timeout_seconds: float = 180.0,
    ) -> None:
        """Args:
        config: workers, limits, isolation, port (0: a free one).
        log_file: where the server's output goes; by default a temporary file that is read if the start fails.
        extra_arguments: passed to the server's command line as they are.
        """
        self.host = host
        self.port = 0
        self._config = config
        self._log_file = Path(log_file) if log_file is not None else None
        self._extra_arguments = extra_arguments
        self._start_timeout = start_timeout_seconds
        self._process: subprocess.Popen | None = None
        self._directory: tempfile.TemporaryDirectory | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not started"
        return self._process.pid

    def start(self) -> str:
        """Start the server, wait until it answers, and return its URL.

        Raises:
            SandboxServerError: it ended or did not become ready in time.
        """
        self._directory = tempfile.TemporaryDirectory(prefix="retool-sandbox-server-")
        port_file = Path(self._directory.name) / "port"
        log_file = self._log_file or Path(self._directory.name) / "log"
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(port_file),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=Path(__file__).resolve().parents[2],
                start_new_session=True,  # Ctrl-C reaches the trainer alone, which then stops the server in order
            )
        deadline = time.monotonic() + self._start_timeout
        while not port_file.exists():
            ended = self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                said = log_file.read_text(errors="replace")[-2000:].strip()
                self.stop()
                how = "ended" if ended else f"was not ready after {self._start_timeout:g} s"
                raise SandboxServerError(f"the sandbox server {how}: {said or 'no output'}")
            time.sleep(0.02)
        self.port = int(port_file.read_text())
        return self.url

    def is_running(self) -> bool:
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
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def __enter__(self) -> SandboxServerProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _command(self, port_file: Path) -> list[str]:
        config = self._config
        command = [sys.executable, "-m", "tools.code_interpreter.server", "--die-with-parent"]
        command += ["--host", self.host, "--port", str(config.port), "--port-file", os.fspath(port_file)]
        command += ["--workers", str(config.workers), "--isolation", config.isolation]
        command += ["--memory-limit-mb", str(config.memory_limit_mb)]
        if config.print_last_expression:
            command.append("--print-last-expression")
        return [*command, *self._extra_arguments, "--preimport", *config.preimport]
