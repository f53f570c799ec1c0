"""How every HTTP server of this project meets its callers: who may call, how long a request may take to come, and how
many connections are held.

A listener on loopback is reached by every browser of the machine: a page of another site sends it requests, or has its
own name lead to 127.0.0.1. Browsers say in Host, Origin and Sec-Fetch-Site whose page asks, so ``check_caller`` refuses
what no page of this machine sent. Whoever shows a key needs no such check: a foreign page does not know it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import resource
import socket
import urllib.parse
from collections.abc import Iterable, Iterator
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict, CIMultiDictProxy

from untrusted import MOST_QUOTED, clipped, quoted

IDLE_SECONDS = 30.0
"""Longest wait for a request's headers, from the connection's beginning or the last answer on."""
BODY_SECONDS = 30.0
"""Longest wait for a request's body; one that says how long it is gets a second more for each MiB."""
UNREAD_SECONDS = 60.0
"""Longest that a client may leave an answer unread."""
LINGERING_SECONDS = 2.0
"""How long the rest of a refused body is read and dropped, so that its sender comes to read why."""
BACKLOG = 256
"""Connections that may wait to be accepted, and may be accepted all at once."""
MOST_CONNECTIONS = 8192
_OTHER_DESCRIPTORS = 128
_FEWEST_CONNECTIONS = 64


class ForeignCaller(Exception):
    """A request of another site's page, or by a name that is not this machine's; the message says what to do."""


class BodyRefused(Exception):
    """A request's body is broken, too large or too slow.

    Attributes:
        status: 400, 413 or 408.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a listener on ``host``."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def check_caller(headers: CIMultiDict[str] | CIMultiDictProxy[str], *, any_name: bool) -> None:
    """Refuse what a browser sends for a page that is not this server's.

    Args:
        any_name: let a request without Origin call this machine whatever it likes: for listeners beyond loopback, whose
            machine has names that it does not know itself.

    Raises:
        ForeignCaller: Host is neither an address nor a name of this machine, or the page that asks is another site's.
    """
    hosts, origins = headers.getall("Host", []), headers.getall("Origin", [])
    strange = [host for host in hosts if not _is_of_this_machine(host)]
    if strange and (origins or not any_name):
        raise ForeignCaller(
            f"this machine was called {quoted(strange[0])}: call it localhost or by its address, or show the key of a "
            "server that has one"
        )
    own = [host.casefold() for host in hosts]
    foreign = [origin for origin in origins if origin.rpartition("://")[2].casefold() not in own]
    if not foreign and _is_of_another_site(headers):
        foreign = [headers["Sec-Fetch-Site"]]
    if foreign:
        raise ForeignCaller(
            f"a page of {quoted(foreign[0])} asked: pages of other sites are not answered, unless they show the key of "
            "a server that has one"
        )


def _is_of_another_site(headers: CIMultiDict[str] | CIMultiDictProxy[str]) -> bool:
    """Whether a page of another site loads this; a link that a person follows is none."""
    site = headers.get("Sec-Fetch-Site", "none")
    return site in ("cross-site", "same-site") and headers.get("Sec-Fetch-Mode") != "navigate"


def _is_of_this_machine(host: str) -> bool:
    try:
        name = (urllib.parse.urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return False
    own = socket.gethostname().casefold()
    return _address(name) is not None or name in ("localhost", own, own.partition(".")[0])


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


async def read_body(request: web.Request, seconds: float = BODY_SECONDS, most: int | None = None) -> bytes:
    """The body, whole.

    Args:
        seconds: until it has come; a body that says how long it is gets a second more for each MiB.
        most: bytes that it may have; None: the application's ``client_max_size``, which it never exceeds.

    Raises:
        BodyRefused: it is not what its headers say, larger than it may be, or too slow.
    """
    if most is not None and most < request.client_max_size:
        # aiohttp reads as much at a time as it allows in all.
        request = request.clone(client_max_size=most)
    seconds += (min(request.content_length or 0, request.client_max_size)) / (1 << 20)
    try:
        async with asyncio.timeout(seconds):
            return await request.read()
    except TimeoutError:
        raise BodyRefused(408, f"the body did not come within {seconds:.0f} s") from None
    except web.HTTPRequestEntityTooLarge:
        raise BodyRefused(413, f"the body has more than {request.client_max_size} bytes") from None
    except web.RequestPayloadError:
        raise BodyRefused(400, "the body is not what its headers say: chunks or compression are broken") from None


def most_connections(descriptors: int = 0, configured: int = MOST_CONNECTIONS) -> int:
    """As many as ``configured``, or as the limit of open files allows beside ``descriptors`` of other use."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return min(configured, max(files - _OTHER_DESCRIPTORS - BACKLOG - descriptors, _FEWEST_CONNECTIONS))


