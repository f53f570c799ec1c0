"""The run's engines as rollout sees them: a client each, places for trajectories, and what becomes of dead ones."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from megatron_retool.config import RolloutConfig
from megatron_retool.errors import OperationError
from sglang_rollout.engine.base import Engine
from sglang_rollout.engine.rollout_statistics import RolloutStatistics
from sglang_rollout.engine.router import RoutedEngine, Router

RETIRE_SECONDS = 20.0
"""How long requests of an engine that is to go may take to end after they were aborted; then they fail."""
_LOOK_SECONDS = 0.1

logger = logging.getLogger(__name__)

RestartEngine = Callable[[str], Awaitable[str | None]]
"""Called with the URL of an engine that died: restart it, synchronise its weights, return its URL (None: given up)."""


class EnginePool:
    """Engines that serve the same weights. All methods belong to one event loop.

    Args:
        engine: makes the clients.
        base_urls: the engines'.
        config: rollout.
        statistics: counts failures and deaths.
        restart: brings a dead engine back while the others continue; None: it is left out.

    Attributes:
        router: who has a place where.
    """

    def __init__(
        self,
        engine: Engine,
        base_urls: Sequence[str],
        config: RolloutConfig,
        statistics: RolloutStatistics,
        restart: RestartEngine | None = None,
    ) -> None:
        if not base_urls:
            raise ValueError("rollout needs at least one engine URL")
        self.config = config
        self.router = Router(
            [engine.client(url) for url in base_urls],
            config.max_concurrent_trajectories,
            config.engine.max_total_tokens,
        )
        self._statistics = statistics
        self._engine = engine
        self._restart = restart
        self._restarts: set[asyncio.Task[None]] = set()
        self._health_checks: dict[str, asyncio.Future[bool]] = {}

    @property
    def serving(self) -> list[RoutedEngine]:
        """Engines that get requests."""
        return [engine for engine in self.router.engines if engine.alive]

    @property
    def places(self) -> int:
        """Trajectories that they take at a time."""
        return len(self.serving) * self.router.max_trajectories

    async def weight_version(self) -> int:
        """The oldest version that an engine serves."""
        return min(await asyncio.gather(*(engine.client.weight_version() for engine in self.serving)))

    async def replace(self, old_url: str, new_url: str) -> None:
        """Send trajectories to ``new_url`` instead of ``old_url`` (a restarted engine that has the current weights)."""
        if any(engine.url == new_url and engine.alive for engine in self.router.engines):
            return  # a weight sync and rollout met the same death
        for engine in self.router.engines:
            if engine.url == old_url:
                await engine.client.close()
        self.router.replace(old_url, self._engine.client(new_url))

    def add(self, url: str, number: int) -> None:
        """Send trajectories to one more engine, which has the current weights."""
        self.router.add(self._engine.client(url), number)

    async def retire(self, number: int) -> None:
        """Send nothing more to an engine that is about to end; its trajectories continue elsewhere from their tokens.

        Returns once its requests have ended, or after RETIRE_SECONDS.

        Raises:
            OperationError: it does not serve, or there is no other that does.
        """
        serving = self.serving
        engine = next((engine for engine in serving if engine.number == number), None)
        if engine is None:
            numbers = ", ".join(sorted(str(engine.number) for engine in serving)) or "none"
            raise OperationError(f"no engine {number} serves just now; there are {numbers}")
        if len(serving) == 1:
            raise OperationError(f"engine {number} is the only one that serves: add another before it goes")
        self.router.mark_dead(engine)
        deadline = time.monotonic() + RETIRE_SECONDS
        while engine.requests and time.monotonic() < deadline:
            # Again and again: one that is still on its way to the engine is not known there yet.
            await asyncio.gather(*map(engine.client.abort, engine.requests), return_exceptions=True)
            await asyncio.sleep(_LOOK_SECONDS)
        self.router.forget(engine)
        await engine.client.close()

    async def still_alive(self, engine: RoutedEngine, error: BaseException) -> bool:
        """Whether an engine that failed a request still generates; if not, it is left out from now on.

        Hundreds of trajectories notice the same death: they share one look at the engine.
        """
        self._statistics.engine_failures += 1
        if not engine.alive:
            return False
        check = self._health_checks.get(engine.url)
        if check is None:
            check = asyncio.ensure_future(engine.client.healthy(self.config.engine.health_timeout_seconds))
            self._health_checks[engine.url] = check
            check.add_done_callback(lambda _: self._health_checks.pop(engine.url, None))
        if await asyncio.shield(check):
            return True
        self._leave_out(engine, error)
        return False

    async def close(self) -> None:
        """Stop restarts that are under way, and close every client."""
        for task in list(self._restarts):
            task.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        for engine in self.router.engines:
            await engine.client.close()

    def _leave_out(self, engine: RoutedEngine, error: BaseException) -> None:
        """Take no more requests to an engine, and start its restart where somebody offered that."""
        if not engine.alive:
            return
        # Before it is marked: who waits for a place must learn that waiting makes sense.
        self.router.recovery_expected |= self._restart is not None
        self.router.mark_dead(engine)
        self._statistics.engines_lost += 1
        logger.warning("engine %s is lost, its trajectories continue elsewhere: %s", engine.url, error)
        if self._restart is not None:
            task = asyncio.create_task(self._bring_back(engine, self._restart))
            self._restarts.add(task)
            task.add_done_callback(self._restarts.discard)

    async def _bring_back(self, engine: RoutedEngine, restart: RestartEngine) -> None:
        try:
            url = await restart(engine.url)
            if url is not None:
                await self.replace(engine.url, url)
        except Exception:
            logger.exception("engine %s could not be restarted", engine.url)
        finally:
            self.router.recovery_expected = len(self._restarts) > 1
            self.router.wake()
