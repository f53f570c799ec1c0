"""One SGLang server process: start, health, stop.

    server = SGLangServer(config.rollout.engine, model_path=model, log_file=run_dir / "logs" / "engine_0.log")
    server.start()                     # returns when the server has generated a token, or raises EngineStartError
    ...                                # server.base_url is what SGLangClient speaks to
    server.stop()

An engine on several nodes has such a process on each of them (``part``). The first one serves, the others only compute.

The process runs below ``process_guard``, so that no part of it outlives the trainer, whatever happens to that one.
Every request must show the key of ``key.py``. On a host without CUDA the server gets what SGLang lacks there from the
distribution ``sglang_cpu_engine`` (tools/), through its own PYTHONPATH.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from megatron_retool.ports import free_port
from sglang_rollout.engine.base import EngineClientError, EngineError, EngineStartError
from sglang_rollout.engine.blocking_client import BlockingClient
from sglang_rollout.engine.key import engine_key
from sglang_rollout.engine.launch_command import TORCHVISION_VARIABLE, SGLangLaunch, torchvision_directory

logger = logging.getLogger(__name__)

_HERE = Path(__file__).resolve().parent
LOG_TAIL_LINES = 8
LOG_TAIL_WIDTH = 240


def guard_command(grace_seconds: float) -> list[str]:
    """What stands before a command that is to end with this process and to leave nothing behind (process_guard.py)."""
    return [sys.executable, "-S", "-E", str(_HERE / "process_guard.py"), str(os.getpid()), f"{grace_seconds:g}"]


class SGLangServer(SGLangLaunch):
    """An SGLang server and its log. Not thread-safe: one owner starts and stops it."""

    _process: subprocess.Popen[bytes] | None = None
    _log_start = 0

    @property
    def base_url(self) -> str:
        """Where the server listens."""
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id of the guard, whose end means that the whole server has ended."""
        return self._process.pid if self._process else None

    def is_alive(self) -> bool:
        """Whether the server's process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Launch the server and wait until it has generated a token, or is ready to compute where it does not serve.

        Raises:
            EngineStartError: the port is taken, the server ended (with the tail of its log), or it did not become
                ready within start_timeout_seconds. Nothing is left running.
        """
        attempts = 3 if self.requested_port == 0 else 1
        for attempt in range(attempts):
            self.launch()
            try:
                self.wait_ready()
                return
            except EngineStartError:
                # Somebody may take a free port between our probe and the server's bind.
                # SGLang prints more behind that line than the tail of a message holds.
                if attempt + 1 == attempts or "address already in use" not in self.log_tail(lines=1000).lower():
                    raise

    def launch(self) -> None:
        """Start the process and return at once; ``wait_ready`` tells when it serves."""
        if self.is_alive():
            raise EngineError(f"the engine at {self.base_url} is running already")
        if not (self.model_path / "config.json").is_file():
            raise EngineStartError(
                f"{self.model_path} has no config.json: rollout needs a Hugging Face model directory (model.path)"
            )
        self.port = self.requested_port or free_port(self.host)
        self._check_port()
        if self.device == "cpu" and not (torchvision_directory() / "torchvision").is_dir():
            raise EngineStartError(
                f"SGLang needs torchvision, which is not in {torchvision_directory()}: run scripts/setup.sh, or "
                f"set {TORCHVISION_VARIABLE} to the directory that holds it"
            )
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        self._write_key_file()
        with open(self.log_file, "ab") as log:
            self._log_start = log.tell()
            self._process = self._run(self.command(), self.environment(), log)

    def _run(self, command: list[str], environment: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*guard_command(grace_seconds=1 if self.device == "cpu" else 5), *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )

    def wait_ready(self) -> None:
        """Wait until the server has generated a token; see ``start`` for what is raised."""
        try:
            with BlockingClient([self.base_url]) as client:
                self._wait_ready(client)
        finally:
            self._remove_key_file()

    def _wait_ready(self, client: BlockingClient) -> None:
        deadline = time.monotonic() + self.config.start_timeout_seconds
        one_token = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        while True:
            assert self._process is not None, "launch() comes first"
            if self._process.poll() is not None:
                advice = _advice(self.log_tail(lines=1000))
                raise EngineStartError(
                    f"the SGLang server for {self.model_path} ended with exit code {self._process.returncode} while "
                    f"it was starting.{advice} Its log is {self.log_file}, which ends with:\n{self.log_tail()}"
                )
            if time.monotonic() > deadline:
                self.stop()
                raise EngineStartError(
                    f"the SGLang server for {self.model_path} was not ready after "
                    f"{self.config.start_timeout_seconds:.0f} s; raise rollout.engine.start_timeout_seconds if the "
                    f"model is large. Its log is {self.log_file}, which ends with:\n{self.log_tail()}"
                )
            if not self._serves and self._answers(client, "/health", timeout=2.0):
                return
            if self._serves and self._answers(client, "/ready", timeout=2.0):
                left = max(1.0, deadline - time.monotonic())
                if self._answers(client, "/generate", timeout=left, body=one_token):
                    # Keeps later garbage collections (one in every cache flush) off the modules' millions of objects.
                    self._answers(client, "/freeze_gc", timeout=10.0)
                    return
            time.sleep(0.1)

    def stop(self, timeout: float = 10.0) -> None:
        """End the server with everything below it. Bounded by ``timeout`` seconds; safe to call at any time."""
        process, self._process = self._process, None
        self._remove_key_file()
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            # The guard's child has PR_SET_PDEATHSIG, and SGLang's workers watch their parent in the same way.
            process.kill()
            process.wait()

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """Last lines of the log of this start, each cut to a width that a message can carry."""
        try:
            with open(self.log_file, "rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - 64 * 1024))
                text = log.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(line[:LOG_TAIL_WIDTH] for line in text.splitlines()[-lines:])

    def _write_key_file(self) -> None:
        """What gives the server its key: a file that only this user can read, for all users see a command line.

        With --api-key and without --admin-api-key SGLang demands the key of every request but /health…, /ready… and
        /metrics…, and refuses those that need an administrator's key.
        """
        self._remove_key_file()
        handle, name = tempfile.mkstemp(prefix="engine-key-", suffix=".yaml")  # mode 600
        self._key_file = Path(name)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(f'api-key: "{engine_key()}"\n')

    def _remove_key_file(self) -> None:
        path, self._key_file = self._key_file, None
        if path is not None:
            path.unlink(missing_ok=True)

    def __enter__(self) -> SGLangServer:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _check_port(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except OSError as error:
                raise EngineStartError(
                    f"port {self.port} on {self.host} is in use ({error.strerror}): stop the process that listens "
                    "there (ss -ltnp shows it), or let the engine take any free port"
                ) from error

    def _answers(self, client: BlockingClient, path: str, timeout: float, body: dict[str, Any] | None = None) -> bool:
        try:
            client.submit(self.base_url, path, body, timeout).result()
        except EngineClientError:
            return False
        return True


def _advice(log: str) -> str:
    """What a known ending of the log means, as a sentence with a leading space; empty for an unknown one."""
    lowered = log.lower()
    if "out of memory" in lowered or "not enough memory" in lowered:
        return " It ran out of memory: lower rollout.engine.mem_fraction_static or rollout.engine.max_total_tokens."
    if "address already in use" in lowered:
        return " A port it needs is in use: stop the other server or choose another port."
    if "unrecognized arguments" in lowered or "invalid choice" in lowered:
        return " It refused an argument: check rollout.engine.extra_args."
    if "modulenotfounderror" in lowered or "no module named" in lowered:
        return " A package is missing: install requirements/ again."
    if "safetensors" in lowered and "no such file" in lowered:
        return " The model directory has no weights."
    return ""
