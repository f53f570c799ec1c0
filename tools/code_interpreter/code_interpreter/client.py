"""Asynchronous client of SandboxFusion-compatible servers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from code_interpreter.balancer import Balancer, Server
from code_interpreter.protocol import ExecutionRequest, ExecutionResult, Outcome
from code_interpreter.settings import TOKEN_VARIABLE
from untrusted.errors import OperationError

logger = logging.getLogger(__name__)

_RETRIED_STATUS = {429, 502, 503, 504}
_START_PING_SECONDS = 10.0


class SandboxUnavailable(OperationError):
    """No server could be reached, or all were busy, for longer than the client was told to try."""


class CodeInterpreterClient:
    """Runs snippets on this project's servers, or on any others that speak SandboxFusion's /run_code.

    Requests are spread over the servers (see ``Balancer``).  One that a server refuses, drops or is too busy for goes
    to another one at once; where none is left it is tried again after a random delay that grows with each attempt, so
    that many clients do not come back all at once.  A snippet has no effects outside its request, so running it twice
    is harmless.

    Each of several servers is pinged all the time.  One that fails a connection or a ping gets no requests until it
    answers a ping again, and requests that wait for a server that stays silent, as on a node without power, go to
    another one.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        token: str | None = None,
        give_up_seconds: float = 120.0,
        max_connections: int = 1024,
        first_delay_seconds: float = 0.1,
        longest_delay_seconds: float = 5.0,
        ping_interval_seconds: float = 1.0,
        ping_timeout_seconds: float = 5.0,
        client_id: str | None = None,
    ) -> None:
        """Prepare; the first call opens connections.

        Args:
            url: of the server or servers, with or without /run_code; more may be added by ``put_server``.
            token: what the servers were started with; by default the environment's MEGATRON_RETOOL_SANDBOX_TOKEN.
            give_up_seconds: how long after the first attempt another one may start.
            max_connections: to each server at the same time; further calls wait for one.
            first_delay_seconds: mean pause before the second attempt; each further pause is twice as long.
            longest_delay_seconds: where the pauses stop growing.
            ping_interval_seconds: between two pings of one of several servers.
            ping_timeout_seconds: after which a server that does not answer its ping counts as dead.
            client_id: whose turns in the server's queue the requests count for; by default this process's.
        """
        self._balancer = Balancer(map(_base, [url] if isinstance(url, str) else url))
        self._give_up_seconds = give_up_seconds
        self._max_connections = max_connections
        self._first_delay, self._longest_delay = first_delay_seconds, longest_delay_seconds
        self._ping_interval, self._ping_timeout = ping_interval_seconds, ping_timeout_seconds
        self._headers = {"X-Client-Id": client_id or f"{os.uname().nodename}:{os.getpid()}"}
        token = token or os.environ.get(TOKEN_VARIABLE)
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watches: dict[Server, asyncio.Task[None]] = {}
        self._doubts: dict[Server, asyncio.Event] = {}
        self._deadlines: dict[Server, set[asyncio.Timeout]] = {}

    @property
    def urls(self) -> list[str]:
        """Base URLs of the servers."""
        return [server.url for server in self._balancer.servers]

    def put_server(self, index: int, url: str) -> None:
        """Take a server in from now on, in place of the one that had this index."""
        self.drop_server(index)
        self._balancer.put(index, _base(url))
        if self._session is not None and not self._session.closed:
            self._watch_servers()

    def drop_server(self, index: int) -> None:
        """Forget a server; the requests that wait for it go elsewhere."""
        server = self._balancer.drop(index)
        if server is not None:
            if server in self._watches:
                self._watches.pop(server).cancel()
                del self._doubts[server]
            self._give_up_on(server)

    def take_metrics(self) -> dict[str, float]:
        """Requests, failures and retries of each server since the last call; see ``Balancer``."""
        return self._balancer.take_metrics()

    async def run_code(
        self,
        code: str,
        *,
        language: str = "python",
        run_timeout: float = 10.0,
        stdin: str | bytes = b"",
        memory_limit_mb: int | None = None,
        files: Mapping[str, bytes] | None = None,
        fetch_files: Sequence[str] = (),
        print_last_expression: bool | None = None,
    ) -> ExecutionResult:
        """Run one snippet of Python, pytest or bash. The code's own failures are in the result.

        Raises:
            SandboxUnavailable: no answer from any server within ``give_up_seconds``.
        """
        return await self.execute(
            ExecutionRequest(
                code=code,
                language=language,
                run_timeout=run_timeout,
                memory_limit_mb=memory_limit_mb,
                stdin=stdin.encode("utf-8", "surrogatepass") if isinstance(stdin, str) else stdin,
                files=files or {},
                fetch_files=tuple(fetch_files),
                print_last_expression=print_last_expression,
            )
        )

    async def open_session(self, memory_limit_mb: int | None = None) -> SandboxSession:
        """A process for several cells, on the least busy server that has room.

        Raises:
            SandboxUnavailable: none has within ``give_up_seconds``.
        """
        began = time.monotonic()
        stop_trying, delay = began + self._give_up_seconds, self._first_delay
        failed: set[Server] = set()
        while True:
            server, reason = self._balancer.choose(failed), "there is no server"
            if server is not None:
                try:
                    body = {"memory_limit_MB": memory_limit_mb or -1}
                    answer = await self.post(f"{server.url}/session/create", body, self._give_up_seconds + 60)
                    if "session" in answer:
                        return SandboxSession(self, server.url, answer["session"])
                    reason = str(answer.get("message"))
                except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
                    reason = f"{type(error).__name__}: {error}"
                failed.add(server)
                if self._balancer.has_another(failed):
                    continue
            pause = random.uniform(0.5, 1.5) * delay
            if time.monotonic() + pause > stop_trying:
                waited = time.monotonic() - began
                raise SandboxUnavailable(f"sandbox: no session: {reason}; gave up after {waited:.1f} s")
            await asyncio.sleep(pause)
            delay, failed = min(2 * delay, self._longest_delay), set()

    async def post(self, url: str, body: dict[str, Any], seconds: float) -> dict[str, Any]:
        """One request, and the object that answers it.

        Raises:
            TimeoutError, aiohttp.ClientError, OSError, ValueError: there is none.
        """
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=30)
        async with self._open().post(url, json=body, timeout=timeout) as response:
            answer = await response.json(content_type=None)
        if not isinstance(answer, dict):
            raise ValueError(f"not an answer of a sandbox: {str(answer)[:200]}")
        return answer

    async def execute(self, request: ExecutionRequest) -> ExecutionResult:
        """Run one snippet; see ``run_code``."""
        body = request.to_json()
        began = time.monotonic()
        stop_trying = began + self._give_up_seconds
        delay = self._first_delay
        failed: set[Server] = set()
        has_broken = False
        while True:
            server = self._balancer.choose(failed)
            if server is None:
                where, reason, result = "", "there is no server", None
            else:
                where = f" {server.url}"
                reason, result = await self._attempt(server, body, request.run_timeout, again=bool(failed))
                if result is not None and result.outcome not in (Outcome.SANDBOX_ERROR, Outcome.BUSY):
                    return result
                server.counts.failures += 1
                failed.add(server)
            broken = result if result is not None and result.outcome is Outcome.SANDBOX_ERROR else None
            if broken is None and self._balancer.has_another(failed):
                logger.debug("sandbox%s: %s; trying another one", where, reason)
                continue
            if broken is not None and has_broken:
                return broken  # a snippet that breaks its sandbox would do so each time: not for minutes
            has_broken = has_broken or broken is not None
            pause = random.uniform(0.5, 1.5) * delay
            if time.monotonic() + pause > stop_trying:
                if broken is not None:
                    return broken
                waited = time.monotonic() - began
                raise SandboxUnavailable(f"sandbox{where}: {reason}; gave up after {waited:.1f} s")
            logger.debug("sandbox%s: %s; trying again in %.1f s", where, reason, pause)
            await asyncio.sleep(pause)
            delay = min(2 * delay, self._longest_delay)
            failed = set() if server is None else {server}

    async def health(self) -> dict[str, Any]:
        """The /health page of the (first) server.

        Raises:
            SandboxUnavailable: it does not answer.
        """
        url = self.urls[0]
        try:
            async with self._open().get(f"{url}/health", timeout=aiohttp.ClientTimeout(10)) as response:
                response.raise_for_status()
                return await response.json(content_type=None)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise SandboxUnavailable(f"sandbox {url}: {type(error).__name__}: {error}") from error

    async def ping(self) -> bool:
        """Whether every server answers."""
        return not await self.silent_servers()

    async def silent_servers(self) -> list[str]:
        """URLs of the servers that do not answer."""
        urls = self.urls
        answers = await asyncio.gather(*(self._answers(url, _START_PING_SECONDS) for url in urls))
        return [url for url, answered in zip(urls, answers, strict=True) if not answered]

    async def close(self) -> None:
        """Stop watching servers, and close the connections."""
        for watch in self._watches.values():
            watch.cancel()
        self._watches.clear()
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
            connector = aiohttp.TCPConnector(limit=0, limit_per_host=self._max_connections)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
            self._watches.clear()
            self._watch_servers()
        return self._session

    async def _attempt(
        self, server: Server, body: dict[str, Any], run_timeout: float, *, again: bool
    ) -> tuple[str, ExecutionResult | None]:
        """One request: (why it did not serve, the result if there is one)."""
        session = self._open()
        server.counts.requests += 1
        server.counts.retries += again
        server.outstanding += 1
        deadlines = self._deadlines.setdefault(server, set())
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=run_timeout + self._give_up_seconds + 60)
        try:
            async with asyncio.timeout(None) as deadline:
                deadlines.add(deadline)
                async with session.post(f"{server.url}/run_code", json=body, timeout=timeout) as response:
                    server.up = server.up or server not in self._watches
                    return await _read(response)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            server.up = False
            if server in self._watches:
                self._doubts[server].set()
            return f"{type(error).__name__}: {error}", None
        except ValueError as error:
            return f"{type(error).__name__}: {error}", None
        finally:
            deadlines.discard(deadline)
            server.outstanding -= 1

    def _give_up_on(self, server: Server) -> None:
        """End the attempts that wait for ``server``."""
        for deadline in self._deadlines.pop(server, ()):
            deadline.reschedule(0)

    def _watch_servers(self) -> None:
        # A single server is asked again and again anyway.
        servers = self._balancer.servers
        for server in servers if len(servers) > 1 else ():
            if server not in self._watches:
                self._doubts[server] = asyncio.Event()
                self._watches[server] = asyncio.create_task(self._watch(server, self._doubts[server]))

    async def _watch(self, server: Server, doubt: asyncio.Event) -> None:
        """Ping the server every now and then, and whenever one of its connections failed."""
        answered = True
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(doubt.wait(), self._ping_interval)
            doubt.clear()
            server.up = await self._answers(server.url, self._ping_timeout)
            if server.up != answered:
                answered = server.up
                what = "answers again" if answered else "does not answer: its requests go to the others"
                logger.warning("sandbox %s %s", server.url, what)
            if not answered and self._balancer.has_another((server,)):
                self._give_up_on(server)

    async def _answers(self, url: str, seconds: float) -> bool:
        # A session of its own: the other one's connections may all be in use, and are open already.
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with (
                aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session,
                session.get(f"{url}/v1/ping") as response,
            ):
                return response.status == 200 and "pong" in await response.text()
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            return False


