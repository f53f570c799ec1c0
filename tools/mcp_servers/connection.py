"""A connection to a server of the Model Context Protocol: a program that speaks over its pipes, or an HTTP address."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megatron_retool
from megatron_retool.config import ConfigError
from megatron_retool.errors import OperationError

logger = logging.getLogger(__name__)

PACKAGE = "mcp>=2.0,<3"
CLOSE_SECONDS = 20.0
MOST_ANSWER_BYTES = 16 << 20
"""Of one message of a server. Pages and search results have a few hundred kB."""

_LAUNCH = (
    f"import os, sys; sys.path.insert(0, {str(Path(megatron_retool.__file__).resolve().parents[1])!r}); "
    "from megatron_retool.rewards.guard import fork_guarded; fork_guarded(int(sys.argv[1])); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Starts a program that ends, with all that it has started, when this process does."""


class McpUnavailable(OperationError):
    """The server cannot be reached, or has gone."""


@dataclass(frozen=True)
class McpServer:
    """Where a server is.

    Attributes:
        command: program and arguments; none: ``url``.
        environment: variables that the program gets besides PATH, HOME and the like.
        headers_env: of requests, by name: the environment variable that holds the value.
        start_seconds: longest time to begin.
    """

    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    url: str | None = None
    headers_env: Mapping[str, str] = field(default_factory=dict)
    start_seconds: float = 60.0

    @property
    def label(self) -> str:
        """What messages call the server: its URL or command."""
        return self.url or " ".join(self.command)

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Any]:
        """An ``mcp.Client`` that is connected.

        Raises:
            ConfigError: the package is missing, or an environment variable of ``headers_env``.
        """
        try:
            from mcp import Client, StdioServerParameters
            from mcp.client.streamable_http import streamable_http_client
            from mcp.shared._httpx_utils import create_mcp_http_client
        except ImportError as error:
            raise ConfigError(
                f"MCP servers need the package mcp, version 2 (here: {error}): pip install '{PACKAGE}', or "
                "bash scripts/setup.sh again"
            ) from error
        _limit_lines()
        async with contextlib.AsyncExitStack() as stack:
            if self.url is None:
                arguments = ["-c", _LAUNCH, str(os.getpid()), *self.command]
                # One byte that is no UTF-8 would end the client's reader without a word, and every call after it.
                parameters = StdioServerParameters(
                    command=sys.executable,
                    args=arguments,
                    env=dict(self.environment),
                    encoding_error_handler="replace",
                )
                client = Client(parameters)
            else:
                http = await stack.enter_async_context(create_mcp_http_client(headers=self._headers()))
                http.headers["Accept-Encoding"] = "identity"  # a short answer could become a long one
                http.event_hooks = {"response": [_limit_answer]}
                streams = streamable_http_client(self.url, http_client=http, max_sse_event_size=MOST_ANSWER_BYTES)
                client = Client(streams)
            yield await stack.enter_async_context(client)

    def _headers(self) -> dict[str, str]:
        missing = [name for name in self.headers_env.values() if name not in os.environ]
        if missing:
            raise ConfigError(f"headers_env of {self.label}: the environment has no variable {missing[0]}")
        return {header: os.environ[name] for header, name in self.headers_env.items()}


