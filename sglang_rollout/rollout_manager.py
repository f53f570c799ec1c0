"""Groups of trajectories from prompts: many agent loops at once over all engines.

    manager = RolloutManager(config, tokenizer, engine_urls, tools)
    async with contextlib.aclosing(manager.stream(prompts, config.rollout.train)) as groups:
        async for group in groups:      # as they complete; n trajectories, ordered by index
            ...

The stream takes ``Changes`` on its way (``await groups.asend(changes)`` in place of ``anext``): further prompts, which
begin at once, and groups that are not needed any more. Leaving the loop early ends what is unfinished: with
rollout.partial.enable it is paused, kept as token ids, and continues in the next training stream; otherwise it is
dropped. Tool calls that run longer than the stop waits are not made again: they run on, over several streams if need
be, and the stream in which they end continues with their results. Whatever an engine, a tool or an agent does, a
trajectory that was started and not dropped comes out exactly once, with a finish reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_retool.config import Config, SamplingConfig
from megatron_retool.trajectory import Trajectory
from sglang_rollout.agent.agents import is_task_agent, make_agent
from sglang_rollout.agent.loop import Agent
from sglang_rollout.agent.paused_groups import PausedGroup
from sglang_rollout.agent.trajectory_state import TrajectoryState
from sglang_rollout.agent.turn_glue import Tokenizer
from sglang_rollout.engine.base import Engine
from sglang_rollout.engine.configured import make_engine
from sglang_rollout.engine.pool import EnginePool, RestartEngine
from sglang_rollout.engine.rollout_statistics import RolloutStatistics
from sglang_rollout.engine.router import NoEngineAvailable
from sglang_rollout.gateway.sampler import PoolSampler
from sglang_rollout.groups import Changes, Group, GroupFactory, Purpose, ScheduledPrompt, unfinished
from sglang_rollout.session import ABORT_REPEAT_SECONDS, InFlight, RequestSettings, RolloutError, Session
from sglang_rollout.task_agents.agent import TaskAgent, TaskAgents
from tools.tool import ToolCaller

logger = logging.getLogger(__name__)

STOP_SECONDS = 6.0
"""How long a stream that is stopped waits for its agents."""
LINGERING_POLL_SECONDS = 0.2
MAX_AGENT_FAILURES = 16
"""Trajectories in a row that an agent's errors may end before the run ends."""
MAX_IDLE_RUNS = 4
"""Times in a row that an agent may come back without a token more and without having been asked to pause."""


_Place = tuple[int, int]
"""A trajectory's group id and index."""
Inbox = asyncio.Queue[Group | Changes | BaseException]
"""What a stream reads: its own groups, and the changes that somebody else puts there."""


@dataclass
class _Running:
    """A stream under way.

    Attributes:
        pending: groups that are not complete.
        tasks: of each group's trajectories, by group id.
        sessions: of each task, with the trajectory's group id and index.
        working: agents at work by group id. One of them may still be closing its tools, whose results belong to the
            trajectory, when that has its finish reason.
        ready: groups in which a trajectory has ended, changes that the caller makes meanwhile, or what ends the stream.
    """

    settings: RequestSettings
    in_flight: InFlight
    agent: Agent | TaskAgent
    pending: dict[int, Group] = field(default_factory=dict)
    tasks: dict[int, list[asyncio.Task[None]]] = field(default_factory=dict)
    sessions: dict[asyncio.Task[None], tuple[_Place, Session]] = field(default_factory=dict)
    working: Counter[int] = field(default_factory=Counter)
    ready: Inbox = field(default_factory=asyncio.Queue)

    def at_rest(self, group: Group) -> bool:
        return not self.working[group.group_id] and group.finished()


