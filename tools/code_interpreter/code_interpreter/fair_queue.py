"""Hands out workers in turn to the clients that wait for one."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import TypeVar

T = TypeVar("T")


class QueueFull(Exception):
    """Too many requests wait already, or this one has waited too long."""


class FairQueue[T]:
    """A pool of items with a bounded, fair waiting list.

    Clients take turns, and the requests of one client are served in order, so that a client which sends a thousand
    requests at once does not keep another's single one waiting for all of them.
    """

    def __init__(self, max_waiting: int) -> None:
        self._idle: list[T] = []
        self._waiting: OrderedDict[str, deque[asyncio.Future[T]]] = OrderedDict()
        self._count = 0
        self._max_waiting = max_waiting

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return self._count

    @property
    def idle(self) -> int:
        """Workers without work."""
        return len(self._idle)

    def put(self, item: T) -> None:
        """Give ``item`` to the client whose turn it is, or keep it."""
        while self._waiting:
            client, futures = self._waiting.popitem(last=False)
            future = futures.popleft()
            if futures:
                self._waiting[client] = futures  # at the end of the round
            self._count -= 1
            if not future.done():
                future.set_result(item)
                return
        self._idle.append(item)

    def take_idle(self) -> T | None:
        """An item that is not waited for, the one used last (its memory is in the caches), or None."""
        return self._idle.pop() if self._idle else None

    def discard_idle(self, item: T) -> None:
        """Take an idle worker out, which has ended."""
        if item in self._idle:
            self._idle.remove(item)

    async def get(self, client: str, timeout: float) -> T:
        """Wait for an item.

        Raises:
            QueueFull: the list is full, or ``timeout`` seconds passed.
        """
        if self._count >= self._max_waiting:
            raise QueueFull(f"{self._count} requests are waiting")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(future)
        self._count += 1
        try:
            return await asyncio.wait_for(asyncio.shield(future), timeout)
        except (TimeoutError, asyncio.CancelledError) as error:
            self._forget(client, future)
            if isinstance(error, asyncio.TimeoutError):
                raise QueueFull(f"no worker became free within {timeout:g} s") from None
            raise

    def _forget(self, client: str, future: asyncio.Future[T]) -> None:
        if future.done() and not future.cancelled():
            self.put(future.result())  # an item arrived in the very moment of giving up
            return
        future.cancel()
        futures = self._waiting.get(client)
        if futures is not None and future in futures:
            futures.remove(future)
            self._count -= 1
            if not futures:
                del self._waiting[client]
