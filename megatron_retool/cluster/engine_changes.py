"""Adds and removes engines during a run, as `megatron-retool engines` asks.

A new engine gets the current weights before its first request. One that goes ends its requests first: their
trajectories keep what they have and continue on another engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from megatron_retool.cluster.engine_group import EngineGroup
from megatron_retool.cluster.engine_weights import EngineWeights
from megatron_retool.errors import OperationError
from megatron_retool.runs import engines as run_engines
from megatron_retool.runs.engines import Answer, EngineRequest, RunEngine
from sglang_rollout.engine.pool import EnginePool

LOOK_SECONDS = 1.0
"""Between two looks for requests and for engines that have another URL."""


class EngineChanges:
    """Carries out requests in their order; ``say`` prints what has changed."""

    def __init__(
        self,
        run_dir: Path,
        engines: EngineGroup,
        weights: EngineWeights,
        pool: EnginePool,
        say: Callable[[str], None],
    ) -> None:
        self._run_dir = run_dir
        self._engines = engines
        self._weights = weights
        self._pool = pool
        self._say = say
        self._written: list[RunEngine] | None = None

    @contextlib.asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """Look for requests for the length of the block."""
        run_engines.begin(self._run_dir)
        self._write()
        following = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            run_engines.end(self._run_dir)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            with contextlib.suppress(OSError):  # a full disk: the run's own files say so
                self._write()
                for path, request in run_engines.take_requests(self._run_dir):
                    said = await self._carry_out(request)
                    self._write()
                    run_engines.answer(path, said)

    async def _carry_out(self, request: EngineRequest) -> Answer:
        done: list[str] = []
        try:
            if request.add:
                results = await asyncio.gather(*(self._add() for _ in range(request.add)), return_exceptions=True)
                done += [result for result in results if isinstance(result, str)]
                for error in results:
                    if isinstance(error, BaseException):
                        raise error
            for number in request.remove:
                done.append(await self._remove(number))
        except Exception as error:
            # Whatever it was, the run continues with the engines that it has.
            return Answer(False, "; ".join([*done, str(error) or type(error).__name__]))
        return Answer(True, "; ".join(done))

    async def _add(self) -> str:
        number = await self._weights.add()
        if number is None:
            raise OperationError("the new engine died before it had the weights")
        self._pool.add(self._engines.url(number), number)
        return self._told(f"engine {number} serves at {self._engines.url(number)}")

    async def _remove(self, number: int) -> str:
        await self._pool.retire(number)
        await self._weights.remove(number)
        return self._told(f"engine {number} has gone")

    def _told(self, text: str) -> str:
        self._say(f"{text}; the run has {len(self._engines.urls)} now")
        return text

    def _write(self) -> None:
        """Write engines.json where it would differ."""
        result = []
        for number, url in self._engines.by_number.items():
            slot = self._engines.place(number)
            result.append(RunEngine(number, url, slot.node, slot.gpus))
        if result != self._written:
            run_engines.write_engines(self._run_dir, result)
            self._written = result
