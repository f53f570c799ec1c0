"""Asynchronous client of a SandboxFusion-compatible server."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Mapping, Sequence

import aiohttp

from tools.code_interpreter.protocol import ExecutionRequest, ExecutionResult, Outcome

logger = logging.getLogger(__name__)

_RETRIED_STATUS = {429, 502, 503, 504}


class SandboxUnavailable(RuntimeError):
    """The server could not be reached, or was busy, for longer than the client was told to try."""


class CodeInterpreterClient:
    """Runs snippets on this project's server, or on any other that speaks SandboxFusion's /run_code.

    A busy server, a dropped connection and a failure of the sandbox itself are tried again after a random delay that
    grows with each attempt, so that many clients do not come back all at once.  A snippet has no effects outside its
    request, so running it twice is harmless.
    """

    def __init__(
        self,
        url: str,
        *,
        give_up_seconds: float = 120.0,
        max_connections: int = 1024,
        first_delay_seconds: float = 0.1,
        longest_delay_seconds: float = 5.0,
        client_id: str | None = None,
    ) -> None:
        """Prepare; the first call opens connections.

        Args:
            url: of the server, with or without /run_code.
            give_up_seconds: how long after the first attempt another one may start.
            max_connections: open connections at the same time; further calls wait for one.
            first_delay_seconds: mean pause before the second attempt; each further pause is twice as long.
            longest_delay_seconds: where the pauses stop growing.
            client_id: whose turns in the server's queue the requests count for; by default this process's.
        """
        self.url = url.rstrip("/").removesuffix("/run_code")
        self._give_up_seconds = give_up_seconds
        self._max_connections = max_connections
        self._first_delay, self._longest_delay = first_delay_seconds, longest_delay_seconds
        self._headers = {"X-Client-Id": client_id or f"{os.uname().nodename}:{os.getpid()}"}
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run_code(
        self,
        code: str,
        *,
        run_timeout: float = 10.0,
        stdin: str | bytes = b"",
        memory_limit_mb: int | None = None,
        files: Mapping[str, bytes] | None = None,
        fetch_files: Sequence[str] = (),
        print_last_expression: bool | None = None,
    ) -> ExecutionResult:
        """Run one snippet. The code's own failures are in the result.

        Raises:
            SandboxUnavailable: no answer within ``give_up_seconds``.
        """
        return await self.execute(
            ExecutionRequest(
                code=code,
                run_timeout=run_timeout,
                memory_limit_mb=memory_limit_mb,
                stdin=stdin.encode("utf-8", "surrogatepass") if isinstance(stdin, str) else stdin,
                files=files or {},
                fetch_files=tuple(fetch_files),
                print_last_expression=print_last_expression,
            )
        )

    async def execute(self, request: ExecutionRequest) -> ExecutionResult:
        """Run one snippet; see ``run_code``."""
        body = request.to_json()
        stop_trying = time.monotonic() + self._give_up_seconds
        delay = self._first_delay
        while True:
            reason, result = await self._attempt(body, request.run_timeout)
            if result is not None and result.outcome not in (Outcome.SANDBOX_ERROR, Outcome.BUSY):
                return result
            pause = random.uniform(0.5, 1.5) * delay
            if time.monotonic() + pause > stop_trying:
                if result is not None and result.outcome is Outcome.SANDBOX_ERROR:
                    return result
                raise SandboxUnavailable(f"sandbox {self.url}: {reason}; gave up after {self._give_up_seconds:g} s")
            if result is not None and result.outcome is Outcome.SANDBOX_ERROR:
                # A snippet that breaks its sandbox would do so each time: try it once more, not for minutes.
                stop_trying = time.monotonic() + pause
            logger.debug("sandbox %s: %s; trying again in %.1f s", self.url, reason, pause)
            await asyncio.sleep(pause)
            delay = min(2 * delay, self._longest_delay)

    async def health(self) -> dict:
        """The server's /health page.

        Raises:
            SandboxUnavailable: it does not answer.
        """
        try:
            async with self._open().get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(10)) as response:
                response.raise_for_status()
                return await response.json(content_type=None)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise SandboxUnavailable(f"sandbox {self.url}: {type(error).__name__}: {error}") from error

    async def ping(self) -> bool:
        """Whether the server answers."""
        try:
            async with self._open().get(f"{self.url}/v1/ping", timeout=aiohttp.ClientTimeout(10)) as response:
                return response.status == 200 and "pong" in await response.text()
        except (TimeoutError, aiohttp.ClientError, OSError):
            return False

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> CodeInterpreterClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _open(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            # Each event loop needs a session of its own.
            self._loop = loop
            connector = aiohttp.TCPConnector(limit=self._max_connections)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._session

    async def _attempt(self, body: dict, run_timeout: float) -> tuple[str, ExecutionResult | None]:
        """One request: (why it did not serve, the result if there is one)."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=run_timeout + self._give_up_seconds + 60)
        try:
            async with self._open().post(f"{self.url}/run_code", json=body, timeout=timeout) as response:
                if response.status in _RETRIED_STATUS:
                    return f"HTTP {response.status}: {(await response.text())[:200]}", None
                if response.status >= 400:
                    text = (await response.text())[:500]
                    return text, ExecutionResult(Outcome.INVALID_REQUEST, message=f"HTTP {response.status}: {text}")
                result = ExecutionResult.from_json(await response.json(content_type=None))
                return result.message, result
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}", None
