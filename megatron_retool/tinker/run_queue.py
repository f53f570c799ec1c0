"""Which run's call the learner does next. It does one at a time, and to change the run costs a swap of its state, so it
stays with a run as long as that has calls; but no run waits longer for its turn than the others' shares take.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

SHARE_SECONDS = 20.0
"""How long a run keeps the learner while others wait."""


@dataclass(frozen=True, eq=False)
class Job:
    """One call of a run; ``work`` catches its own errors."""

    run: str
    work: Callable[[], Awaitable[None]]


class RunQueue:
    """Jobs of all runs, each run's in order.

    Args:
        share_seconds: after which a run makes way for one that waits.
        clock: seconds, rising.
    """

    def __init__(self, share_seconds: float = SHARE_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._share_seconds, self._clock = share_seconds, clock
        self._jobs: dict[str, deque[Job]] = {}
        self._present: str | None = None
        self._since = 0.0
        self._more = asyncio.Event()

    def __len__(self) -> int:
        return sum(map(len, self._jobs.values()))

    def put(self, job: Job) -> None:
        """Append a job to its run's queue."""
        # A dict keeps the order in which runs came to have jobs: that of their turns.
        self._jobs.setdefault(job.run, deque()).append(job)
        self._more.set()

    def next(self) -> Job | None:
        """The job that is due, which is taken out; None: there is none."""
        if not self._jobs:
            return None
        used_up = len(self._jobs) > 1 and self._clock() - self._since >= self._share_seconds
        if self._present not in self._jobs or used_up:
            if used_up and self._present in self._jobs:
                self._jobs[self._present] = self._jobs.pop(self._present)  # behind the others
            self._present, self._since = next(iter(self._jobs)), self._clock()
        jobs = self._jobs[self._present]
        job = jobs.popleft()
        if not jobs:
            del self._jobs[self._present]
        return job

    async def work(self) -> None:
        """Do the jobs, one after another, until cancelled."""
        while True:
            job = self.next()
            if job is None:
                self._more.clear()
                await self._more.wait()
                continue
            await job.work()