class McpConnection:
    """One connection, opened when it is first needed and, where the server has gone, opened again by the next call."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self._lock = asyncio.Lock()
        self._life: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Any] | None = None
        self._leave = asyncio.Event()

    async def open(self) -> Any:
        """The connected client; connect, where it is not.

        Raises:
            McpUnavailable: the server does not begin in time, or ends.
            ConfigError: see ``McpServer.client``.
        """
        async with self._lock:
            if self._ready is None or self._life is None or self._life.done():
                self._ready = asyncio.get_running_loop().create_future()
                self._leave = asyncio.Event()
                # The client's own tasks must end where they began.
                self._life = asyncio.create_task(self._live(self._ready, self._leave))
            try:
                async with asyncio.timeout(self.server.start_seconds):
                    # Whoever waits may be cancelled; the others still want the connection.
                    return await asyncio.shield(self._ready)
            except TimeoutError as error:
                await self._end()
                seconds = self.server.start_seconds
                raise McpUnavailable(f"{self.server.label} did not begin within {seconds:g} s") from error

    async def call(self, name: str, arguments: Mapping[str, Any], seconds: float) -> Any:
        """The ``CallToolResult`` of a call.

        Raises:
            TimeoutError: it took too long. The server gets to know that the call was given up.
            McpUnavailable: the server has gone, or answers with an error of the protocol.
        """
        client = await self.open()
        try:
            async with asyncio.timeout(seconds):
                return await client.call_tool(name, dict(arguments))
        except TimeoutError:
            raise
        except Exception as error:
            from mcp import MCPError
            from mcp_types import CONNECTION_CLOSED

            if not isinstance(error, MCPError) or error.code == CONNECTION_CLOSED:
                await self._give_up(client)
            raise McpUnavailable(f"{self.server.label}: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """End it, and the program with it."""
        async with self._lock:
            await self._end()

    async def _give_up(self, client: Any) -> None:
        """End the connection of ``client``, unless another call has done so: the next one has a connection already."""
        async with self._lock:
            ready = self._ready
            if ready is not None and ready.done() and ready.exception() is None and ready.result() is client:
                await self._end()

    async def _end(self) -> None:
        life, self._life, self._ready = self._life, None, None
        if life is None:
            return
        self._leave.set()
        done, _ = await asyncio.wait({life}, timeout=CLOSE_SECONDS)
        if not done:
            life.cancel()
            await asyncio.wait({life}, timeout=CLOSE_SECONDS)

    async def _live(self, ready: asyncio.Future[Any], leave: asyncio.Event) -> None:
        try:
            async with self.server.client() as client:
                if not ready.done():
                    ready.set_result(client)
                await leave.wait()
        except Exception as error:
            if ready.done():
                logger.warning("MCP server %s: %s: %s", self.server.label, type(error).__name__, error)
            elif isinstance(error, ConfigError):
                ready.set_exception(error)
            else:
                ready.set_exception(McpUnavailable(f"{self.server.label}: {_reason(error)}"))


@functools.cache
def _limit_lines() -> None:
    """Have the package's reader of a program's answers end the connection at a line of more than MOST_ANSWER_BYTES.

    It would keep what there is of the line in memory, however long it becomes.
    """
    import anyio
    from mcp.client import stdio

    class BoundedText(stdio.TextReceiveStream):
        length = 0

        async def receive(self) -> str:
            text: str = await super().receive()
            before, newline, after = text.rpartition("\n")
            longest = max(self.length + len(text.partition("\n")[0]), *map(len, before.split("\n")))
            self.length = len(after) if newline else self.length + len(text)
            if longest > MOST_ANSWER_BYTES:
                logger.warning("an MCP server wrote a line of more than %d MiB: it is ended", MOST_ANSWER_BYTES >> 20)
                # Nothing reads any more, so the calls that wait end at once.
                await self.transport_stream.aclose()
                raise anyio.ClosedResourceError
            return text

    stdio.TextReceiveStream = BoundedText  # type: ignore[misc]


async def _limit_answer(response: Any) -> None:
    """A hook of the HTTP client: what is no stream of events has an end. The package limits the events."""
    import httpx2

    class Bounded(httpx2.AsyncByteStream):
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            length = 0
            async for part in self._stream:
                length += len(part)
                if length > MOST_ANSWER_BYTES:
                    raise httpx2.StreamError(f"the answer has more than {MOST_ANSWER_BYTES >> 20} MiB")
                yield part

        async def aclose(self) -> None:
            await self._stream.aclose()

    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise httpx2.StreamError("the answer is compressed, which was not asked for")
    if not response.headers.get("Content-Type", "").startswith("text/event-stream"):
        response.stream = Bounded(response.stream)


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