class RolloutManager:
    """Generates groups. One manager serves training and validation, in one event loop.

    Args:
        config: the run's configuration.
        tokenizer: the model's.
        engine_urls: base URLs of the engines, which serve the same weights.
        tools: opened for each trajectory.
        engine: makes the engines' clients; None takes rollout.engine.backend.
        restart_engine: brings a dead engine back while the others continue; None: it is left out.

    Attributes:
        engines: the engines, as rollout sees them.
        group_factory: makes groups of prompts.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        engine_urls: Sequence[str],
        tools: ToolCaller,
        *,
        engine: Engine | None = None,
        restart_engine: RestartEngine | None = None,
    ) -> None:
        self.config = config
        rollout = config.rollout
        self.agent = make_agent(config.rollout, config.data, tokenizer, tools)
        self.task_agents = TaskAgents(config, tokenizer, tools) if is_task_agent(config.rollout) else None
        self.statistics = RolloutStatistics()
        self.engines = EnginePool(engine or make_engine(config), engine_urls, rollout, self.statistics, restart_engine)
        self.group_factory = GroupFactory(rollout, max(2, len(tokenizer.get_vocab())))
        self._paused: list[Group] = []
        # Agents whose tools still ran when their stream stopped. They come to rest at the next turn.
        self._lingering: dict[_Place, asyncio.Task[None]] = {}
        self._failures_in_a_row = 0
        self._endless: _Running | None = None
        """The stream that has an inbox."""

    def idle_places(self, groups: Iterable[int], size: int) -> int:
        """Trajectories that engines have places for, beside those of the stream with an inbox.

        Args:
            groups: ids of its unfinished groups.
            size: trajectories of each that still waits in the inbox.
        """
        running = self._endless
        under_way = (
            size if running is None or group_id not in running.tasks else running.working[group_id]
            for group_id in groups
        )
        return self.engines.places - sum(under_way)

    @property
    def paused_group_ids(self) -> list[int]:
        """Groups that wait to be continued."""
        return [group.group_id for group in self._paused]

    def finish_step(self) -> list[PausedGroup]:
        """Count a training step for paused groups and drop those that are older than rollout.partial.max_age.

        Returns:
            What the others have so far, for ``restore_paused``; it stays as it is when they continue.
        """
        paused, self._paused = self._paused, []
        for group in paused:
            group.age += 1
            if group.age > self.config.rollout.partial.max_age:
                self.statistics.dropped_trajectories += group.size
                self._end_lingering(group.group_id)
                continue
            for state in group.states:
                state.age = group.age
            self._paused.append(group)
        return [group.paused() for group in self._paused]

    def restore_paused(self, groups: Iterable[PausedGroup], prompts: Iterable[ScheduledPrompt]) -> None:
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
            self._paused.append(self.group_factory.continued(rows[paused.group_id], paused))

    def drop_paused(self) -> int:
        """Forget paused groups; how many."""
        dropped, self._paused = self._paused, []
        for group in dropped:
            self._end_lingering(group.group_id)
        return len(dropped)

    async def generate_groups(
        self,
        prompts: Iterable[ScheduledPrompt],
        sampling: SamplingConfig,
        purpose: Purpose = "train",
    ) -> list[list[Trajectory]]:
        """All groups, in the order of ``prompts``; groups that were paused earlier come first."""
        rows = list(prompts)
        groups = {}
        async for group in self.stream(rows, sampling, purpose):
            groups[group[0].group_id] = group
        order = {row.group_id: position for position, row in enumerate(rows)}
        return [groups[key] for key in sorted(groups, key=lambda key: order.get(key, -1))]

    async def stream(
        self,
        prompts: Iterable[ScheduledPrompt],
        sampling: SamplingConfig,
        purpose: Purpose = "train",
        *,
        group_sizes: Mapping[int, int] | None = None,
        inbox: Inbox | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> AsyncGenerator[list[Trajectory], Changes | None]:
        """Yield each group of ``sampling.n`` trajectories when its last one is finished; take changes in return.

        Where rollout.partial.enable is set, a training stream first continues what an earlier one left unfinished.

        Args:
            group_sizes: trajectories of a group by its group id, where that is not ``sampling.n``.
            inbox: for changes while no group is yielded. Such a stream has no end: where nothing is under way it waits
                for the next change.
            on_end: called when a trajectory has ended and its group has not.

        Raises:
            RolloutError, NoEngineAvailable: after everything in flight has been stopped.
            ValueError: a group id occurs twice.
        """
        partial, trains = self.config.rollout.partial, purpose == "train"
        resume_paused = partial.enable and trains

        def new(rows: Iterable[ScheduledPrompt], sizes: Mapping[int, int]) -> list[Group]:
            return [self.group_factory.new(row, purpose, sizes.get(row.group_id, sampling.n)) for row in rows]

        groups = [*(self._take_paused() if resume_paused else []), *new(prompts, group_sizes or {})]
        running = _Running(
            # Validation samples are not trained on, so their probabilities need not be exact.
            RequestSettings(
                sampling,
                self.agent.stop,
                filtered_log_probs=trains,
                routed_experts=trains and self.config.learner.routing_replay == "rollout",
            ),
            InFlight(self.statistics if trains else RolloutStatistics()),
            self.agent,
            ready=asyncio.Queue() if inbox is None else inbox,
        )
        if inbox is not None:
            self._endless = running
        served = contextlib.AsyncExitStack()
        oldest = await self.engines.weight_version() if partial.mask_older_tokens and groups else None
        pending = running.pending
        try:
            if self.task_agents is not None:
                serving = self.task_agents.serving(
                    self._sampler(running), sampling, purpose, stop_strings=bool(self.agent.stop.strings)
                )
                running.agent = await served.enter_async_context(serving)
            self._begin(groups, running)
            while pending or inbox is not None:
                item = await running.ready.get()
                if isinstance(item, BaseException):
                    raise item
                if isinstance(item, Changes):
                    self._begin(new(item.prompts, item.group_sizes), running)
                    self._abort(item.abort, running)
                    continue
                # Trajectories that finish together are all in the queue before the first of them is looked at.
                complete = running.at_rest(item) and item.full()
                if complete and pending.pop(item.group_id, None) is not None:
                    changes = yield [row for state in item.states for row in state.to_trajectories(oldest)]
                    if changes is not None:
                        self._begin(new(changes.prompts, changes.group_sizes), running)
                        self._abort(changes.abort, running)
                elif on_end is not None:
                    on_end()
        finally:
            # What a task agent has so far cannot be kept: there is nothing to wait for.
            await self._stop(running, keep=resume_paused and self.task_agents is None)
            await served.aclose()
            if resume_paused:
                self._paused += pending.values()
                self.statistics.paused_trajectories += unfinished(pending.values())
            else:
                self.statistics.dropped_trajectories += sum(group.size for group in pending.values())

    async def replace_engine(self, old_url: str, new_url: str) -> None:
        """Send trajectories to ``new_url`` instead of ``old_url`` (a restarted engine that has the current weights)."""
        await self.engines.replace(old_url, new_url)

    async def close(self) -> None:
        """End agents whose tools still run, and close the engines' clients."""
        for task in self._lingering.values():
            task.cancel()
        await asyncio.gather(*self._lingering.values(), return_exceptions=True)
        await self.engines.close()

    async def __aenter__(self) -> RolloutManager:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def _sampler(self, running: _Running) -> PoolSampler:
        settings = running.settings
        return PoolSampler(
            self.engines,
            running.in_flight.statistics,
            filtered_log_probs=settings.filtered_log_probs,
            routed_experts=settings.routed_experts,
        )

    def _take_paused(self) -> list[Group]:
        taken, self._paused = self._paused, []
        self.statistics.resumed_trajectories += unfinished(taken)
        return taken

    def _begin(self, groups: Sequence[Group], running: _Running) -> None:
        for group in groups:
            if group.group_id in running.tasks:
                raise ValueError(f"group ids of a stream must be distinct, and {group.group_id} is there twice")
            running.pending[group.group_id], running.tasks[group.group_id] = group, []
        for group in groups:
            for state in list(group.states):
                if state.finish_reason is None or (state.group_id, state.index) in self._lingering:
                    self._start(group, state, running)
            if running.at_rest(group):
                # Its last trajectory finished while the stream before this one was being stopped, or since.
                self._rested(group, running)

    def _abort(self, group_ids: Iterable[int], running: _Running) -> None:
        """Drop groups; their places at the engines are free as soon as their agents have noticed."""
        for group_id in group_ids:
            group = running.pending.pop(group_id, None)
            if group is not None:
                self.statistics.dropped_trajectories += group.size
                for task in running.tasks[group_id]:
                    task.cancel()
                self._end_lingering(group_id)

    def _end_lingering(self, group_id: int) -> None:
        for place, task in self._lingering.items():
            if place[0] == group_id:
                task.cancel()

    def _start(self, group: Group, state: TrajectoryState, running: _Running) -> None:
        tasks = running.in_flight.tasks
        running.working[group.group_id] += 1
        session = Session(self.engines, running.settings, running.in_flight)
        task = asyncio.create_task(self._run(group, state, session, running))
        running.tasks[group.group_id].append(task)
        running.sessions[task] = (group.group_id, state.index), session
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def _fork(self, group: Group, running: _Running, state: TrajectoryState) -> None:
        group.states.append(state)
        self.statistics.forked_trajectories += 1
        self._start(group, state, running)

    def _rested(self, group: Group, running: _Running) -> None:
        """All trajectories of a group have ended: it is complete, or what forks left of its budget is started."""
        if group.branching is not None and not group.full() and not running.in_flight.pausing:
            for _ in range(group.branching.top_up()):
                fresh = self.group_factory.fresh_state(group, len(group.states))
                group.states.append(fresh)
                self._start(group, fresh, running)
        running.ready.put_nowait(group)

    async def _run(self, group: Group, state: TrajectoryState, session: Session, running: _Running) -> None:
        in_flight = running.in_flight
        generate = session.generate
        if group.branching is not None:
            fork = functools.partial(self._fork, group, running)
            generate = functools.partial(group.branching.generate, session.generate, fork)
        try:
            await self._no_longer_lingering((group.group_id, state.index), in_flight)
            finished, idle = state.finish_reason is not None, 0
            while not finished and not in_flight.pausing:
                length = len(state.response_ids)
                finished = await running.agent.run(state, generate, lambda: in_flight.pausing)
                state.check_contract(finished)
                if finished or in_flight.pausing:
                    break
                # An engine may end a request by itself: what is missing is sampled again.
                idle = 0 if len(state.response_ids) > length else idle + 1
                if idle == MAX_IDLE_RUNS:
                    raise RuntimeError("the agent's run returned False, and nothing asked it to pause")
                await asyncio.sleep(0)
            if not finished:
                return
            self._failures_in_a_row = 0
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise
            if session.failed or isinstance(error, NoEngineAvailable):
                running.ready.put_nowait(error)
                return
            self._abandon(state, error, running)
        except BaseException as error:
            running.ready.put_nowait(error)
            return
        finally:
            session.close()
            running.working[group.group_id] -= 1
        if running.at_rest(group):
            self._rested(group, running)
        else:
            running.ready.put_nowait(group)

    def _abandon(self, state: TrajectoryState, error: BaseException, running: _Running) -> None:
        """End the trajectory of an agent that failed with what it has; many in a row end the stream."""
        logger.error(
            "trajectory %d/%d ends: the agent raised %s",
            *(state.group_id, state.index, type(error).__name__),
            exc_info=(type(error), error, error.__traceback__),
        )
        state.end_abruptly(f"{type(error).__name__}: {error}"[:500])
        running.in_flight.statistics.failed_trajectories += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_AGENT_FAILURES:
            problem = (
                f"the agent (rollout.agent={self.config.rollout.agent}) failed on {self._failures_in_a_row} "
                f"trajectories in a row; on the last one: {type(error).__name__}: {error}"
            )
            running.ready.put_nowait(RolloutError(problem))

    def _rests(self, place: _Place, task: asyncio.Task[None]) -> None:
        del self._lingering[place]

    async def _no_longer_lingering(self, place: _Place, in_flight: InFlight) -> None:
        """Wait until an earlier stream's agent of this trajectory has come to rest, or this stream is stopped too."""
        lingering = self._lingering.get(place)
        while lingering is not None and not lingering.done() and not in_flight.pausing:
            await asyncio.wait({lingering}, timeout=LINGERING_POLL_SECONDS)

    async def _stop(self, running: _Running, keep: bool) -> None:
        """Bring the trajectories of a stream to rest; with ``keep``, those that were sampling keep what they have.

        Those that are not at rest after STOP_SECONDS: a request that an engine does not give back is cancelled and
        will be made again. Tool calls could have effects, so with ``keep`` they run on, and their agent comes to rest
        when they have ended.
        """
        in_flight = running.in_flight
        in_flight.pausing = True
        deadline = time.monotonic() + (STOP_SECONDS if keep else 0.0)
        while in_flight.tasks and time.monotonic() < deadline:
            aborts = [asyncio.create_task(engine.client.abort(rid)) for rid, engine in in_flight.requests.items()]
            if aborts:
                await asyncio.wait(aborts, timeout=ABORT_REPEAT_SECONDS)
            for abort in aborts:
                abort.cancel()
            await asyncio.gather(*aborts, return_exceptions=True)
            tasks = set(in_flight.tasks)
            if not tasks:
                break
            await asyncio.wait(tasks, timeout=ABORT_REPEAT_SECONDS)
        cancelled = []
        for task in list(in_flight.tasks):
            place, session = running.sessions[task]
            if keep and not session.sampling and place not in self._lingering:
                # Without its place at an engine, it cannot sample any more either.
                session.close()
                self._lingering[place] = task
                task.add_done_callback(functools.partial(self._rests, place))
            else:
                task.cancel()
                cancelled.append(task)
        await asyncio.gather(*cancelled, return_exceptions=True)
