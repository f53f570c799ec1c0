"""Groups of trajectories from prompts: many agent loops at once over all engines.

    manager = RolloutManager(config, tokenizer, engine_urls, tools)
    async with contextlib.aclosing(manager.stream(prompts, config.rollout.train)) as groups:
        async for group in groups:      # as they complete; n trajectories, ordered by index
            ...

Leaving the loop early ends what is unfinished: with rollout.partial.enable it is paused, kept as token ids, and goes
on in the next training stream; otherwise it is dropped. Whatever an engine or a tool does, a trajectory that was
started and not dropped comes out exactly once, with a finish reason.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from megatron_retool.config import Config, SamplingConfig, ValSamplingConfig
from megatron_retool.trajectory import Trajectory
from sglang_rollout.agent.agents import make_agent
from sglang_rollout.agent.branching import EntropyBranching
from sglang_rollout.agent.loop import TrajectoryState
from sglang_rollout.agent.paused_groups import PausedGroup
from sglang_rollout.agent.turn_glue import Tokenizer
from sglang_rollout.engine.client import (
    EngineClient,
    EngineClientError,
    EngineRejected,
    GenerateRequest,
    GenerateResult,
)
from sglang_rollout.engine.router import Engine, Lease, Router
from tools.tool import ToolCaller

logger = logging.getLogger(__name__)

ABORT_REPEAT_SECONDS = 0.5
STOP_SECONDS = 6.0
MAX_ENGINE_FAILURES = 8
"""Requests of one trajectory that may fail on live engines before the run is told."""


class RolloutError(RuntimeError):
    """Rollout cannot go on: an engine refuses a request, or fails again and again. The message names both."""


class PromptRow(Protocol):
    """A prompt as the data room yields it."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def group_id(self) -> int: ...
    @property
    def extra_info(self) -> Mapping[str, Any]: ...


@dataclass
class RolloutStatistics:
    """Counts since the manager was made, under the names they have as metrics (rollout/…).

    Requests and tokens are those of training streams: validation may run at the same time.
    """

    sampled_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    requests: int = 0
    engine_failures: int = 0
    engines_lost: int = 0
    resumed_trajectories: int = 0
    paused_trajectories: int = 0
    dropped_trajectories: int = 0
    forked_trajectories: int = 0

    def metrics(self) -> dict[str, float]:
        return {f"rollout/{name}": float(value) for name, value in vars(self).items()}


@dataclass(frozen=True)
class RolloutProgress:
    """Where a stream stands: trajectories finished and started, groups complete."""

    finished: int
    started: int
    groups: int


@dataclass
class _Group:
    """The trajectories of one prompt."""

    group_id: int
    states: list[TrajectoryState]
    sampling: SamplingConfig
    size: int
    """Trajectories that the group will have; with branching it starts with fewer."""
    branching: EntropyBranching | None = None
    age: int = 0

    def at_rest(self) -> bool:
        return all(state.finish_reason is not None for state in self.states)

    def complete(self) -> bool:
        return self.at_rest() and len(self.states) >= self.size


@dataclass
class _Running:
    """What one stream has in flight, and where its requests are counted."""

    statistics: RolloutStatistics
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    requests: dict[str, Engine] = field(default_factory=dict)
    pausing: bool = False
    ready: asyncio.Queue[_Group | BaseException] = field(default_factory=asyncio.Queue)
    finished: int = 0


RestartEngine = Callable[[str], Awaitable[str | None]]
"""Called with the URL of an engine that died: restart it, synchronise its weights, return its URL (None: given up)."""


