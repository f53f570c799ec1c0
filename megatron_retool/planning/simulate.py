"""Discrete-event simulation of rollout: engines, tools, sandbox workers, and what is done about the long tail.

Engines decode all their trajectories in step, at a speed that depends on how many there are and how long their
contexts have become (``engine_model``, ``simulated_engine``); tools take random times on a limited number of workers; a
step ends when enough groups are complete.  Thousands of responses take seconds, and the same seed gives the same
numbers.

What becomes of the groups that are unfinished when enough are complete:

    wait      as many were started as are needed: everybody waits for the last one
    drop      more were started; the rest is aborted, and long responses are the ones that get lost
    pause     more were started; the rest is kept as token ids and continues in the next step (partial rollout)
    stream    nothing stops: learner and engines have GPUs of their own (asynchronous)

Where dynamic sampling discards groups (``Workload.kept_groups``), the training loop's own ``Refill`` says how many are
started and which are the batch; "rounds" is "wait" as it would be if each refill waited for the one before.

Of asynchronous training with a bound on age (``trainer.mode: async``), the training loop's own ``GroupBuffer`` says
when a group may start and which groups a step takes: ``take_steps``.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_retool.algorithms.group_buffer import GroupBuffer
from megatron_retool.algorithms.refill import KeepRate, Refill
from megatron_retool.planning.engine_model import EngineModel
from megatron_retool.planning.simulated_engine import Response, SimulatedEngine, SimulatedGroup
from megatron_retool.planning.workload import Workload

TAIL_SHARE = 0.1
"""The tail of a step is the time that its last tenth of responses takes."""

KNOWN_GROUPS = 1000
"""Groups that the keep rate is known from: the simulation's estimate is the true share."""

_ENGINE, _TOOL = 0, 1


@dataclass(frozen=True)
class StepResult:
    """One simulated step.

    Attributes:
        seconds: from the first request to the last group that was needed.
        tail_seconds: of those, after nine tenths of the step's responses were complete.
        sampled_tokens: decoded in the step.
        trained_tokens: prompt and response tokens of the groups that the learner gets.
        stale_tokens: response tokens of those groups that older weights sampled.
        dropped_tokens: sampled tokens thrown away at the end of the step.
        mean_length: mean response of the groups that the learner gets.
        clip_ratio: share of those at the length limit.
        mean_batch: sequences decoded together, over engines and decode steps.
        idle: share of engine time with nothing to decode or prefill.
        paused: responses kept for the next step.
        tool_wait_seconds: mean time that a call waited for a sandbox worker.
    """

    seconds: float
    tail_seconds: float
    sampled_tokens: float
    trained_tokens: float
    stale_tokens: float
    dropped_tokens: float
    mean_length: float
    clip_ratio: float
    mean_batch: float
    idle: float
    paused: float
    tool_wait_seconds: float


def mean_result(results: Sequence[StepResult]) -> StepResult:
    """Figure by figure."""
    return StepResult(**{name: float(np.mean([vars(result)[name] for result in results])) for name in vars(results[0])})


