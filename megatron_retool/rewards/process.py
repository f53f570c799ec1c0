"""A reward worker as the manager sees it: started, asked under a deadline, ended with all that it started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from megatron_retool.config import RewardConfig
from megatron_retool.installation import ROOT
from megatron_retool.registry import ExtensionError
from megatron_retool.rewards.channel import BrokenFrame, Channel
from megatron_retool.rewards.worker import plain_json
from untrusted import load_own_json
from untrusted.process_tree import descendants, process_fields

START_SECONDS = 120.0
_END_SECONDS = 5.0


class WorkerFault(RuntimeError):
    """The worker ended, was stopped, or answered with what is no reply. Another may do better."""


class WorkerProcess:
    """One reward process. Used by the one thread that made it, except for ``kill``."""

    def __init__(self, config: RewardConfig) -> None:
        """
        Raises:
            ExtensionError: the process cannot be started, or reports that it cannot load ``reward.function``.
        """
        root = str(ROOT)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "megatron_retool.rewards.worker"),
                        *(config.function, json.dumps(config.function_kwargs)),
                        *(str(config.memory_limit_mb), str(os.getpid()), str(theirs.fileno())),
                    ],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise ExtensionError(
                    f"reward.function={config.function}: no process can be started: {error}"
                ) from error
        self._channel = Channel(ours)
        self._number = 0
        self._pid: int | None = None
        try:
            greeting = load_own_json(self._channel.receive(time.monotonic() + START_SECONDS)[1])
        except (TimeoutError, EOFError, OSError, ValueError):
            self.kill()
            raise ExtensionError(
                f"reward.function={config.function}: its process did not start; see the messages above"
            ) from None
        if not greeting["ready"]:
            self.kill()
            raise ExtensionError(greeting["error"])
        self._pid = greeting["pid"]

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def ask(self, request: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
        """The worker's reply to this very request, or {"failure": kind, "message": text}.

        Raises:
            WorkerFault: there is no reply, and not for lack of time. After this, and after a time-out, it is dead.
        """
        try:
            payload = json.dumps(request, default=plain_json).encode()
        except (TypeError, ValueError, RecursionError) as error:
            return {"failure": "exception", "message": f"what the prompt's row holds is no JSON: {error}"[:300]}
        self._number += 1
        deadline = time.monotonic() + timeout_seconds
        try:
            if self._channel.has_input():
                raise BrokenFrame("it spoke without having been asked")
            self._channel.send(self._number, payload, deadline)
            number, payload = self._channel.receive(deadline)
            if number != self._number:
                raise BrokenFrame(f"it answers request {number}")
            reply: dict[str, Any] = load_own_json(payload)
            return reply
        except TimeoutError:
            stopped = self._stopped()
            self.kill()
            if stopped:
                raise WorkerFault("the process was stopped from outside") from None
            return {"failure": "timeout", "message": f"no result after {timeout_seconds:g} s"}
        except (EOFError, OSError):
            self.kill()
            raise WorkerFault(f"exit status {self._process.returncode}") from None
        except ValueError as error:
            self.kill()
            raise WorkerFault(f"the process wrote what is no reply: {error}") from error

    def kill(self) -> None:
        """End the process and whatever it started."""
        guard = self._process.pid
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
            self._process.send_signal(signal.SIGCONT)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            for pid in [*descendants(guard), guard]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
        self._channel.close()

    def _stopped(self) -> bool:
        try:
            return self._pid is not None and process_fields(self._pid)[0] in "Tt"
        except OSError:
            return False