class RolloutManager:
    """Generates groups. One manager serves training and validation, in one event loop.

    Args:
        config: the run's configuration.
        tokenizer: the model's.
        engine_urls: base URLs of the engines, which serve the same weights.
        tools: opened for each trajectory.
        restart_engine: brings a dead engine back while the others go on; None: it is left out.
        context_length: of the engines; None takes rollout.engine.context_length.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        engine_urls: Sequence[str],
        tools: ToolCaller,
        *,
        restart_engine: RestartEngine | None = None,
        context_length: int | None = None,
    ) -> None:
        if not engine_urls:
            raise ValueError("rollout needs at least one engine URL")
        self.config = config
        rollout = config.rollout
        self.agent = make_agent(config, tokenizer, tools, context_length)
        self.router = Router(
            [self._client(url) for url in engine_urls],
            rollout.max_concurrent_trajectories,
            rollout.engine.max_total_tokens,
        )
        self.statistics = RolloutStatistics()
        self._vocabulary_size = max(2, len(tokenizer.get_vocab()))
        self._restart_engine = restart_engine
        self._restarts: set[asyncio.Task[None]] = set()
        self._health_checks: dict[str, asyncio.Future[bool]] = {}
        self._paused: list[_Group] = []

    @property
    def paused_groups(self) -> int:
        """Groups that wait to be continued."""
        return len(self._paused)

    def finish_step(self) -> list[PausedGroup]:
        """Count a training step for paused groups and drop those that are older than rollout.partial.max_age.

        Returns:
            What the others have so far, for ``restore_paused``; it stays as it is when they go on.
        """
        paused, self._paused = self._paused, []
        for group in paused:
            group.age += 1
            if group.age > self.config.rollout.partial.max_age:
                self.statistics.dropped_trajectories += group.size
                continue
            for state in group.states:
                state.age = group.age
            self._paused.append(group)
        return [
            PausedGroup(
                group.group_id,
                group.size,
                group.age,
                [state.copy() for state in group.states],
                None if group.branching is None else group.branching.state_dict(),
            )
            for group in self._paused
        ]

    def restore_paused(self, groups: Iterable[PausedGroup], prompts: Iterable[PromptRow]) -> None:
        """Let the next training stream continue ``groups`` that a stopped run had paused.

        Args:
            prompts: the prompt of each group, in any order.

        Raises:
            ValueError: a group has no prompt.
        """
        rows = {row.group_id: row for row in prompts}
        for paused in groups:
            if paused.group_id not in rows:
                raise ValueError(f"the prompt of the paused group {paused.group_id} is missing")
            self._paused.append(self._continued_group(rows[paused.group_id], paused))

    async def generate_groups(
        self,
        prompts: Iterable[PromptRow],
        sampling: SamplingConfig,
        on_progress: Callable[[RolloutProgress], None] | None = None,
    ) -> list[list[Trajectory]]:
        """All groups, in the order of ``prompts``; groups that were paused earlier come first."""
        rows = list(prompts)
        groups = {}
        async for group in self.stream(rows, sampling, on_progress=on_progress):
            groups[group[0].group_id] = group
        order = {row.group_id: position for position, row in enumerate(rows)}
        return [groups[key] for key in sorted(groups, key=lambda key: order.get(key, -1))]

    async def stream(
        self,
        prompts: Iterable[PromptRow],
        sampling: SamplingConfig,
        *,
        group_sizes: Mapping[int, int] | None = None,
        on_progress: Callable[[RolloutProgress], None] | None = None,
        resume_paused: bool | None = None,
    ) -> AsyncIterator[list[Trajectory]]:
        """Yield each group of ``sampling.n`` trajectories when its last one is finished.

        Args:
            group_sizes: trajectories of a group by its group id, where that is not ``sampling.n``.
            resume_paused: continue trajectories that an earlier stream left unfinished, before new ones. None: in
                training streams (validation sampling is a ValSamplingConfig), where rollout.partial.enable is set.

        Raises:
            RolloutError, NoEngineAvailable: after everything in flight has been stopped.
        """
        partial = self.config.rollout.partial
        if resume_paused is None:
            resume_paused = partial.enable and not isinstance(sampling, ValSamplingConfig)
        groups = self._take_paused() if resume_paused else []
        sizes = group_sizes or {}
        groups += [self._new_group(row, sampling, sizes.get(row.group_id, sampling.n)) for row in prompts]
        taken = [group.group_id for group in groups]
        if len(set(taken)) != len(taken):
            raise ValueError("group ids of a stream must be distinct")
        validates = isinstance(sampling, ValSamplingConfig)
        running = _Running(RolloutStatistics() if validates else self.statistics)
        total = sum(group.size for group in groups)
        oldest = await self._current_version() if partial.mask_older_tokens and groups else None
        pending = {group.group_id: group for group in groups}
        try:
            for group in groups:
                if group.at_rest():
                    # Its last trajectory finished while the stream before this one was being stopped.
                    self._rested(group, running)
                for state in list(group.states):
                    if state.finish_reason is None:
                        self._start(group, state, running)
                    else:
                        running.finished += 1
            while pending:
                item = await running.ready.get()
                if isinstance(item, BaseException):
                    raise item
                if on_progress is not None:
                    on_progress(RolloutProgress(running.finished, total, len(groups) - len(pending) + item.complete()))
                # Trajectories that finish together are all in the queue before the first of them is looked at.
                if item.complete() and pending.pop(item.group_id, None) is not None:
                    yield [state.to_trajectory(oldest) for state in item.states]
        finally:
            await self._stop(running, keep=resume_paused)
            if resume_paused:
                self._paused += pending.values()
                self.statistics.paused_trajectories += _unfinished(pending.values())
            else:
                self.statistics.dropped_trajectories += sum(group.size for group in pending.values())

    async def replace_engine(self, old_url: str, new_url: str) -> None:
        """Send trajectories to ``new_url`` instead of ``old_url`` (a restarted engine that has the current weights)."""
        for engine in self.router.engines:
            if engine.url == old_url:
                await engine.client.close()
        self.router.replace(old_url, self._client(new_url))

    def drop_paused(self) -> int:
        """Forget paused groups; how many."""
        count, self._paused = len(self._paused), []
        return count

    async def close(self) -> None:
        for task in list(self._restarts):
            task.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        for engine in self.router.engines:
            await engine.client.close()

    async def __aenter__(self) -> RolloutManager:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def _client(self, url: str) -> EngineClient:
        rollout = self.config.rollout
        return EngineClient(url, retries=rollout.request_retries, timeout_seconds=rollout.request_timeout_seconds)

    def _new_group(self, row: PromptRow, sampling: SamplingConfig, size: int) -> _Group:
        prompt_ids = [int(token) for token in row.prompt_ids]
        extra_info = dict(row.extra_info)
        for name in ("uid", "data_source", "ground_truth"):
            if hasattr(row, name):
                extra_info.setdefault(name, getattr(row, name))
        branching = self.config.rollout.branching
        forks = branching.enable and not isinstance(sampling, ValSamplingConfig)
        states = [
            TrajectoryState(prompt_ids, row.group_id, index, extra_info, self._seed(row.group_id, index))
            for index in range(min(size, branching.initial_rollouts) if forks else size)
        ]
        group = _Group(row.group_id, states, sampling, size)
        if forks:
            seed = self._seed(row.group_id, -1) or row.group_id
            group.branching = EntropyBranching(branching, size, self._vocabulary_size, seed)
        return group

    def _seed(self, group_id: int, index: int) -> int | None:
        """Sampling seed of a trajectory; the engine mixes the token's position into it."""
        base = self.config.rollout.engine.random_seed
        if base is None:
            return None
        digest = hashlib.blake2b(f"{base}/{group_id}/{index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def _continued_group(self, row: PromptRow, paused: PausedGroup) -> _Group:
        group = self._new_group(row, self.config.rollout.train, paused.size)
        first = group.states[0]
        group.age = paused.age
        group.states = [
            replace(state.copy(), prompt_ids=first.prompt_ids, extra_info=first.extra_info) for state in paused.states
        ]
        if paused.branching is None:
            group.branching = None
        elif group.branching is not None:
            group.branching.load_state_dict(paused.branching)
        else:  # The resumed run does not branch: what forks would have filled starts from the prompt.
            group.states += [self._fresh_state(group, index) for index in range(len(group.states), group.size)]
        return group

    def _fresh_state(self, group: _Group, index: int) -> TrajectoryState:
        first = group.states[0]
        seed = self._seed(group.group_id, index)
        return TrajectoryState(first.prompt_ids, group.group_id, index, first.extra_info, seed)

    def _take_paused(self) -> list[_Group]:
        taken, self._paused = self._paused, []
        self.statistics.resumed_trajectories += _unfinished(taken)
        return taken

    def _start(self, group: _Group, state: TrajectoryState, running: _Running) -> None:
        task = asyncio.create_task(self._run(group, state, running))
        running.tasks.add(task)
        task.add_done_callback(running.tasks.discard)

    def _rested(self, group: _Group, running: _Running) -> None:
        """All trajectories of a group have ended: it is complete, or what forks left of its budget is started."""
        if group.branching is not None and not group.complete() and not running.pausing:
            for _ in range(group.branching.top_up()):
                fresh = self._fresh_state(group, len(group.states))
                group.states.append(fresh)
                self._start(group, fresh, running)
        running.ready.put_nowait(group)

    async def _run(self, group: _Group, state: TrajectoryState, running: _Running) -> None:
        session = _Session(self, group.sampling, running)

        def fork(state: TrajectoryState) -> None:
            group.states.append(state)
            self.statistics.forked_trajectories += 1
            self._start(group, state, running)

        async def generate(state: TrajectoryState, max_new_tokens: int, deadline: float) -> GenerateResult:
            if group.branching is None:
                return await session.generate(state, max_new_tokens, deadline)
            return await group.branching.generate(session.generate, fork, state, max_new_tokens, deadline)

        try:
            if await self.agent.run(state, generate, lambda: running.pausing):
                running.finished += 1
                if group.at_rest():
                    self._rested(group, running)
                else:
                    running.ready.put_nowait(group)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            running.ready.put_nowait(error)
        finally:
            session.close()

    async def _stop(self, running: _Running, keep: bool) -> None:
        """Bring every trajectory of a stream to rest; with ``keep``, those that were sampling keep what they have.

        Who is not at rest after STOP_SECONDS (a slow tool, an engine that does not answer) is cancelled: the request
        or the calls that it waits for will be made again.
        """
        running.pausing = True
        deadline = time.monotonic() + (STOP_SECONDS if keep else 0.0)
        while running.tasks and time.monotonic() < deadline:
            # A request that is still on its way to the engine is not known there yet: hence again and again.
            aborts = [asyncio.create_task(engine.client.abort(rid)) for rid, engine in running.requests.items()]
            if aborts:
                await asyncio.wait(aborts, timeout=ABORT_REPEAT_SECONDS)
            for abort in aborts:
                abort.cancel()
            await asyncio.gather(*aborts, return_exceptions=True)
            tasks = set(running.tasks)
            if not tasks:
                break
            await asyncio.wait(tasks, timeout=ABORT_REPEAT_SECONDS)
        for task in list(running.tasks):
            task.cancel()
        await asyncio.gather(*running.tasks, return_exceptions=True)

    async def _current_version(self) -> int:
        alive = [engine for engine in self.router.engines if engine.alive]
        return min(await asyncio.gather(*(engine.client.weight_version() for engine in alive)))

    async def still_alive(self, engine: Engine, error: BaseException) -> bool:
        """Whether an engine that failed a request still generates; if not, it is left out from now on.

        Hundreds of trajectories notice the same death: they share one look at the engine.
        """
        if not engine.alive:
            return False
        check = self._health_checks.get(engine.url)
        if check is None:
            timeout = self.config.rollout.engine.health_timeout_seconds
            check = asyncio.ensure_future(engine.client.healthy(timeout))
            self._health_checks[engine.url] = check
            check.add_done_callback(lambda _: self._health_checks.pop(engine.url, None))
        if await asyncio.shield(check):
            return True
        self._engine_lost(engine, error)
        return False

    def _engine_lost(self, engine: Engine, error: BaseException) -> None:
        """Leave an engine out, and start its restart where somebody offered that."""
        if not engine.alive:
            return
        # Before it is marked: who waits for a place must learn that waiting makes sense.
        self.router.recovery_expected |= self._restart_engine is not None
        self.router.mark_dead(engine)
        self.statistics.engines_lost += 1
        logger.warning("engine %s is lost, its trajectories go on elsewhere: %s", engine.url, error)
        if self._restart_engine is not None:
            task = asyncio.create_task(self._bring_back(engine))
            self._restarts.add(task)
            task.add_done_callback(self._restarts.discard)

    async def _bring_back(self, engine: Engine) -> None:
        assert self._restart_engine is not None
        try:
            url = await self._restart_engine(engine.url)
            if url is not None:
                await self.replace_engine(engine.url, url)
        except Exception:
            logger.exception("engine %s could not be restarted", engine.url)
        finally:
            self.router.recovery_expected = len(self._restarts) > 1
            self.router.wake()


def _unfinished(groups: Iterable[_Group]) -> int:
    return sum(state.finish_reason is None for group in groups for state in group.states)


class _Session:
    """One trajectory's dealings with engines: keeps its place while it lives, moves when the engine fails."""

    def __init__(self, manager: RolloutManager, sampling: SamplingConfig, running: _Running) -> None:
        self._manager = manager
        self._sampling = sampling
        self._running = running
        self._lease: Lease | None = None
        self._failures = 0

    async def generate(
        self,
        state: TrajectoryState,
        max_new_tokens: int,
        deadline: float,
        extra_ids: Sequence[int] = (),
        top_log_probs: int = 0,
    ) -> GenerateResult:
        """Sample what follows the state's ids and ``extra_ids``, on whichever engine can."""
        manager = self._manager
        avoid: Engine | None = None
        while True:
            if self._lease is None:
                self._lease = await manager.router.acquire(state.group_id, state.length, avoid)
                if self._running.pausing:
                    return GenerateResult([], [], [], "abort")
            manager.router.grow(self._lease, state.length)
            engine = self._lease.engine
            try:
                result = await self._request(engine, state, max_new_tokens, deadline, extra_ids, top_log_probs)
            except EngineRejected as error:
                raise RolloutError(
                    f"trajectory {state.group_id}/{state.index} ({len(state.prompt_ids)} prompt and "
                    f"{len(state.response_ids)} response tokens): {error}"
                ) from error
            except EngineClientError as error:
                self.close()
                avoid = engine
                await self._judge(engine, state, error)
                continue
            statistics = self._running.statistics
            statistics.requests += 1
            statistics.sampled_tokens += len(result.output_ids)
            statistics.prompt_tokens += result.prompt_tokens
            statistics.cached_tokens += result.cached_tokens
            return result

    def close(self) -> None:
        """Give the place at the engine back."""
        if self._lease is not None:
            self._manager.router.release(self._lease)
            self._lease = None

    async def _request(
        self,
        engine: Engine,
        state: TrajectoryState,
        max_new_tokens: int,
        deadline: float,
        extra_ids: Sequence[int],
        top_log_probs: int,
    ) -> GenerateResult:
        request = GenerateRequest(
            input_ids=[*state.prompt_ids, *state.response_ids, *extra_ids],
            max_new_tokens=max_new_tokens,
            sampling=self._sampling,
            stop=self._manager.agent.stop,
            seed=state.seed,
            top_log_probs=top_log_probs,
            # Nobody trains on validation samples, so their probabilities need not be exact.
            filtered_log_probs=not isinstance(self._sampling, ValSamplingConfig),
        )
        requests = self._running.requests
        current: list[str] = []

        def started(rid: str) -> None:
            for old in current:
                requests.pop(old, None)
            current[:] = [rid]
            requests[rid] = engine

        try:
            return await engine.client.generate(request, on_start=started, deadline_seconds=deadline)
        finally:
            for rid in current:
                requests.pop(rid, None)

    async def _judge(self, engine: Engine, state: TrajectoryState, error: EngineClientError) -> None:
        """Decide whether a failure means that the engine is gone; raise where failing has become a habit."""
        manager = self._manager
        manager.statistics.engine_failures += 1
        if not await manager.still_alive(engine, error):
            return
        self._failures += 1
        if self._failures > MAX_ENGINE_FAILURES:
            raise RolloutError(
                f"trajectory {state.group_id}/{state.index} failed {self._failures} times on engines that are healthy; "
                f"the last failure: {error}"
            ) from error
