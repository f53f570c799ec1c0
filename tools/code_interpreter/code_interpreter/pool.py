"""The server's side of the workers: starts them, gives each one request at a time, turns reports into results."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import functools
import json
import logging
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from code_interpreter.fair_queue import FairQueue, QueueFull
from code_interpreter.jupyter import MOST_DISPLAY_BYTES
from code_interpreter.protocol import ExecutionRequest, ExecutionResult, Outcome
from code_interpreter.results import result_of
from code_interpreter.sessions import NotebookSession, NotebookSessions
from code_interpreter.settings import INTERPRETER_FLAGS, SandboxSettings
from code_interpreter.snippet import CELLS, INTERPRETER_ENVIRONMENT, SESSION
from code_interpreter.streams import Streams, read_text
from untrusted.errors import OperationError

logger = logging.getLogger(__name__)

_MESSAGE_BYTES = 1 << 16
_START_TIMEOUT_SECONDS = 180.0
CHECK_SECONDS = 15.0
"""After so long without a snippet that ran, the pool runs one of its own to see whether it still can."""
_RECHECK_SECONDS = 1.0
_PAGE_BYTES = 4096
_STARTS = 3
_ANSWER_GRACE_SECONDS = 20.0
"""How long after a snippet's time limit the worker's report may come."""
_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # matplotlib reads it when it is imported, which may be in the zygote.
    "MPLBACKEND": "Agg",
    **INTERPRETER_ENVIRONMENT,
}


class SandboxStartError(OperationError):
    """The workers could not be started; the message says why."""


@dataclasses.dataclass(eq=False)
class _Worker:
    index: int
    channel: socket.socket
    answer: asyncio.Future[dict[str, Any]] | None = None
    request_id: int = 0
    files: dict[str, int] = dataclasses.field(default_factory=dict)
    """Descriptors of collected files that arrived for the current request."""


def _cancel(worker: _Worker, request_id: int) -> None:
    """Ask a worker to end a request; one that is answered already is none."""
    with contextlib.suppress(OSError):
        worker.channel.send(json.dumps({"cancel": request_id}).encode())


class WorkerPool:
    """Runs snippets in at most ``settings.workers`` isolated processes at a time."""

    def __init__(self, settings: SandboxSettings) -> None:
        self.settings = settings
        self.isolation: dict[str, Any] = {}
        """What /health says about the isolation in force; filled by ``start``."""
        self.restarts = 0
        """Workers that died and were replaced."""
        self.broken: str | None = None
        """Why snippets cannot run, as a snippet of the pool's own has shown; None: they can."""
        self._ran = 0.0
        """When a snippet ran last."""
        self._doubt = asyncio.Event()
        """A snippet could not run."""
        self._watch: asyncio.Task[None] | None = None
        self.sessions = NotebookSessions(settings, self._begin_session)
        self._queue: FairQueue[_Worker] = FairQueue(settings.max_queue)
        self._workers: dict[int, _Worker] = {}
        self._next_request = 0
        self._control: socket.socket | None = None
        self._lifeline: int | None = None
        self._warden: asyncio.subprocess.Process | None = None
        self._closing = False
        self._restart: asyncio.Task[None] | None = None

    @property
    def started_workers(self) -> int:
        """Workers that run."""
        return len(self._workers)

    @property
    def busy_workers(self) -> int:
        """Workers that run a snippet."""
        return sum(worker.answer is not None for worker in self._workers.values())

    @property
    def is_up(self) -> bool:
        """Whether workers can be started; false while a dead zygote is being replaced."""
        return self._control is not None

    @property
    def waiting(self) -> int:
        """Requests that wait for a worker."""
        return self._queue.waiting

    async def start(self) -> None:
        """Start warden and zygote and wait until the modules are imported; once more where they are killed meanwhile.

        Raises:
            SandboxStartError: the isolation asked for is not available, or the zygote failed.
        """
        for _ in range(_STARTS):
            message = await self._start_warden()
            if message:
                break
        if "ready" not in message:
            raise SandboxStartError(message.get("error", "the zygote ended without a word"))
        self.isolation = message["ready"]
        if self._watch is None:
            self._watch = asyncio.create_task(self._check_itself())

    async def _start_warden(self) -> dict[str, Any]:
        """What the zygote says when it is ready or has failed; nothing where it was killed."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lifeline_reader, lifeline = os.pipe()
        warden = str(Path(__file__).with_name("warden.py"))
        command = [sys.executable, *INTERPRETER_FLAGS, warden, self.settings.to_json()]
        command += [str(os.getpid()), str(theirs.fileno()), str(lifeline_reader)]
        self._warden = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            env=_ENVIRONMENT | {"TMPDIR": tempfile.gettempdir()},
            pass_fds=(theirs.fileno(), lifeline_reader),
            start_new_session=True,
        )
        theirs.close()
        os.close(lifeline_reader)
        control.setblocking(False)
        self._control, self._lifeline = control, lifeline
        try:
            message = await asyncio.wait_for(self._receive_control(), _START_TIMEOUT_SECONDS)
        except TimeoutError:
            message = {"error": f"not ready after {_START_TIMEOUT_SECONDS:g} s"}
        if "ready" in message:
            asyncio.get_running_loop().add_reader(control.fileno(), self._on_control_closed)
        else:
            await self._stop_warden()
        return message

    async def close(self) -> None:
        """End all workers and snippets and wait until they are gone."""
        self._closing = True
        for task in (self._watch, self._restart):
            if task is not None:
                task.cancel()
        await self.sessions.close_all()
        await self._stop_warden()

    async def run(self, request: ExecutionRequest, client: str = "") -> tuple[ExecutionResult, float]:
        """Run a snippet; return its result and the seconds that it waited for a worker.

        Args:
            client: whose turn this request counts for in the queue.
        """
        arrived = time.monotonic()
        room = self.settings.workspace_mb << 20
        if sum(-(-len(content) // _PAGE_BYTES) * _PAGE_BYTES for content in request.files.values()) > room:
            message = f"files: together they are larger than the workspace of {room} bytes (--workspace-mb)"
            return ExecutionResult(Outcome.INVALID_REQUEST, message=message), 0.0
        own = tuple(f"{directory}/" for directory in self.isolation.get("own_directories", ()))
        for path in (*request.files, *request.fetch_files):
            if path.startswith("/") and not path.startswith(own):
                message = f"{path!r:.200}: under this server's isolation a snippet has no such directory of its own"
                return ExecutionResult(Outcome.INVALID_REQUEST, message=f"{message}; use a relative path"), 0.0
        for path in request.files:
            for held in self.isolation.get("read_only_directories", ()):
                if f"{held}/".startswith(f"{path}/") or path.startswith(f"{held}/"):
                    message = f"{path!r:.200}: the interpreter's own directory {held} is there; use another path"
                    return ExecutionResult(Outcome.INVALID_REQUEST, message=message), 0.0
        try:
            worker = await self._acquire(client)
        except QueueFull as error:
            waited = time.monotonic() - arrived
            return ExecutionResult(Outcome.BUSY, message=f"busy: {error}"), waited
        except (SandboxStartError, OSError) as error:
            return self._cannot_start(error), time.monotonic() - arrived
        waited = time.monotonic() - arrived
        # The worker outlives a client that hangs up, so its return to the queue must not depend on the caller.
        task = asyncio.ensure_future(self._run_on(worker, request))
        try:
            return await asyncio.shield(task), waited
        except asyncio.CancelledError:
            _cancel(worker, worker.request_id)
            raise

    def _cannot_start(self, error: Exception) -> ExecutionResult:
        return ExecutionResult(Outcome.BUSY if self._closing else Outcome.SANDBOX_ERROR, message=str(error))

    async def _check_itself(self) -> None:
        """Run a snippet every now and then where no other shows that snippets run; start again where it cannot run."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._doubt.wait(), CHECK_SECONDS)
            if not self._doubt.is_set() and self.broken is None and time.monotonic() - self._ran < CHECK_SECONDS:
                continue
            if self.busy_workers >= self.settings.workers and self.broken is None:
                await asyncio.sleep(_RECHECK_SECONDS)
                continue
            self.broken = await self._trial() and await self._trial()
            if self.broken is not None:
                logger.error("snippets cannot run (%s): starting the workers again", self.broken)
                with contextlib.suppress(SandboxStartError):
                    await self._start_again_once()
                self.broken = await self._trial()
            self._doubt.clear()
            await asyncio.sleep(_RECHECK_SECONDS)

    async def _trial(self) -> str | None:
        """Why a snippet of the server's own cannot run; None if it runs, or if the host is too busy to tell."""
        began = time.monotonic()
        result, _ = await self.run(ExecutionRequest("print(6 * 7)", run_timeout=10.0))
        if self._ran > began and result.outcome is not Outcome.FINISHED:
            return None  # others run
        if result.outcome is Outcome.SANDBOX_ERROR:
            return result.message
        wrong = result.outcome is Outcome.FINISHED and result.stdout != "42\n"
        return f"a snippet ended with status {result.return_code}: {result.stderr[-200:]}" if wrong else None

    async def _begin_session(
        self, identifier: str, memory_limit_mb: int | None, client: str
    ) -> NotebookSession | ExecutionResult:
        """A worker with a process that waits for cells; a result where there is none."""
        request = ExecutionRequest(
            "", language=SESSION, run_timeout=self.settings.session_seconds, memory_limit_mb=memory_limit_mb
        )
        try:
            worker = await self._acquire(client)
        except QueueFull as error:
            return ExecutionResult(Outcome.BUSY, message=f"busy: {error}")
        except (SandboxStartError, OSError) as error:
            return self._cannot_start(error)
        channel, theirs = socket.socketpair()
        channel.setblocking(False)
        try:
            streams = dataclasses.replace(self._open_streams(request, self._memory(request)), records=theirs.detach())
        except OSError as error:
            self._queue.put(worker)
            channel.close()
            theirs.close()
            return ExecutionResult(Outcome.SANDBOX_ERROR, message=f"no room for the session: {error}")
        for descriptor in (streams.stdout, streams.stderr):
            # So that they can be emptied after a cell.
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
        life = asyncio.ensure_future(self._run_on(worker, request, streams))
        await asyncio.sleep(0)  # it has its request now, and an id to be cancelled by
        return NotebookSession(
            identifier, streams, channel, life, functools.partial(_cancel, worker, worker.request_id)
        )

    async def _acquire(self, client: str) -> _Worker:
        if self._closing:
            raise SandboxStartError("the server stops")
        if not self.is_up:
            await asyncio.shield(self._start_again_once())
        worker = self._queue.take_idle()
        if worker is None and len(self._workers) < self.settings.workers:
            worker = self._spawn()
        if worker is None:
            worker = await self._queue.get(client, self.settings.max_queue_seconds)
        return worker

    def _spawn(self) -> _Worker:
        if self._control is None:
            raise SandboxStartError("the sandbox is being started again")
        index = next(i for i in range(self.settings.workers) if i not in self._workers)
        channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            socket.send_fds(self._control, [json.dumps({"worker": index}).encode()], [theirs.fileno()])
        except OSError as error:
            channel.close()
            raise SandboxStartError(f"no worker can be started: {error}") from error
        finally:
            theirs.close()
        channel.setblocking(False)
        worker = _Worker(index, channel)
        self._workers[index] = worker
        asyncio.get_running_loop().add_reader(channel.fileno(), self._on_message, worker)
        return worker

    def _discard(self, worker: _Worker, reason: str) -> None:
        """Forget a worker that died or does not answer; the next request that needs one gets a new one."""
        if self._workers.get(worker.index) is not worker:
            return
        asyncio.get_running_loop().remove_reader(worker.channel.fileno())
        worker.channel.close()
        del self._workers[worker.index]
        self._queue.discard_idle(worker)
        self.restarts += 1
        for descriptor in worker.files.values():
            os.close(descriptor)
        worker.files.clear()
        if worker.answer is not None and not worker.answer.done():
            worker.answer.set_result({"state": "failed", "error": reason})
        self._serve_waiting()

    def _serve_waiting(self) -> None:
        """Start workers for those who wait while fewer run than may."""
        while self.is_up and not self._closing and self._queue.waiting and len(self._workers) < self.settings.workers:
            try:
                self._queue.put(self._spawn())
            except SandboxStartError as error:
                logger.error("%s", error)
                return

    def _on_message(self, worker: _Worker) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(worker.channel, _MESSAGE_BYTES, 1)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        if not data:
            self._discard(worker, "the worker died")
            return
        message = json.loads(data)
        if "file" in message:
            if message["id"] == worker.request_id and worker.answer is not None and message["file"] not in worker.files:
                worker.files[message["file"]] = descriptors[0]
            else:
                os.close(descriptors[0])
        elif message["id"] is None:
            logger.error("%s", message["error"])
            self._discard(worker, message["error"])
        elif worker.answer is not None and not worker.answer.done():
            worker.answer.set_result(message)

    def _memory(self, request: ExecutionRequest) -> int:
        return min(request.memory_limit_mb or self.settings.memory_limit_mb, self.settings.memory_limit_mb) << 20

    async def _run_on(
        self, worker: _Worker, request: ExecutionRequest, streams: Streams | None = None
    ) -> ExecutionResult:
        settings = self.settings
        self._next_request += 1
        worker.request_id = self._next_request
        worker.answer = asyncio.get_running_loop().create_future()
        longest = settings.session_seconds if request.language == SESSION else settings.max_run_seconds
        timeout = min(request.run_timeout, longest)
        memory = self._memory(request)
        try:
            streams = streams or self._open_streams(request, memory)
        except OSError as error:
            worker.answer = None
            self._queue.put(worker)
            return ExecutionResult(Outcome.SANDBOX_ERROR, message=f"no room for the request: {error}")
        files: dict[str, int] = {}
        try:
            message = {
                "id": worker.request_id,
                "timeout": timeout,
                "memory_bytes": memory,
                "collect": bool(request.fetch_files),
            }
            try:
                socket.send_fds(worker.channel, [json.dumps(message).encode()], streams.descriptors())
            except OSError as error:
                self._discard(worker, f"the worker died: {error}")
            try:
                answer = await asyncio.wait_for(worker.answer, timeout + _ANSWER_GRACE_SECONDS)
            except TimeoutError:
                self._discard(worker, "the worker did not answer")
                answer = {"state": "failed", "error": "the worker did not answer", "seconds": timeout}
            files, worker.files = worker.files, {}
            return self._result(request, answer, streams, files)
        finally:
            streams.close()
            for descriptor in files.values():
                os.close(descriptor)
            worker.answer = None
            if self._workers.get(worker.index) is worker:
                self._queue.put(worker)

    def _open_streams(self, request: ExecutionRequest, memory: int) -> Streams:
        last = request.print_last_expression
        header = {
            "language": request.language,
            "code": request.code,
            "print_last_expression": self.settings.print_last_expression if last is None else last,
            "cells": request.cells,
            "cell_timeout": request.cell_timeout,
            "record_bytes": MOST_DISPLAY_BYTES,
            "files": [[path, len(content)] for path, content in request.files.items()],
            "fetch_files": request.fetch_files,
            "limits": {
                "memory_bytes": memory,
                "max_processes": self.settings.max_processes,
                "file_bytes": self.settings.workspace_mb << 20,
            },
        }
        return Streams.open(header, request.files, request.stdin, records=request.language == CELLS)

    def _result(
        self, request: ExecutionRequest, answer: dict[str, Any], streams: Streams, files: dict[str, int]
    ) -> ExecutionResult:
        if answer["state"] in ("failed", "cancelled"):
            reason = answer.get("error") or "the client hung up"
            if self._closing:
                return ExecutionResult(Outcome.BUSY, message="the server stops")
            if answer["state"] == "failed":
                self._doubt.set()
                said = read_text(streams.stderr, 1000)[0].strip()
                reason += f": {said}" if said else ""
            return ExecutionResult(Outcome.SANDBOX_ERROR, message=reason, seconds=answer.get("seconds", 0.0))
        self._ran = time.monotonic()
        return result_of(self.settings, request, answer, streams, files)

    async def _receive_control(self) -> dict[str, Any]:
        assert self._control is not None
        data = await asyncio.get_running_loop().sock_recv(self._control, _MESSAGE_BYTES)
        return json.loads(data) if data else {}

    def _on_control_closed(self) -> None:
        """The zygote died (it sends nothing after "ready"): replace it together with all workers."""
        self._forget_control()
        for worker in list(self._workers.values()):
            self._discard(worker, "all workers died")
        self._doubt.set()
        if not self._closing:
            logger.error("the sandbox's zygote died; starting another")
            self._start_again_once()

    def _start_again_once(self) -> asyncio.Task[None]:
        """The task that replaces the zygote: the one under way, or a new one."""
        if self._restart is None:
            self._restart = asyncio.ensure_future(self._start_again())
            # A caller that awaits it gets its failure; there may be none.
            self._restart.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._restart

    async def _start_again(self) -> None:
        try:
            await self._stop_warden()
            for delay in (0.0, 1.0, 5.0, 15.0):
                await asyncio.sleep(delay)
                try:
                    await self.start()
                    self._serve_waiting()
                    return
                except SandboxStartError as error:
                    logger.error("the sandbox cannot start again: %s", error)
            raise SandboxStartError("the sandbox died and could not be started again")
        finally:
            self._restart = None

    def _forget_control(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
            self._control = None

    async def _stop_warden(self) -> None:
        self._forget_control()
        for worker in list(self._workers.values()):
            self._discard(worker, "the server stops")
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        if self._warden is not None:
            try:
                await asyncio.wait_for(self._warden.wait(), 20)
            except TimeoutError:
                self._warden.kill()
                await self._warden.wait()
            self._warden = None
