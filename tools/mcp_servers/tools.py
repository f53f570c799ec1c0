"""Tools of MCP servers: each that a server lists becomes a tool of the policy, with the server's own schema.

rollout:
  multi_turn:
    tools:
      - {tool: mcp, kwargs: {command: [npx, -y, "@modelcontextprotocol/server-everything"], prefix: demo_}}
      - {tool: mcp, kwargs: {url: "http://127.0.0.1:8000/mcp", session: trajectory}}
"""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal
from urllib.parse import urlsplit

from megatron_retool.config import ConfigError
from tools.mcp_servers.connection import McpConnection, McpServer, McpUnavailable
from tools.tool import Tool, ToolResult, TrajectoryInfo

_LISTS: dict[str, list[dict[str, Any]]] = {}
"""What servers have listed, by their settings: a configuration is checked more than once."""


def mcp_tools(
    *,
    command: str | Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    url: str | None = None,
    headers_env: Mapping[str, str] | None = None,
    session: Literal["run", "trajectory"] = "run",
    timeout_seconds: float = 60.0,
    start_timeout_seconds: float = 60.0,
    include: Sequence[str] | None = None,
    prefix: str = "",
) -> list[Tool]:
    """The tools of one server, which is started, or asked, for their list.

    Args:
        command: the program that speaks over its pipes, with its arguments; or ``url``.
        env: environment variables for it.
        url: of a server that speaks HTTP.
        headers_env: headers of the requests, by name: the environment variable with the value.
        session: ``run``: one connection for all trajectories, from the run's start to its end; ``trajectory``: each has
            its own, from its first call to its end.
        timeout_seconds: for one call.
        start_timeout_seconds: for the server to begin.
        include: names of the tools to take; None: all.
        prefix: goes before the names.

    Raises:
        ConfigError: a setting is wrong, the package mcp is missing, or the server does not answer.
    """
    server = _server(command, env, url, headers_env, start_timeout_seconds)
    if session not in ("run", "trajectory"):
        raise ConfigError(f"mcp: session={session!r} must be run or trajectory")
    for name, value in (("timeout_seconds", timeout_seconds), ("start_timeout_seconds", start_timeout_seconds)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 86400:
            raise ConfigError(f"mcp: {name}={value!r} must be a number of seconds above 0, at most 86400")
    listed = {tool["name"]: tool for tool in _listed(server)}
    unknown = sorted(set(include or ()) - set(listed))
    if unknown:
        raise ConfigError(f"mcp: {server.label} has no tool {unknown[0]!r}; it has {', '.join(listed) or 'none'}")
    wanted = list(listed) if include is None else list(include)
    if not wanted:
        raise ConfigError(f"mcp: {server.label} has no tools")
    if session == "trajectory":
        sessions = _Sessions(server)
        return [McpSessionTool(listed[name], prefix, timeout_seconds, sessions) for name in wanted]
    shared = _Shared(server)
    return [McpTool(listed[name], prefix, timeout_seconds, shared) for name in wanted]


class _Shared:
    """The connection of all tools of a server, and all trajectories. Made where a loop runs."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._connection: McpConnection | None = None

    @property
    def connection(self) -> McpConnection:
        if self._connection is None:
            self._connection = McpConnection(self._server)
        return self._connection

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


class _Sessions:
    """A connection for each trajectory, which its tools share."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._open: dict[int, tuple[TrajectoryInfo, McpConnection, int]] = {}

    def enter(self, trajectory: TrajectoryInfo) -> tuple[int, McpConnection]:
        key = id(trajectory)  # which lives as long as it is kept here
        _, connection, users = self._open.get(key, (trajectory, McpConnection(self._server), 0))
        self._open[key] = trajectory, connection, users + 1
        return key, connection

    async def leave(self, key: int) -> None:
        trajectory, connection, users = self._open[key]
        if users > 1:
            self._open[key] = trajectory, connection, users - 1
            return
        del self._open[key]
        await connection.close()


class _Listed(Tool):
    """A tool as its server describes it."""

    def __init__(self, listed: Mapping[str, Any], prefix: str, seconds: float) -> None:
        self._name = listed["name"]
        self._seconds = seconds
        self.name = f"{prefix}{self._name}"
        self.schema = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": listed["description"],
                "parameters": listed["parameters"],
            },
        }

    async def answer(self, connection: McpConnection, arguments: Mapping[str, Any]) -> ToolResult:
        """What the model reads of a call; never raises for what the server does."""
        began = time.monotonic()
        try:
            result = await connection.call(self._name, arguments, self._seconds)
            status, text = ("error" if result.is_error else "ok"), _text(result)
        except TimeoutError:
            status, text = "timeout", f"Error: {self.name} did not answer within {self._seconds:g} s"
        except (McpUnavailable, ConfigError) as error:
            status, text = "error", f"Error: {self.name}: {error}"
        return ToolResult(status, text, time.monotonic() - began)


