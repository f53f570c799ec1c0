"""One trajectory's dealings with engines: keeps its place while it lives, moves when the engine fails."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace

from megatron_retool.config import SamplingConfig
from megatron_retool.errors import OperationError
from megatron_retool.routed_experts import check_rows
from sglang_rollout.agent.trajectory_state import TrajectoryState
from sglang_rollout.engine.base import (
    EngineClientError,
    EngineRejected,
    GenerateRequest,
    GenerateResult,
    Steering,
    StopConditions,
)
from sglang_rollout.engine.pool import EnginePool
from sglang_rollout.engine.rollout_statistics import RolloutStatistics
from sglang_rollout.engine.routed_experts import trusted_rows
from sglang_rollout.engine.router import Lease, RoutedEngine

MAX_ENGINE_FAILURES = 8
"""Requests of one trajectory that may fail on live engines before the run ends."""
ABORT_REPEAT_SECONDS = 0.5
"""A request that is still on its way to the engine is not known there yet: it is aborted again and again."""


class RolloutError(OperationError):
    """Rollout cannot continue: an engine refuses a request, or fails again and again. The message names both."""


@dataclass
class RequestSettings:
    """How a stream's requests are made.

    Attributes:
        filtered_log_probs: of ``GenerateRequest``.
        routed_experts: every answer must carry rows.
    """

    sampling: SamplingConfig
    stop: StopConditions
    filtered_log_probs: bool
    routed_experts: bool = False
    steering: Steering = field(default_factory=Steering)


@dataclass
class InFlight:
    """What a stream has at the engines, and where it is counted.

    Attributes:
        statistics: requests and tokens.
        requests: engine of each request, by request id.
        tasks: one for each trajectory.
        pausing: nothing new is to begin.
    """

    statistics: RolloutStatistics
    requests: dict[str, RoutedEngine] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    pausing: bool = False


class Session:
    """Samples for one trajectory, on whichever engine can; ``close`` gives its place back.

    Args:
        engines: where.
        settings: how.
        in_flight: of the trajectory's stream.

    Attributes:
        failed: sampling raised, so that no trajectory can be expected to continue.
        sampling: ``generate`` is under way.
    """

    def __init__(self, engines: EnginePool, settings: RequestSettings, in_flight: InFlight) -> None:
        self._engines = engines
        self._settings = settings
        self._in_flight = in_flight
        self._lease: Lease | None = None
        self._request_id: str | None = None
        self._failures = 0
        self.failed = self.sampling = False

    async def generate(
        self,
        state: TrajectoryState,
        max_new_tokens: int,
        deadline: float,
        after: GenerateResult | None = None,
        top_log_probs: int = 0,
    ) -> GenerateResult:
        """Sample what follows the state's ids and what was sampled ``after`` them.

        What engines that failed have cost is taken back from ``state.seconds``: a trajectory that waits for a dead
        engine's successor must not be out of time when it has one.

        Raises:
            RolloutError: an engine refuses the request or has no routed experts, or requests fail again and again.
            NoEngineAvailable: all are dead.
        """
        router = self._engines.router
        request = GenerateRequest(
            input_ids=[*state.prompt_ids, *state.response_ids, *(after.output_ids if after else ())],
            max_new_tokens=max_new_tokens,
            sampling=self._settings.sampling,
            stop=self._settings.stop,
            seed=state.seed,
            top_log_probs=top_log_probs,
            filtered_log_probs=self._settings.filtered_log_probs,
            routed_experts_start=first_without_rows(state, after) if self._settings.routed_experts else None,
            steering=self._settings.steering,
        )
        avoid: RoutedEngine | None = None
        failing_since: float | None = None
        called = time.monotonic()
        if self._lease is not None and not self._lease.engine.alive:
            # It died, or was taken out of the run, while the trajectory was elsewhere.
            avoid, failing_since = self._lease.engine, called
            self.close()
        self.sampling = True
        try:
            while True:
                if self._lease is None:
                    self._lease = await router.acquire(state.group_id, state.length, avoid, state.timing.engine)
                    if self._in_flight.pausing:
                        state.timing = state.timing.plus(waiting=time.monotonic() - called)
                        return GenerateResult([], [], [], "abort")
                if failing_since is not None:
                    state.seconds -= time.monotonic() - failing_since
                router.grow(self._lease, state.length)
                attempt_began = time.monotonic()
                engine = self._lease.engine
                try:
                    try:
                        result = await engine.client.generate(request, on_start=self._begun, deadline_seconds=deadline)
                    finally:
                        self._begun(None)
                except EngineRejected as error:
                    raise RolloutError(
                        f"trajectory {state.group_id}/{state.index} ({len(state.prompt_ids)} prompt and "
                        f"{len(state.response_ids)} response tokens): {error}"
                    ) from error
                except EngineClientError as error:
                    self.close()
                    avoid, failing_since = engine, attempt_began
                    await self._judge(engine, state, error)
                    continue
                state.timing = state.timing.plus(
                    generation=time.monotonic() - attempt_began,
                    waiting=attempt_began - called,
                    engine=engine.number,
                )
                statistics = self._in_flight.statistics
                statistics.requests += 1
                statistics.sampled_tokens += len(result.output_ids)
                statistics.prompt_tokens += result.prompt_tokens
                statistics.cached_tokens += result.cached_tokens
                return with_trusted_rows(request, result, state, after, engine.url)
        except Exception:
            self.failed = True
            raise
        finally:
            self.sampling = False

    def close(self) -> None:
        """Give the place at the engine back."""
        if self._lease is not None:
            self._engines.router.release(self._lease)
            self._lease = None

    def _begun(self, request_id: str | None) -> None:
        """The engine knows the trajectory's request under this id now; None: under none."""
        requests = self._in_flight.requests
        if self._request_id is not None:
            engine = requests.pop(self._request_id, None)
            if engine is not None:
                engine.requests.discard(self._request_id)
        self._request_id = request_id
        if request_id is not None and self._lease is not None:
            requests[request_id] = self._lease.engine
            self._lease.engine.requests.add(request_id)

    async def _judge(self, engine: RoutedEngine, state: TrajectoryState, error: EngineClientError) -> None:
        """Decide whether a failure means that the engine is gone; raise where failing has become a habit."""
        if not await self._engines.still_alive(engine, error):
            return
        self._failures += 1
        if self._failures > MAX_ENGINE_FAILURES:
            raise RolloutError(
                f"trajectory {state.group_id}/{state.index} failed {self._failures} times on engines that are healthy; "
                f"the last failure: {error}"
            ) from error


