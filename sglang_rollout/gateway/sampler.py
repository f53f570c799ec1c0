"""The gateway's way to the run's engines: a call is held, not failed, while engines sleep, die or change weights."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from sglang_rollout.agent.trajectory_state import MAX_EMPTY_ANSWERS, TrajectoryState, joined
from sglang_rollout.engine.base import (
    EngineClientError,
    EngineFailed,
    EngineRejected,
    GenerateResult,
    RankedText,
    RankingClient,
)
from sglang_rollout.engine.pool import EnginePool
from sglang_rollout.engine.rollout_statistics import RolloutStatistics
from sglang_rollout.gateway.interface import TurnRequest
from sglang_rollout.session import (
    ABORT_REPEAT_SECONDS,
    MAX_ENGINE_FAILURES,
    InFlight,
    RequestSettings,
    RolloutError,
    Session,
)


class PoolSampler:
    """Samples turns on whichever engine has a place. All methods belong to one event loop.

    A request that ``pause`` or the engine itself interrupts continues from what it has, and the call that waits for it
    notices nothing.

    Args:
        engines: where.
        statistics: counts requests and tokens.
        filtered_log_probs: of ``GenerateRequest``.
        routed_experts: every answer must carry rows.
    """

    def __init__(
        self,
        engines: EnginePool,
        statistics: RolloutStatistics,
        *,
        filtered_log_probs: bool = False,
        routed_experts: bool = False,
    ) -> None:
        self._engines = engines
        self._filtered_log_probs = filtered_log_probs
        self._routed_experts = routed_experts
        self._in_flight = InFlight(statistics)
        self._open = asyncio.Event()
        self._open.set()
        self._pauses = 0

    async def pause(self) -> None:
        """Hold all calls, and end the engines' requests. Engines may sleep when this returns."""
        self._open.clear()
        self._pauses += 1
        self._in_flight.pausing = True
        while requests := dict(self._in_flight.requests):
            for request_id, engine in requests.items():
                # One that cannot be reached has no request that is worth ending.
                with contextlib.suppress(EngineClientError):
                    await engine.client.abort(request_id)
            again = time.monotonic() + ABORT_REPEAT_SECONDS
            while self._in_flight.requests and time.monotonic() < again:
                await asyncio.sleep(0.005)

    def resume(self) -> None:
        """Let calls continue."""
        self._in_flight.pausing = False
        self._open.set()

    async def generate(self, state: TrajectoryState, request: TurnRequest) -> GenerateResult:
        """See ``interface.Sampler``."""
        settings = RequestSettings(
            request.sampling, request.stop, self._filtered_log_probs, self._routed_experts, request.steering
        )
        sampled: GenerateResult | None = None
        work = state.copy()
        began, empty = time.monotonic(), 0

        def left() -> float:
            return request.deadline_seconds - (time.monotonic() - began + work.seconds)

        try:
            while True:
                await self._opened(work)
                pauses = self._pauses
                known = 0 if sampled is None else len(sampled.output_ids)
                session = Session(self._engines, settings, self._in_flight)
                try:
                    result = await session.generate(work, request.max_new_tokens - known, max(left(), 0.001))
                finally:
                    session.close()
                if request.steering.grammar is not None and result.finish_reason == "abort" and left() > 0:
                    # A grammar begins with the answer: what is cut off is not gone on with.
                    result = GenerateResult([], [], [], "abort")
                work.append_sampled(result)
                sampled = joined(sampled, result)
                if result.finish_reason != "abort" or left() <= 0:
                    return sampled
                if len(sampled.output_ids) >= request.max_new_tokens:
                    return joined(sampled, GenerateResult([], [], [], "length"))
                # A pause ended it, or the engine by itself: what is missing is sampled now.
                empty = 0 if result.output_ids or pauses != self._pauses else empty + 1
                if empty == MAX_EMPTY_ANSWERS:
                    which = f"trajectory {state.group_id}/{state.index}"
                    raise RolloutError(f"{which}: the engine ended a request {empty} times without a token")
                await asyncio.sleep(0)
        finally:
            # Also of a call that is given up: time in which it was held is not its agent's.
            state.seconds, state.timing = work.seconds, work.timing

    async def rank(self, input_ids: Sequence[int], count: int) -> RankedText:
        """See ``interface.Ranker``."""
        await self._open.wait()
        router, failures, avoid = self._engines.router, 0, None
        while True:
            lease = await router.acquire(0, len(input_ids), avoid)
            avoid = lease.engine
            try:
                if not isinstance(avoid.client, RankingClient):
                    raise RolloutError("rollout.engine.backend gives no log-probs of a text (RankingClient)")
                return await avoid.client.rank(input_ids, count)
            except (EngineRejected, EngineFailed) as error:
                raise RolloutError(f"a text of {len(input_ids)} tokens: {error}") from error
            except EngineClientError as error:
                failures += await self._engines.still_alive(avoid, error)
                if failures > MAX_ENGINE_FAILURES:
                    raise RolloutError(f"{failures} requests failed on engines that are healthy: {error}") from error
            finally:
                router.release(lease)

    async def _opened(self, work: TrajectoryState) -> None:
        """Wait until calls may continue, which takes nothing of the time of ``work``."""
        held = time.monotonic()
        try:
            await self._open.wait()
        finally:
            work.seconds -= time.monotonic() - held
