"""The order of a run's calls. A client numbers them 1, 2, 3, … and sends several at once, so that they arrive in any
order: parts of one large forward_backward come last part first, and the optimizer step may come before all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sglang_rollout.gateway.errors import ApiError

MOST_HELD = 4096
"""Calls of a run that wait for an earlier one."""


class SequenceGate[Call]:
    """Holds calls that are early, and gives them in the order of their numbers.

    Args:
        first: the next number.
        clock: seconds, rising.

    Attributes:
        next: the number that is waited for.
    """

    def __init__(self, first: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self.next = first
        self._clock = clock
        self._held: dict[int, Call] = {}
        self._since = 0.0

    def has_passed(self, number: int) -> bool:
        """Whether that call is here, or was."""
        return number < self.next or number in self._held

    def check_room(self, number: int) -> None:
        """
        Raises:
            ApiError: 429, too many calls wait for an earlier one.
        """
        if number != self.next and len(self._held) >= MOST_HELD:
            raise ApiError(429, f"{MOST_HELD} calls of the run wait for call {self.next}", code="too_many_calls")

    def offer(self, number: int, call: Call) -> list[Call]:
        """Take a call that has not passed; the calls whose turn it is now, in order."""
        if not self._held:
            self._since = self._clock()
        self._held[number] = call
        return self._ready()

    def skip(self, seconds: float) -> tuple[list[Call], range] | None:
        """Give up on calls that others have waited for longer than ``seconds``.

        Returns:
            The calls whose turn it is now, and the numbers that never came; None: nothing has waited that long.
        """
        if not self._held or self._clock() - self._since <= seconds:
            return None
        missing = range(self.next, min(self._held))
        self.next = missing.stop
        return self._ready(), missing

    def drain(self) -> list[Call]:
        """All that is held: nothing follows."""
        held, self._held = self._held, {}
        return list(held.values())

    def _ready(self) -> list[Call]:
        ready = []
        while self.next in self._held:
            ready.append(self._held.pop(self.next))
            self.next += 1
        if ready:
            self._since = self._clock()
        return ready
