"""The server's side of sessions: a worker each, for as long as somebody comes back to it.

A session is one request that lasts: its process gets cells over a socket and answers each. So it is isolated like every
snippet, and its limits (memory, processes, files) are those of its whole life. At a limit it ends, and says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from code_interpreter.console import ENDS
from code_interpreter.protocol import ExecutionResult, Outcome
from code_interpreter.settings import SandboxSettings
from code_interpreter.streams import Streams, read_text

_LONGEST_MARK = 4096
_END_SECONDS = 5.0
ENDED = "the session ended, and its variables are gone"


@dataclasses.dataclass(eq=False)
class NotebookSession:
    """A process that waits for cells.

    Attributes:
        life: ends when the process has; the result of its last cell, if it ended in one.
        end: asks for the end of the process.
    """

    id: str
    streams: Streams
    channel: socket.socket
    life: asyncio.Task[ExecutionResult]
    end: Callable[[], None]
    last_used: float = dataclasses.field(default_factory=time.monotonic)
    lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)


class NotebookSessions:
    """The sessions of one server, which are at most ``settings.most_sessions``.

    Args:
        begin: starts a session's process; a result where it cannot.
    """

    def __init__(
        self,
        settings: SandboxSettings,
        begin: Callable[[str, int | None, str], Any],
    ) -> None:
        self.settings = settings
        self._begin = begin
        self._open: dict[str, NotebookSession] = {}
        self._beginning = 0
        self._reaper: asyncio.Task[None] | None = None
        self.reaped = 0
        """Sessions that were ended because no call came back to them."""

    @property
    def count(self) -> int:
        """Open sessions."""
        return len(self._open)

    def has(self, identifier: str) -> bool:
        """Whether the session is open."""
        return identifier in self._open

    async def create(self, memory_limit_mb: int | None, client: str) -> NotebookSession | ExecutionResult:
        """A new session; where there is no room, why."""
        if self._reaper is None:
            self._reaper = asyncio.create_task(self._reap())
        if len(self._open) + self._beginning >= self.settings.most_sessions:
            return ExecutionResult(Outcome.BUSY, message=f"busy: {self.settings.most_sessions} sessions are open")
        self._beginning += 1
        try:
            session = await self._begin(secrets.token_hex(16), memory_limit_mb, client)
        finally:
            self._beginning -= 1
        if isinstance(session, NotebookSession):
            self._open[session.id] = session
        return session

    async def run(
        self, identifier: str, code: str, seconds: float, print_last_expression: bool
    ) -> ExecutionResult | None:
        """Run a cell; None: there is no such session (any more)."""
        session = self._open.get(identifier)
        if session is None:
            return None
        async with session.lock:
            try:
                return await self._run(
                    session, code, min(seconds, self.settings.max_run_seconds), print_last_expression
                )
            except asyncio.CancelledError:
                await self._end(session)
                raise
            finally:
                session.last_used = time.monotonic()

    async def close(self, identifier: str) -> bool:
        """End a session; whether there was one."""
        session = self._open.get(identifier)
        if session is not None:
            await self._end(session)
        return session is not None

    async def close_all(self) -> None:
        """End every session."""
        if self._reaper is not None:
            self._reaper.cancel()
        await asyncio.gather(*(self._end(session) for session in list(self._open.values())))

    async def _run(self, session: NotebookSession, code: str, seconds: float, last: bool) -> ExecutionResult:
        if session.life.done():
            return await self._ended(session, None, 0.0)
        body = json.dumps({"code": code, "print_last_expression": last}).encode()
        began = time.monotonic()
        loop = asyncio.get_running_loop()

        async def exchange() -> str | None:
            await loop.sock_sendall(session.channel, struct.pack("!I", len(body)) + body)
            return await _end_of_cell(session.channel)

        answer = asyncio.ensure_future(exchange())
        done, _ = await asyncio.wait({answer, session.life}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        took = time.monotonic() - began
        end = None
        if answer in done and not session.life.done():
            with contextlib.suppress(OSError):
                end = answer.result()
            if end is None:  # the process ends, and what became of it is known in a moment
                await asyncio.wait({session.life}, timeout=_END_SECONDS)
        else:
            answer.cancel()
            await asyncio.wait({answer})
        if end is None:
            outcome = None if session.life.done() else Outcome.FINISHED if done else Outcome.TIME_LIMIT_EXCEEDED
            return await self._ended(session, outcome, took)
        result = self._result(session, end, took)
        if end == "memory":
            await self._end(session)
            return dataclasses.replace(result, message=ENDED)
        for descriptor in (session.streams.stdout, session.streams.stderr):
            os.ftruncate(descriptor, 0)
        return result

    def _result(self, session: NotebookSession, end: str, seconds: float) -> ExecutionResult:
        limit = self.settings.max_output_bytes
        stdout, printed = read_text(session.streams.stdout, limit)
        stderr, complained = read_text(session.streams.stderr, limit)
        outcome = {"memory": Outcome.MEMORY_LIMIT_EXCEEDED, "compile_error": Outcome.COMPILE_ERROR}.get(
            end, Outcome.FINISHED
        )
        if max(printed, complained) >= self.settings.workspace_mb << 20:
            outcome = Outcome.OUTPUT_LIMIT_EXCEEDED
        code = 0 if end == "ok" else 1
        return ExecutionResult(outcome, stdout, stderr, code, seconds, truncated=max(printed, complained) > limit)

    async def _ended(self, session: NotebookSession, outcome: Outcome | None, seconds: float) -> ExecutionResult:
        """What is said of a cell in which the process ended; with an ``outcome``, in which it is to be ended."""
        result = None
        if outcome is not None:  # the streams are closed with the process
            result = dataclasses.replace(self._result(session, "error", seconds), outcome=outcome, return_code=None)
        await self._end(session)
        if result is None:
            result = session.life.result()
            if result.outcome is Outcome.FINISHED:
                code = result.return_code or 1
                result = dataclasses.replace(result, return_code=code)
        return dataclasses.replace(result, message="; ".join(filter(None, [result.message, ENDED])), seconds=seconds)

    async def _end(self, session: NotebookSession) -> None:
        self._open.pop(session.id, None)
        if not session.life.done():
            session.end()
        await asyncio.wait({session.life}, timeout=_END_SECONDS)
        session.channel.close()

    async def _reap(self) -> None:
        idle = self.settings.session_idle_seconds
        while True:
            await asyncio.sleep(min(idle / 4, 5.0))
            now = time.monotonic()
            for session in list(self._open.values()):
                if session.life.done() or (not session.lock.locked() and now - session.last_used > idle):
                    self.reaped += 1
                    await self._end(session)


async def _end_of_cell(channel: socket.socket) -> str | None:
    """One of ENDS; None where the process closed its end, or wrote something else."""
    loop = asyncio.get_running_loop()
    data, wanted = b"", 4
    while len(data) < wanted:
        part = await loop.sock_recv(channel, _LONGEST_MARK)
        data += part
        if len(data) >= 4:
            wanted = 4 + struct.unpack("!I", data[:4])[0]
        if not part or max(len(data), wanted) > _LONGEST_MARK:
            return None
    try:
        end = json.loads(data[4:])["end"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return end if end in ENDS else None
