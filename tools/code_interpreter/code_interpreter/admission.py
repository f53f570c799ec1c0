"""How many bytes of requests the server holds at the same time.

Memory is for the snippets: a client that sends bodies without end must not keep the requests of others out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from aiohttp import web


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
