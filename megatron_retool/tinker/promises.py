"""Results that clients come for later: every long call is answered at once by the id of a promise.

A client asks for a promise's result until it has it, and may ask again after a connection was lost. So a result is kept
for a while after it was taken, longer if no client has taken it yet, and all of them share a bound of memory. An id is
made of the request's own number: the same request sent twice finds the same promise, and its work is done once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from sglang_rollout.gateway.errors import ApiError

TAKEN_SECONDS = 600.0
"""How long a result is kept after it was taken first."""
WAITING_SECONDS = 4 * 3600.0
"""How long a result waits for its client."""
MOST_BYTES = 1 << 30
"""Of all results."""
MOST_PROMISES = 1 << 16


@dataclass(frozen=True)
class Outcome:
    """What a promise became.

    Attributes:
        payload: JSON, or protobuf where ``is_protobuf``.
        failed: it is the description of an error.
    """

    payload: bytes
    is_protobuf: bool = False
    failed: bool = False


def json_outcome(answer: dict[str, Any]) -> Outcome:
    """An outcome with ``answer`` as its JSON body."""
    return Outcome(orjson.dumps(answer))


def failure(message: str, *, by_user: bool) -> Outcome:
    """The error of a call that was accepted; clients raise it as RequestFailedError."""
    return Outcome(orjson.dumps({"error": message, "category": "user" if by_user else "server"}), failed=True)


@dataclass(eq=False)
class Promise:
    """
    Attributes:
        submission: what the call was answered, and a retry of it is.
        cancel: ends the work; None: it cannot be ended.
    """

    id: str
    submission: dict[str, Any]
    cancel: Callable[[], object] | None = None
    outcome: Outcome | None = None
    settled_at: float = 0.0
    taken_at: float | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class Promises:
    """All promises by id.

    Args:
        clock: seconds, rising.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, most_bytes: int = MOST_BYTES) -> None:
        self._clock = clock
        self._most_bytes = most_bytes
        self._promises: dict[str, Promise] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._promises)

    def open(self, identifier: str, **more: Any) -> Promise:
        """A new promise, whose submission says ``more``.

        Raises:
            ApiError: 429, there are too many.
        """
        if len(self._promises) >= MOST_PROMISES:
            raise ApiError(429, f"{MOST_PROMISES} calls wait or have results: try again later", code="too_many_calls")
        promise = Promise(identifier, {"request_id": identifier, **more})
        self._promises[identifier] = promise
        return promise

    def find(self, identifier: str) -> Promise | None:
        """The promise; None where it is not known."""
        return self._promises.get(identifier)

    def settle(self, promise: Promise, outcome: Outcome) -> None:
        """Give a promise its outcome. One that was forgotten meanwhile stays so."""
        if self._promises.get(promise.id) is not promise or promise.outcome is not None:
            return
        promise.outcome, promise.settled_at = outcome, self._clock()
        self._bytes += len(outcome.payload)
        promise.settled.set()
        self._make_room(promise)

    async def wait(self, identifier: str, seconds: float) -> Outcome | None:
        """The outcome, or None where there is none within ``seconds``.

        Raises:
            ApiError: 410, there is no such promise, or no longer.
        """
        promise = self._promises.get(identifier)
        if promise is None:
            raise ApiError(
                410,
                "there is no such request, or no longer: its result was taken or dropped, or the server was restarted",
                code="gone",
            )
        try:
            async with asyncio.timeout(seconds):
                await promise.settled.wait()
        except TimeoutError:
            return None
        return promise.outcome

    def take(self, identifier: str) -> None:
        """Note that a client was sent the result."""
        promise = self._promises.get(identifier)
        if promise is not None and promise.taken_at is None:
            promise.taken_at = self._clock()

    def cancel(self, identifier: str) -> None:
        """End a promise's work, where that is possible, and forget it."""
        promise = self._promises.get(identifier)
        if promise is not None and promise.cancel is not None and promise.outcome is None:
            promise.cancel()
            self.settle(promise, failure("the request was cancelled", by_user=True))

    def sweep(self) -> None:
        """Forget what was taken, or waited for, long enough."""
        now = self._clock()
        for promise in list(self._promises.values()):
            if promise.outcome is None:
                continue
            taken = promise.taken_at
            if now - promise.settled_at > WAITING_SECONDS or (taken is not None and now - taken > TAKEN_SECONDS):
                self._forget(promise)

    def _make_room(self, newest: Promise) -> None:
        """Forget results beyond the bound: first those that were taken, then the oldest."""
        if self._bytes <= self._most_bytes:
            return
        settled = [each for each in self._promises.values() if each.outcome is not None and each is not newest]
        for promise in sorted(settled, key=lambda each: (each.taken_at is None, each.settled_at)):
            if self._bytes <= self._most_bytes:
                return
            self._forget(promise)

    def _forget(self, promise: Promise) -> None:
        assert promise.outcome is not None
        self._bytes -= len(promise.outcome.payload)
        del self._promises[promise.id]
