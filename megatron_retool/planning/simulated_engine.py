"""What a rollout simulation moves about: groups, responses, and engines that decode all of theirs in step.

Between two events the state of an engine is a closed formula (``SimulatedEngine.advance``), so that a simulation costs
as many operations as there are turns, not tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from megatron_retool.planning.engine_model import EngineModel


@dataclass
class SimulatedGroup:
    """Responses to one prompt."""

    size: int
    number: int
    informative: bool
    members: list[Response] = field(default_factory=list)
    done: int = 0
    age: int = 0
    stale_tokens: float = 0.0
    """Response tokens sampled before the last weight update."""


class Response:
    """One response of a group. Token counts are floats: the model has no whole tokens."""

    __slots__ = (
        "cached",
        "calling",
        "calls",
        "context",
        "decoding",
        "engine",
        "finished",
        "group",
        "left",
        "length",
        "result",
        "sampled",
        "segment",
        "target",
    )

    def __init__(self, group: SimulatedGroup, length: float, calls: int, prompt: float, result: float) -> None:
        self.group = group
        self.length = length
        self.calls = calls
        """Tool calls still to come, the present one included."""
        self.result = result
        """Tokens of one tool result."""
        self.segment = (length - calls * result) / (calls + 1)
        """Tokens sampled between two calls."""
        self.left = self.segment
        """Of the present stretch, when it was last put on an engine."""
        self.context = prompt
        self.cached = 0.0
        """Tokens of the context whose keys and values the engine has."""
        self.sampled = 0.0
        """Tokens of finished stretches."""
        self.engine: SimulatedEngine | None = None
        """Where it has a place."""
        self.decoding = self.calling = False
        self.target = 0.0
        """The engine's step count at which the present stretch ends."""
        self.finished = False

    def progress(self) -> float:
        """Tokens of the present stretch that are there already."""
        if not self.decoding:
            return 0.0
        assert self.engine is not None
        return self.left - max(0.0, self.target - self.engine.steps)

    def take_result(self) -> None:
        """The tool has answered: its result joins the context."""
        self.calling = False
        self.calls -= 1
        self.context += self.result

    def pause(self) -> None:
        """Give up the place at the engine; a call that is out will have its result by the time it continues."""
        progress = self.progress()
        self.sampled += progress
        self.context += progress
        self.left -= progress
        if self.calling:
            self.take_result()
        self.decoding = False
        self.engine = None
        self.cached = 0.0


class SimulatedEngine:
    """Decodes its batch in lockstep: ``steps`` counts since the start and is the same for all its trajectories."""

    __slots__ = (
        "batch",
        "context",
        "decoding",
        "first_step",
        "free_at",
        "free_slots",
        "heap",
        "last",
        "model",
        "prefilling",
        "slots",
        "steps",
        "tokens",
        "version",
    )

    def __init__(self, model: EngineModel, slots: int) -> None:
        self.model = model
        self.slots = self.free_slots = slots
        self.batch = 0
        self.context = 0.0
        self.steps = self.first_step = 0.0
        self.tokens = self.decoding = self.prefilling = 0.0
        self.last = 0.0
        self.free_at = 0.0
        """Decoding stands still until then: a prefill is running."""
        self.version = 0
        """Of the batch; a finishing time that was computed for an older one is void."""
        self.heap: list[tuple[float, int, Response]] = []

    def advance(self, now: float) -> None:
        """Decode until ``now``.

        A step takes a + c K seconds and K grows by B tokens with each, so that m steps take
        (a + c K) m + c B m^2 / 2; solved for m.
        """
        start = self.last if self.last > self.free_at else self.free_at
        if self.batch and now > start:
            c = self.model.seconds_per_context_token
            rate = self.model.batch_seconds(self.batch) + c * self.context
            elapsed = now - start
            steps = 2 * elapsed / (rate + math.sqrt(rate * rate + 2 * c * self.batch * elapsed))
            self.steps += steps
            self.tokens += steps * self.batch
            self.context += steps * self.batch
            self.decoding += elapsed
        if now > self.last:
            self.last = now

    def next_finish(self, now: float) -> float:
        """When the first of the batch is through; ``advance(now)`` has been called."""
        steps = max(0.0, self.heap[0][0] - self.steps)
        c = self.model.seconds_per_context_token
        rate = self.model.batch_seconds(self.batch) + c * self.context
        return max(now, self.free_at) + steps * (rate + c * self.batch * steps / 2)

    def prefill(self, now: float, trajectory: Response) -> None:
        """Read what of the trajectory's context is not in the cache; the engine is busy for as long."""
        seconds = self.model.prefill_seconds(trajectory.context - trajectory.cached, trajectory.cached)
        self.free_at = max(now, self.free_at) + seconds
        self.prefilling += seconds
        trajectory.cached = trajectory.context
