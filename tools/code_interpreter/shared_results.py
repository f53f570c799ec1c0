"""Identical snippets run once: those who ask while one runs wait for it, and who asks later gets what it printed."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tools.code_interpreter.protocol import ExecutionResult, Outcome
from tools.code_interpreter.pure_code import is_pure

MOST_KEPT = 4096
MOST_CHARACTERS = 1 << 16
"""Of code and output together; a longer result is shared with those who wait for it, and not kept."""


@dataclass
class _Run:
    task: asyncio.Task[ExecutionResult]
    waiting: int = 0


class SharedResults:
    """Runs pure code (``is_pure``) once, any other each time. All calls belong to one event loop.

    Args:
        run: runs a snippet.
    """

    def __init__(self, run: Callable[[str], Awaitable[ExecutionResult]]) -> None:
        self._run = run
        self._running: dict[str, _Run] = {}
        self._kept: OrderedDict[str, ExecutionResult] = OrderedDict()

    async def run(self, code: str) -> tuple[ExecutionResult, bool]:
        """The result, and whether it is another call's.

        Who is cancelled leaves the run to the others that wait for it; the last one ends it.

        Raises:
            whatever running the snippet raises, to all that wait for it.
        """
        if code in self._kept:
            self._kept.move_to_end(code)
            return self._kept[code], True
        run = self._running.get(code)
        shared = run is not None
        if run is None:
            if not is_pure(code):
                return await self._run(code), False
            run = self._running[code] = _Run(asyncio.ensure_future(self._run(code)))
            run.task.add_done_callback(lambda task: self._ended(code, task))
        run.waiting += 1
        try:
            return await asyncio.shield(run.task), shared
        finally:
            run.waiting -= 1
            if not run.waiting and not run.task.done():
                self._forget(code, run.task)
                run.task.cancel()

    def _ended(self, code: str, task: asyncio.Task[ExecutionResult]) -> None:
        self._forget(code, task)
        if task.cancelled() or task.exception() is not None:
            return
        result = task.result()
        if _is_the_codes_own(result) and len(code) + len(result.stdout) + len(result.stderr) <= MOST_CHARACTERS:
            self._kept[code] = result
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)

    def _forget(self, code: str, task: asyncio.Task[ExecutionResult]) -> None:
        run = self._running.get(code)
        if run is not None and run.task is task:
            del self._running[code]


def _is_the_codes_own(result: ExecutionResult) -> bool:
    """Whether another run would end so too: time and memory may be short, or a process killed, by the host's fault."""
    killed = result.return_code is not None and result.return_code < 0
    return result.outcome in (Outcome.FINISHED, Outcome.COMPILE_ERROR) and not killed