class RolloutSimulation:
    """Engines, sandbox and trajectories that live through several steps.

    Args:
        model: one engine.
        engines: how many.
        workload: what a step needs.
        seed: of lengths, calls and latencies.
        expected: take the expected lengths (quantiles) instead of a sample; groups are as alike as a sample's.
    """

    def __init__(
        self, model: EngineModel, engines: int, workload: Workload, seed: int = 0, expected: bool = False
    ) -> None:
        self.model = model
        self.workload = workload
        self.expected = expected
        self.now = 0.0
        self._rng = np.random.default_rng(seed)
        slots = model.concurrency(workload.expected_context)
        self._engines = [SimulatedEngine(model, slots) for _ in range(engines)]
        self._queue: deque[Response] = deque()
        self._events: list[tuple[float, int, int, SimulatedEngine | Response, int]] = []
        self._counter = 0
        self._workers = workload.sandbox_workers
        self._waiting_calls: deque[tuple[Response, float]] = deque()
        self._latencies: Iterator[float] = iter(())
        self._open: dict[int, SimulatedGroup] = {}
        self._complete: deque[SimulatedGroup] = deque()
        """Groups with a signal that no step has taken, as they were completed."""
        self._decided: list[SimulatedGroup] = []
        """Groups that were completed since somebody looked."""
        self._started = 0
        self._finish_times: list[float] = []
        self._tool_wait = 0.0
        self._tool_calls = 0

    def start_groups(self, count: int) -> None:
        """Queue ``count`` new groups behind what waits already."""
        workload, size = self.workload, self.workload.group_size
        if count < 1:
            return
        if self.expected:
            lengths = workload.lengths.expected(self._rng, count, size)
        else:
            lengths = workload.lengths.sample(self._rng, count, size)
        # A very short response has no room for its calls.
        room = lengths // max(8.0, workload.lengths.limit / 256)
        calls = np.minimum(self._rng.poisson(workload.tool_calls, (count, size)), room).astype(int)
        for row, numbers in zip(lengths.tolist(), calls.tolist(), strict=True):
            kept = workload.kept_groups
            group = SimulatedGroup(size, self._started, kept >= 1.0 or self._rng.random() < kept)
            self._started += 1
            self._open[id(group)] = group
            for length, number in zip(row, numbers, strict=True):
                result = min(workload.tool_result_tokens, length / (2 * number)) if number else 0.0
                trajectory = Response(group, length, number, workload.prompt_tokens, result)
                group.members.append(trajectory)
                self._queue.append(trajectory)

    def collect(
        self, needed: int, unfinished: str = "wait", max_age: int = 1, over_sampling: float = 1.0
    ) -> StepResult:
        """Run until ``needed`` groups with a signal are complete, then treat the rest as ``unfinished`` says.

        What is missing is started first, beside what an earlier step or ``start_groups`` has started.

        Args:
            unfinished: "wait", "rounds", "drop", "pause" or "stream"; see the module.
            max_age: steps that a paused group may wait before it is dropped.
            over_sampling: groups under way for each that is expected to be needed.
        """
        begin = self._begin_step()
        chosen = self._rounds(needed) if unfinished == "rounds" else self._refilled(needed, unfinished, over_sampling)
        for engine in self._engines:
            engine.advance(self.now)
        result = self._result(chosen, begin)
        dropped, paused = 0.0, 0
        if unfinished == "wait":
            dropped = sum(member.sampled for group in self._complete for member in group.members)
            self._complete.clear()
        if unfinished in ("wait", "drop", "pause"):
            aborted, paused = self._stop(keep=unfinished == "pause", max_age=max_age)
            dropped += aborted
        self._have_older_weights()
        return replace(result, dropped_tokens=dropped, paused=paused)

    def take_steps(self, needed: int, max_age: int, learner_seconds: float, steps: int) -> list[StepResult]:
        """Asynchronous training: ``steps`` steps of ``needed`` groups each, while nothing stops.

        ``seconds`` of a step are from the one before it to its own taking of groups. The learner takes a batch when it
        is free and ``GroupBuffer`` lets it; new weights arrive ``learner_seconds`` later.

        Args:
            max_age: trainer.max_age.
        """
        buffer, version = GroupBuffer(needed, max_age), 0
        results: list[StepResult] = []
        while len(results) < steps:
            begin = self._begin_step()
            free = begin + (learner_seconds if results else 0.0)
            while True:
                for group in self._decided:
                    buffer.finish(group.number, has_signal=group.informative)
                self._decided = []
                if self.now >= free and version < buffer.step:
                    version = buffer.step
                    self._have_older_weights()
                self._fill()
                while buffer.room(version) and any(engine.free_slots for engine in self._engines):
                    buffer.start([self._started], version)
                    self.start_groups(1)
                    self._fill()
                if self.now >= free and (batch := buffer.take()) is not None:
                    break
                if self.now < free and (not self._events or self._events[0][0] >= free):
                    self.now = free
                else:
                    self._next_event()
            for engine in self._engines:
                engine.advance(self.now)
            complete = {group.number: group for group in self._complete}
            results.append(self._result([complete.pop(number) for number in batch], begin))
            self._complete = deque(complete.values())
        return results

    def _begin_step(self) -> float:
        """Count again; the time at which the step begins."""
        self._finish_times = []
        self._tool_wait, self._tool_calls = 0.0, 0
        for engine in self._engines:
            engine.advance(self.now)
            engine.tokens = engine.decoding = engine.prefilling = 0.0
            engine.first_step = engine.steps
        return self.now

    def _have_older_weights(self) -> None:
        """What is sampled so far was sampled by older weights than the next step's."""
        for group in (*self._open.values(), *self._complete):
            group.stale_tokens = sum(member.sampled + member.progress() for member in group.members)

    def _refilled(self, needed: int, unfinished: str, over_sampling: float) -> list[SimulatedGroup]:
        """The batch, as the training loop would have it; without its aborts before the batch is certain."""
        kept = self.workload.kept_groups
        known = None if kept >= 1.0 else KeepRate(kept * KNOWN_GROUPS, KNOWN_GROUPS)
        in_order = unfinished == "wait"
        refill = Refill(needed, keep_rate=known, over_sampling=over_sampling, in_order=in_order)
        refill.start(sorted(group.number for group in (*self._open.values(), *self._complete)))
        self._decided = list(self._complete)
        while True:
            for group in self._decided:
                refill.decide(group.number, group.informative)
            self._decided = []
            if refill.certain:
                break
            first = self._started
            self.start_groups(refill.to_start)
            refill.start(range(first, self._started))
            while not self._decided:  # until then there is nothing to ask ``refill``, which goes through all groups
                self._fill()
                self._next_event()
        if not in_order:
            return [self._complete.popleft() for _ in range(needed)]
        batch = set(refill.batch)
        chosen = [group for group in self._complete if group.number in batch]
        self._complete = deque(group for group in self._complete if group.number not in batch)
        return chosen

    def _rounds(self, needed: int) -> list[SimulatedGroup]:
        """The batch where a round ends with its last response, and asks for what is missing then, at most a batch."""
        asked = needed
        while asked:
            self.start_groups(asked)
            self._fill()
            while self._open:
                self._next_event()
            missing = max(0, needed - len(self._complete))
            asked = min(needed, math.ceil(missing / self.workload.kept_groups))
        chosen = sorted(self._complete, key=lambda group: group.number)[:needed]
        self._complete.clear()
        return chosen

    # --- events ---------------------------------------------------------------------------------------------------

    def _push(self, time: float, kind: int, subject: SimulatedEngine | Response, version: int = 0) -> None:
        self._counter += 1
        heapq.heappush(self._events, (time, self._counter, kind, subject, version))

    def _next_event(self) -> None:
        time, _, kind, subject, version = heapq.heappop(self._events)
        if kind == _ENGINE:
            assert isinstance(subject, SimulatedEngine)
            if subject.version != version:
                return
            self.now = max(self.now, time)
            self._finish_segments(subject)
        else:
            assert isinstance(subject, Response)
            self.now = max(self.now, time)
            self._finish_call(subject)

    def _reschedule(self, engine: SimulatedEngine) -> None:
        engine.version += 1
        if engine.batch:
            self._push(engine.next_finish(self.now), _ENGINE, engine, engine.version)

    def _fill(self) -> None:
        """Give waiting trajectories to the engines, emptiest first."""
        if not self._queue:
            return
        touched = set()
        order = [(-engine.free_slots, index) for index, engine in enumerate(self._engines) if engine.free_slots]
        heapq.heapify(order)
        while self._queue and order:
            free, index = heapq.heappop(order)
            engine = self._engines[index]
            engine.advance(self.now)
            engine.free_slots -= 1
            self._join(engine, self._queue.popleft())
            touched.add(index)
            if engine.free_slots:
                heapq.heappush(order, (free + 1, index))
        for index in sorted(touched):
            self._reschedule(self._engines[index])

    def _join(self, engine: SimulatedEngine, trajectory: Response) -> None:
        engine.prefill(self.now, trajectory)
        engine.batch += 1
        engine.context += trajectory.context
        trajectory.engine = engine
        trajectory.decoding = True
        trajectory.target = engine.steps + trajectory.left
        self._counter += 1
        heapq.heappush(engine.heap, (trajectory.target, self._counter, trajectory))

    def _finish_segments(self, engine: SimulatedEngine) -> None:
        engine.advance(self.now)
        # The event's time is the first target's, up to rounding.
        engine.steps = max(engine.steps, engine.heap[0][0])
        limit = engine.steps + 1e-6
        while engine.heap and engine.heap[0][0] <= limit:
            trajectory = heapq.heappop(engine.heap)[2]
            trajectory.decoding = False
            trajectory.sampled += trajectory.left
            trajectory.context += trajectory.left
            trajectory.left = trajectory.segment
            trajectory.cached = trajectory.context
            engine.batch -= 1
            engine.context = engine.context - trajectory.context if engine.batch else 0.0
            if trajectory.calls:
                self._leave_for_tool(engine, trajectory)
            else:
                self._finish(engine, trajectory)
        while self._queue and engine.free_slots:
            engine.free_slots -= 1
            self._join(engine, self._queue.popleft())
        self._reschedule(engine)

    def _finish(self, engine: SimulatedEngine, trajectory: Response) -> None:
        trajectory.engine = None
        trajectory.finished = True
        engine.free_slots += 1
        self._finish_times.append(self.now)
        group = trajectory.group
        group.done += 1
        if group.done == group.size:
            del self._open[id(group)]
            self._decided.append(group)
            if group.informative:
                self._complete.append(group)

    def _leave_for_tool(self, engine: SimulatedEngine, trajectory: Response) -> None:
        if not self.model.profile.keeps_prefix:
            trajectory.engine = None
            trajectory.cached = 0.0
            engine.free_slots += 1
        trajectory.calling = True
        self._tool_calls += 1
        if self._workers:
            self._workers -= 1
            self._push(self.now + self._latency(), _TOOL, trajectory)
        else:
            self._waiting_calls.append((trajectory, self.now))

    def _latency(self) -> float:
        value = next(self._latencies, None)
        if value is None:
            self._latencies = iter(self.workload.tool_latency.sample(self._rng, 4096).tolist())
            value = next(self._latencies)
        return value

    def _finish_call(self, trajectory: Response) -> None:
        if self._waiting_calls:
            waiting, since = self._waiting_calls.popleft()
            self._tool_wait += self.now - since
            self._push(self.now + self._latency(), _TOOL, waiting)
        else:
            self._workers += 1
        trajectory.take_result()
        engine = trajectory.engine
        if engine is None:
            self._queue.append(trajectory)
            self._fill()
        else:
            engine.advance(self.now)
            self._join(engine, trajectory)
            self._reschedule(engine)

    # --- the end of a step ----------------------------------------------------------------------------------------

    def _result(self, chosen: Sequence[SimulatedGroup], begin: float) -> StepResult:
        seconds = self.now - begin
        lengths = np.array([member.length for group in chosen for member in group.members])
        finish = sorted(self._finish_times)
        nine_tenths = finish[math.ceil((1 - TAIL_SHARE) * len(finish)) - 1] if finish else self.now
        steps = sum(engine.steps - engine.first_step for engine in self._engines)
        sampled = sum(engine.tokens for engine in self._engines)
        busy = sum(engine.decoding + engine.prefilling for engine in self._engines)
        return StepResult(
            seconds=seconds,
            tail_seconds=self.now - nine_tenths,
            sampled_tokens=sampled,
            trained_tokens=float(lengths.sum() + len(lengths) * self.workload.prompt_tokens),
            stale_tokens=sum(group.stale_tokens for group in chosen),
            dropped_tokens=0.0,
            mean_length=float(lengths.mean()),
            clip_ratio=float((lengths >= self.workload.lengths.limit).mean()),
            mean_batch=sampled / steps if steps else 0.0,
            idle=max(0.0, 1 - busy / (len(self._engines) * seconds)) if seconds else 0.0,
            paused=0,
            tool_wait_seconds=self._tool_wait / max(self._tool_calls, 1),
        )

    def _stop(self, keep: bool, max_age: int) -> tuple[float, int]:
        """Bring everything to rest; the tokens that were dropped and the number of responses that were kept."""
        paused: list[Response] = []
        dropped = 0.0
        for key, group in list(self._open.items()):
            group.age += 1
            if keep and group.age <= max_age:
                paused += [member for member in group.members if not member.finished]
            else:
                dropped += sum(member.sampled + member.progress() for member in group.members)
                del self._open[key]
        for trajectory in paused:
            trajectory.pause()
        # In the order in which they were started: the oldest continue first.
        self._queue = deque(paused)
        self._events.clear()
        self._waiting_calls.clear()
        self._workers = self.workload.sandbox_workers
        for engine in self._engines:
            engine.batch, engine.context, engine.heap = 0, 0.0, []
            engine.free_slots = engine.slots
            engine.free_at = self.now
            engine.version += 1
        return dropped, len(paused)