class _Protocol(web.RequestHandler):
    """Answers what is no HTTP shortly and without a traceback: anybody could fill the log with it."""

    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """As ``web.RequestHandler.handle_error``."""
        if isinstance(exc, HttpProcessingError):
            message = f"no HTTP request: {clipped(message or '', MOST_QUOTED)}"
        return super().handle_error(request, status, exc, message)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """As ``web.RequestHandler.log_exception``."""
        if not isinstance(kw.get("exc_info"), HttpProcessingError | web.RequestPayloadError):
            super().log_exception(*args, **kw)


class Connections:
    """Accepts at most ``limit`` connections. Where there is no room, a new one takes the place of the one that is
    missed least: the oldest that has not shown a valid request yet, else the oldest that runs none.

    Args:
        options: of ``web.RequestHandler``.
    """

    def __init__(self, server: web.Server, limit: int, **options: Any) -> None:
        self._server = server
        self._limit = limit
        self._options = options
        self._proven: set[web.RequestHandler] = set()
        self._busy: set[web.RequestHandler] = set()
        self.closed = 0
        """Connections that made room for others."""

    def accept(self) -> web.RequestHandler:
        """The protocol of a new connection, for ``loop.create_server``."""
        connections = [each for each in self._server.connections if each.transport is not None]
        self._proven.intersection_update(connections)
        excess = len(connections) + 1 - self._limit
        if excess > 0:
            idle = [each for each in connections if each not in self._busy]
            # Sorting keeps the order of their ages.
            for victim in sorted(idle, key=self._proven.__contains__)[:excess]:
                victim.force_close()
                self.closed += 1
        return _Protocol(self._server, loop=asyncio.get_running_loop(), **self._options)

    @contextlib.contextmanager
    def serving(self, connection: web.RequestHandler | None) -> Iterator[None]:
        """A request that may be served runs on ``connection`` for the length of the block."""
        if connection is None:
            yield
            return
        self._proven.add(connection)
        self._busy.add(connection)
        try:
            yield
        finally:
            self._busy.discard(connection)


class Listener:
    """An application's server, with limits of time and number on what reaches it.

    Args:
        limit: connections that are held at the same time.
        idle_seconds: until a request's headers have come.
        cancels: a client that goes away cancels its request's handler.
        shutdown_seconds: that running requests have to end when this is closed.
        backlog: connections that may wait to be accepted.

    Attributes:
        connections: None before ``prepare``.
    """

    def __init__(
        self,
        application: web.Application,
        *,
        limit: int,
        idle_seconds: float = IDLE_SECONDS,
        cancels: bool = False,
        shutdown_seconds: float = 60.0,
        backlog: int = BACKLOG,
    ) -> None:
        self.connections: Connections | None = None
        self._limit, self._backlog = limit, backlog
        self._idle_seconds = idle_seconds
        self._listening: asyncio.Server | None = None
        self._runner = web.AppRunner(application, handler_cancellation=cancels, shutdown_timeout=shutdown_seconds)

    async def start(self, host: str, port: int) -> int:
        """Listen, and give the port that was chosen where ``port`` is 0.

        Raises:
            OSError: there is no such address, or the port is taken.
        """
        await self._runner.setup()
        assert self._runner.server is not None
        self.connections = Connections(
            self._runner.server,
            self._limit,
            access_log=None,
            keepalive_timeout=self._idle_seconds,
            lingering_time=LINGERING_SECONDS,
        )
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(self.connections.accept, host, port, backlog=self._backlog)
        _limit_unread(self._listening.sockets)
        return int(self._listening.sockets[0].getsockname()[1])

    def stop_accepting(self) -> None:
        """Take no further connection."""
        if self._listening is not None:
            self._listening.close()

    async def close(self) -> None:
        """End what is left."""
        self.stop_accepting()
        await self._runner.cleanup()


def _limit_unread(sockets: Iterable[socket.socket]) -> None:
    """End connections whose other side reads nothing of its answer. Accepted sockets inherit it from these."""
    for each in sockets:
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_SECONDS * 1000))
