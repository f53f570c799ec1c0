"""How a command is asked to leave, and the exit code that tells that it did.

SIGUSR1 asks: a validation is given up, the step under way is finished and checkpointed, and the command ends with
REQUEUE. SIGINT and SIGTERM end it at once (megatron_retool/interruption.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

Result = TypeVar("Result")

REQUEUE = 85
"""Exit code of a run that was asked to leave, or that hung: there is more to do, from the last checkpoint."""

_POLL_SECONDS = 0.2


class LeaveAsked(Exception):
    """The work under way is done, and the next was not begun because SIGUSR1 had arrived."""


class LeaveRequest:
    """Notes SIGUSR1 for the length of a ``with`` block, in the main thread."""

    def __init__(self) -> None:
        self._asked = False

    def is_set(self) -> bool:
        """Whether the run was asked to leave."""
        return self._asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def __enter__(self) -> LeaveRequest:
        self._previous = signal.signal(signal.SIGUSR1, self._ask)
        return self

    async def interrupting(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """The result of ``work``; None where it was cancelled because of the request."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=_POLL_SECONDS))[0]:
                if self._asked:
                    return None
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGUSR1, self._previous)


@contextmanager
def passed_on(leave: LeaveRequest, processes: Callable[[], Iterable[int]]) -> Iterator[None]:
    """For the length of the block, hand the request on to ``processes`` (ids), once to each that handles SIGUSR1.

    A new process that has no handler yet would be killed: it gets the signal once it has one.
    """
    ended = threading.Event()

    def pass_on() -> None:
        told: set[int] = set()
        while not ended.wait(_POLL_SECONDS):
            for process in set(processes()) - told if leave.is_set() else ():
                if _handles(process, signal.SIGUSR1):
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGUSR1)
                    told.add(process)

    thread = threading.Thread(target=pass_on, name="leave-request", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _handles(process: int, number: signal.Signals) -> bool:
    """Whether the process has a handler of its own for the signal (Linux)."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