def first_without_rows(state: TrajectoryState, after: GenerateResult | None) -> int:
    """The first token that a request for what follows both has to return the experts of."""
    known = state.routed_tokens()
    return known if after is None or after.routed_experts is None else known + len(after.routed_experts)


def with_trusted_rows(
    request: GenerateRequest, result: GenerateResult, state: TrajectoryState, after: GenerateResult | None, engine: str
) -> GenerateResult:
    """``result`` with rows that belong to its tokens and to the weights that sampled them, or with none.

    Raises:
        RolloutError: the answer is whole and has not the rows that were asked for.
    """
    start = request.routed_experts_start
    if start is None:
        return result
    rows, length = result.routed_experts, len(request.input_ids) + len(result.output_ids)
    problem = "no routed experts"
    if rows is not None and result.output_ids:
        try:
            check_rows(rows, length - 1 - start, "its answer")
            earlier = (after.weight_versions if after else []) + result.weight_versions
            return replace(
                result,
                routed_experts=trusted_rows(rows, _versions(state, earlier)[start:]),
                routed_experts_start=start,
            )
        except ValueError as error:
            problem = f"other routed experts than those of tokens {start} to {length - 2}: {error}"
    if result.finish_reason != "abort" and result.output_ids:
        raise RolloutError(
            f"engine {engine} answered with {problem}. learner.routing_replay=rollout needs an engine "
            "(rollout.engine.backend) that returns them: set it to none or old_log_probs"
        )
    return replace(result, routed_experts=None)


def _versions(state: TrajectoryState, sampled: list[int]) -> list[int]:
    """Of every token, -1 where none was sampled; also where an agent's columns do not line up just now."""
    own = state.weight_versions[: len(state.response_ids)]
    return [-1] * len(state.prompt_ids) + own + [-1] * (len(state.response_ids) - len(own)) + sampled