class SandboxSession:
    """A process on one server whose variables live from cell to cell.

    Attributes:
        open: it can take another cell.
    """

    def __init__(self, client: CodeInterpreterClient, url: str, identifier: str) -> None:
        self._client, self._url, self._id = client, url, identifier
        self.open = True

    async def run(
        self, code: str, *, run_timeout: float = 10.0, print_last_expression: bool = False
    ) -> ExecutionResult:
        """Run a cell. It is sent once: a second time it would do its work twice.

        Raises:
            SandboxUnavailable: the server does not answer; the session is lost.
        """
        body = {
            "session": self._id,
            "code": code,
            "run_timeout": run_timeout,
            "print_last_expression": print_last_expression,
        }
        try:
            answer = await self._client.post(f"{self._url}/session/run", body, run_timeout + 60)
            result = ExecutionResult.from_json(answer)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            self.open = False
            raise SandboxUnavailable(f"sandbox {self._url}: {type(error).__name__}: {error}") from error
        self.open = bool(answer.get("session_open"))
        return result

    async def close(self) -> None:
        """End it. A server that does not answer ends it by itself later."""
        if self.open:
            self.open = False
            with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError, ValueError):
                await self._client.post(f"{self._url}/session/close", {"session": self._id}, 30.0)


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/run_code")


async def _read(response: aiohttp.ClientResponse) -> tuple[str, ExecutionResult | None]:
    """(why the answer does not serve, the result if there is one)."""
    if response.status in _RETRIED_STATUS:
        return f"HTTP {response.status}: {(await response.text())[:200]}", None
    if response.status >= 400:
        text = (await response.text())[:500]
        return text, ExecutionResult(Outcome.INVALID_REQUEST, message=f"HTTP {response.status}: {text}")
    result = ExecutionResult.from_json(await response.json(content_type=None))
    return result.message, result
