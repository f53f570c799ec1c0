"""What the server takes in: how many connections, and how many bytes of requests at the same time.

Descriptors and memory are for the snippets. A client that opens connections and says nothing, or sends bodies without
end, must not keep the requests of others out.
"""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Iterable, Iterator

from aiohttp import web

UNREAD_SECONDS = 60.0
"""Longest that a client may leave an answer unread."""
LINGERING_SECONDS = 2.0
"""How long the rest of a refused body is read and dropped, so that its sender comes to read why."""
BACKLOG = 256
"""Connections that may wait to be accepted, and may be accepted all at once."""
_DESCRIPTORS_A_WORKER = 6
_OTHER_DESCRIPTORS = 128
_FEWEST_CONNECTIONS = 64


def most_connections(workers: int, configured: int) -> int:
    """As many as ``configured``, or as the limit of open files allows beside ``workers`` running snippets."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    spare = files - _OTHER_DESCRIPTORS - BACKLOG - _DESCRIPTORS_A_WORKER * workers
    return min(configured, max(spare, _FEWEST_CONNECTIONS))


class Connections:
    """Accepts at most ``limit`` connections. Where there is no room, a new one takes the place of the one that is
    missed least: the oldest that has not shown a valid request yet, else the oldest that runs none."""

    def __init__(self, server: web.Server, limit: int) -> None:
        self._server = server
        self._limit = limit
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
        return self._server()

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


def limit_unread(sockets: Iterable[socket.socket]) -> None:
    """End connections whose other side reads nothing of its answer. Accepted sockets inherit it from these."""
    for each in sockets:
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_SECONDS * 1000))


class BodyBudget:
    """Bytes of request bodies that may be held at the same time.

    Args:
        largest: of one body.
        total: of all.
    """

    def __init__(self, largest: int, total: int) -> None:
        self.largest = largest
        self._free = max(total, largest)

    def size(self, request: web.BaseRequest) -> int:
        """Bytes that the body may come to: what it says, or the largest where that is not the whole truth."""
        if request.content_length is None or request.headers.get("Content-Encoding"):
            return self.largest if request.can_read_body else 0
        return request.content_length

    @contextlib.contextmanager
    def held(self, size: int) -> Iterator[bool]:
        """Whether ``size`` bytes are free; they are taken for the length of the block."""
        if size > self._free:
            yield False
            return
        self._free -= size
        try:
            yield True
        finally:
            self._free += size
