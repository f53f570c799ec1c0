"""The gateway's way to the run's engines: a call is held, not failed, while engines sleep, die or change weights."""

from __future__ import annotations

import asyncio
import contextlib
import time

from sglang_rollout.agent.loop import TrajectoryState
from sglang_rollout.engine.base import EngineClientError, GenerateResult
from sglang_rollout.engine.pool import EnginePool
from sglang_rollout.gateway.interface import TurnRequest
from sglang_rollout.gateway.session_tree import joined
from sglang_rollout.rollout_statistics import RolloutStatistics
from sglang_rollout.session import InFlight, RequestSettings, Session


class PoolSampler:
    """Samples turns on whichever engine has a place. All methods belong to one event loop.

    A request that ``pause`` interrupts goes on from what it has, and the call that waits for it notices nothing.

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
        for request_id, engine in list(self._in_flight.requests.items()):
            # One that cannot be reached has no request that is worth ending.
            with contextlib.suppress(EngineClientError):
                await engine.client.abort(request_id)
        while self._in_flight.requests:
            await asyncio.sleep(0.005)

    def resume(self) -> None:
        """Let calls go on."""
        self._in_flight.pausing = False
        self._open.set()

    async def generate(self, state: TrajectoryState, request: TurnRequest) -> GenerateResult:
        """See ``interface.Sampler``."""
        settings = RequestSettings(request.sampling, request.stop, self._filtered_log_probs, self._routed_experts)
        sampled: GenerateResult | None = None
        work = state.copy()
        began = time.monotonic()
        while True:
            held = time.monotonic()
            await self._open.wait()
            work.seconds -= time.monotonic() - held
            pauses = self._pauses
            known = 0 if sampled is None else len(sampled.output_ids)
            spent = time.monotonic() - began + work.seconds
            session = Session(self._engines, settings, self._in_flight)
            try:
                result = await session.generate(
                    work, request.max_new_tokens - known, max(request.deadline_seconds - spent, 0.001)
                )
            finally:
                session.close()
            work.append_sampled(result)
            sampled = joined(sampled, result)
            state.seconds, state.timing = work.seconds, work.timing
            if result.finish_reason != "abort" or pauses == self._pauses:
                return sampled
            if len(sampled.output_ids) >= request.max_new_tokens:
                return joined(sampled, GenerateResult([], [], [], "length"))