class McpTool(_Listed):
    """A tool of a server that all trajectories share."""

    def __init__(self, listed: Mapping[str, Any], prefix: str, seconds: float, shared: _Shared) -> None:
        super().__init__(listed, prefix, seconds)
        self._shared = shared

    async def start(self) -> None:
        """Open the connection that all trajectories share."""
        await self._shared.connection.open()

    async def stop(self) -> None:
        """Close that connection."""
        await self._shared.close()

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Call the tool on the shared connection."""
        return await self.answer(self._shared.connection, arguments)


class McpSessionTool(_Listed):
    """A tool of a server to which each trajectory has its own connection."""

    resumes = False

    def __init__(self, listed: Mapping[str, Any], prefix: str, seconds: float, sessions: _Sessions) -> None:
        super().__init__(listed, prefix, seconds)
        self._sessions = sessions

    async def open(self, trajectory: TrajectoryInfo) -> tuple[int, McpConnection]:
        """A connection of the trajectory's own."""
        return self._sessions.enter(trajectory)

    async def call(self, arguments: Mapping[str, Any], session: tuple[int, McpConnection]) -> ToolResult:
        """Call the tool on the trajectory's connection."""
        return await self.answer(session[1], arguments)

    async def close(self, session: tuple[int, McpConnection]) -> None:
        """Give the trajectory's connection back."""
        await self._sessions.leave(session[0])


def _server(
    command: str | Sequence[str] | None,
    env: Mapping[str, str] | None,
    url: str | None,
    headers_env: Mapping[str, str] | None,
    start_seconds: float,
) -> McpServer:
    if (command is None) == (url is None):
        raise ConfigError("mcp: set either command (a program) or url (an HTTP server)")
    if url is not None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"mcp: url={url!r} must be an address such as http://127.0.0.1:8000/mcp")
        return McpServer(url=url, headers_env=dict(headers_env or {}), start_seconds=start_seconds)
    words = tuple(shlex.split(command)) if isinstance(command, str) else tuple(str(word) for word in command or ())
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(f"mcp: command={command!r}: there is no such program on PATH: name it by its whole path")
    environment = {str(name): str(value) for name, value in (env or {}).items()}
    return McpServer(words, environment, start_seconds=start_seconds)


def _listed(server: McpServer) -> list[dict[str, Any]]:
    key = repr(server)
    if key not in _LISTS:
        with ThreadPoolExecutor(1) as thread:  # a loop may be running in this one
            try:
                _LISTS[key] = thread.submit(lambda: asyncio.run(_list_of(server))).result()
            except ConfigError:
                raise
            except Exception as error:
                while isinstance(error, ExceptionGroup):
                    error = error.exceptions[0]
                why = f"{type(error).__name__}: {error}".rstrip(": ")
                raise ConfigError(f"mcp: {server.label} does not list its tools: {why}") from error
    return _LISTS[key]


async def _list_of(server: McpServer) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = []
    async with asyncio.timeout(server.start_seconds), server.client() as client:
        cursor = None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += [
                {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
                for tool in page.tools
            ]
            cursor = page.next_cursor
            if cursor is None:
                return tools


def _text(result: Any) -> str:
    parts = []
    for block in result.content:
        if block.type == "text":
            parts.append(block.text)
        elif block.type == "resource" and hasattr(block.resource, "text"):
            parts.append(block.resource.text)
        else:
            parts.append(f"[{block.type} left out]")
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts)
