"""The code interpreter as a tool: code in, what it printed out."""

from __future__ import annotations

import asyncio
import copy
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from code_interpreter.client import CodeInterpreterClient, SandboxSession, SandboxUnavailable
from code_interpreter.protocol import ExecutionResult, Outcome
from code_interpreter.settings import TOKEN_VARIABLE
from megatron_retool.config import CodeInterpreterConfig, ConfigError
from tools.tool import Tool, ToolResult, TrajectoryInfo, shorten_middle

logger = logging.getLogger(__name__)

_EXCEPTION_LINE = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Warning|Exit|Interrupt|Iteration|Group)\b")
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,}")


_SESSION_ENDED = "[The session ended: its variables are gone; the next call begins a new one.]"


@dataclass
class _Held:
    """The process of a trajectory, once it has made a call."""

    process: SandboxSession | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class CodeInterpreterTool(Tool):
    """Runs the model's Python code on a sandbox server, or on several."""

    server_settings = ("url", "workers", "port", "isolation", "preimport", "max_sessions", "session_idle_seconds")
    """Settings that no single tool can have of its own."""
    name = "code_interpreter"
    schema: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": name,
            "description": "Run Python code and return what it prints. Each call starts afresh.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "The Python code to run."}},
                "required": ["code"],
            },
        },
    }

    def __init__(self, config: CodeInterpreterConfig, client: CodeInterpreterClient | None = None) -> None:
        """Prepare; the first call connects.

        Args:
            config: limits, and how results are put to the model.
            client: of the servers; closed with this tool. None: of those that ``config.url`` names.

        Raises:
            ConfigError: there is neither a client nor a URL.
        """
        if client is None and not config.urls:
            raise ConfigError(
                "tools.code_interpreter.url is not set and no server was started: "
                "run python -m tools.code_interpreter.server, or let the trainer start one"
            )
        self._config = config
        self._client = client or CodeInterpreterClient(config.urls)
        self.resumes = not config.session
        if config.session:
            self.schema = copy.deepcopy(self.schema)
            self.schema["function"]["description"] = (
                "Run Python code and return what it prints. Variables live from call to call."
            )

    async def open(self, trajectory: TrajectoryInfo) -> _Held | None:
        """A place for the trajectory's process, where code shares a session; else None."""
        return _Held() if self._config.session else None

    async def close(self, session: _Held | None) -> None:
        """End the trajectory's process."""
        if session is not None and session.process is not None:
            await session.process.close()

    async def call(self, arguments: Mapping[str, Any], session: _Held | None = None) -> ToolResult:
        """Run ``arguments["code"]``; what it printed, or its error, is the result."""
        started = time.monotonic()
        config = self._config
        try:
            if session is not None:
                return await self._call_in(session, arguments["code"])
            result = await self._client.run_code(
                arguments["code"],
                run_timeout=config.run_timeout_seconds,
                memory_limit_mb=config.memory_limit_mb,
                print_last_expression=config.print_last_expression,
            )
        except SandboxUnavailable as error:
            logger.warning("%s", error)
            text = "SandboxError: the code interpreter is not available at the moment"
            return ToolResult("error", text, time.monotonic() - started)
        status = "ok" if result.ok else "timeout" if result.outcome is Outcome.TIME_LIMIT_EXCEEDED else "error"
        return ToolResult(status, describe(result, config), time.monotonic() - started)

    async def _call_in(self, session: _Held, code: str) -> ToolResult:
        """Run a cell in the trajectory's process, which its first call begins.

        Raises:
            SandboxUnavailable: there is none to be had.
        """
        config, started = self._config, time.monotonic()
        async with session.lock:  # calls of one turn run side by side
            if session.process is None or not session.process.open:
                session.process = await self._client.open_session(config.memory_limit_mb)
            result = await session.process.run(
                code,
                run_timeout=config.run_timeout_seconds,
                print_last_expression=config.print_last_expression,
            )
            ended = not session.process.open
        status = "ok" if result.ok else "timeout" if result.outcome is Outcome.TIME_LIMIT_EXCEEDED else "error"
        text = describe(result, config)
        if ended:
            text = "\n".join(part for part in (text, _SESSION_ENDED) if part)
        return ToolResult(status, text, time.monotonic() - started, {"session_ended": float(ended)})

    def take_metrics(self) -> dict[str, float]:
        """Requests, failures and retries of each server since the last call."""
        return self._client.take_metrics()

    async def stop(self) -> None:
        """Close the connections to the servers."""
        await self._client.close()


def describe(result: ExecutionResult, config: CodeInterpreterConfig) -> str:
    """The text that the model reads: what was printed and, where the code failed, why."""
    error = "" if result.ok else _error_text(result, config)
    if config.max_error_characters is not None:
        error = error[: config.max_error_characters]
    text = "\n".join(part for part in (result.stdout.strip("\n").rstrip(), error) if part)
    if config.hide_addresses:
        text = _ADDRESS.sub("at 0x0", text)
    return shorten_middle(text, config.max_output_characters) or config.empty_output_text


def _error_text(result: ExecutionResult, config: CodeInterpreterConfig) -> str:
    if result.outcome is Outcome.TIME_LIMIT_EXCEEDED:
        return f"TimeoutError: the code ran longer than {config.run_timeout_seconds:g} s"
    if result.outcome in (Outcome.SANDBOX_ERROR, Outcome.BUSY, Outcome.INVALID_REQUEST):
        return f"SandboxError: {result.message}"
    stderr = result.stderr.strip()
    if result.outcome is Outcome.OUTPUT_LIMIT_EXCEEDED:
        return "OutputLimitError: the code printed too much"
    if result.outcome is Outcome.MEMORY_LIMIT_EXCEEDED and "MemoryError" not in stderr:
        return "MemoryError: the memory limit was exceeded"
    if not stderr:
        return f"Error: {result.message or f'exit status {result.return_code}'}"
    if config.error_style == "traceback":
        return stderr
    lines = stderr.splitlines()
    return next((line for line in reversed(lines) if _EXCEPTION_LINE.match(line)), lines[-1])


async def client_of_named_servers(config: CodeInterpreterConfig) -> CodeInterpreterClient:
    """A client of the servers that ``config.url`` names, all of which have answered.

    Raises:
        ConfigError: one of them does not answer.
    """
    client = CodeInterpreterClient(config.urls)
    if silent := await client.silent_servers():
        raise ConfigError(
            f"tools.code_interpreter.url: {', '.join(silent)} does not answer, or demands another {TOKEN_VARIABLE}: "
            "start the server there (python -m tools.code_interpreter.server), or leave the key unset and one is "
            "started"
        )
    return client
