"""What the rest of rollout sees of the gateway: sessions to open, their limits, and the segments that they leave.

async with Gateway(sampler, tokenizer, config.rollout.multi_turn, model="policy") as gateway:
    handle = gateway.open_session(config.rollout.train, limits=SessionLimits(context_length=8192))
    ...  # an agent talks to handle.base_url (OpenAI) or handle.anthropic_base_url, with handle.key as its API key
    segments = await handle.close()
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from megatron_retool.config import SamplingConfig
from megatron_retool.routed_experts import ExpertArray
from megatron_retool.trajectory import FinishReason, RolloutTiming, ToolCall
from sglang_rollout.agent.trajectory_state import TrajectoryState
from sglang_rollout.engine.base import GenerateResult, RankedText, Steering, StopConditions

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Segment:
    """A context and what was sampled in it: one row of a rollout. The columns are Trajectory's.

    A conversation that only grows is one segment. Where an agent continues another history (an edit, a summary, a
    branch, a retry) another one begins, whose prompt is the whole context that was sent then; turns of an earlier
    segment in it belong to its prompt. So every sampled token is in the response of exactly one segment.

    Attributes:
        prompt_ids: int32 [P], all that was sent to the engine before the segment's first sampled token.
        response_ids: int32 [R], sampled turns with the ids of what was sent between them.
        loss_mask: bool [R], true where the token was sampled.
        rollout_log_probs: float32 [R], log-prob of the sampled token; 0 elsewhere.
        turn_ids: int16 [R], turn of the segment, from 0; -1 where the token was not sampled.
        weight_versions: int32 [R], of the weights that sampled the token; -1 elsewhere.
        finish_reason: of its last turn; LENGTH too where a call that would have followed had no room.
        routed_experts: [P + R, layers, k], or None.
        calls: the numbers (0, 1, … in the order of their answers) of the session's turns in the response.
        tool_calls: of those turns, what was run with the run's tools (``OpenSession.run_tool``).
    """

    prompt_ids: IntArray
    response_ids: IntArray
    loss_mask: npt.NDArray[np.bool_]
    rollout_log_probs: npt.NDArray[np.float32]
    turn_ids: npt.NDArray[np.int16]
    weight_versions: IntArray
    finish_reason: FinishReason
    routed_experts: ExpertArray | None = None
    calls: tuple[int, ...] = ()
    tool_calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True)
class SessionLimits:
    """What one session may use. A call beyond a limit gets status 429 (400 for tokens of a context).

    Attributes:
        context_length: tokens of a context and of what is sampled in it; None: no limit here.
        max_response_length: tokens after the first message's prompt, in one context; None: no limit.
        max_calls: calls that were answered, an answer of n choices counting n times.
        max_concurrent_calls: calls at a time.
        max_sampled_tokens: of all calls together; calls under way may go beyond it. None: no limit.
        max_wall_seconds: from opening, time in which calls were held left out; then the session is ended.
        max_choices: n of one call.
    """

    context_length: int | None = None
    max_response_length: int | None = None
    max_calls: int = 1000
    max_concurrent_calls: int = 64
    max_sampled_tokens: int | None = None
    max_wall_seconds: float = 3600.0
    max_choices: int = 16


@dataclass
class GatewayStatistics:
    """Counts of a gateway's life.

    Attributes:
        errors: answers with an error, by its code.
        call_seconds: of the last 10,000 answered calls, from their headers to their answers' last byte.
    """

    sessions: int = 0
    calls: int = 0
    segments: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    call_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=10_000))


class SessionHandle(Protocol):
    """An open session.

    Attributes:
        base_url: for clients of OpenAI's API: ``…/sessions/<id>/v1``.
        anthropic_base_url: for clients of Anthropic's API, which append /v1/messages themselves.
        key: the API key. It finds the session also at ``…/v1``, without the session's id in the path.
        failure: why the engines could not answer a call, which then got status 503; None: they could.
        overflowed: whether a call's context had no room for an answer.
        timing: where the time of its calls went; of calls side by side each counts.
    """

    base_url: str
    anthropic_base_url: str
    key: str
    failure: Exception | None
    overflowed: bool

    @property
    def timing(self) -> RolloutTiming:
        """Seconds of the session's generation, tools and waiting."""

    def seconds_left(self) -> float:
        """Until max_wall_seconds are over, a second at least while a call is under way, which ends by itself."""

    def segments(self) -> list[Segment]:
        """What has been sampled so far, in the order in which the segments began."""

    async def close(self) -> list[Segment]:
        """End the session: calls under way are cancelled, later ones get status 404. A second call gives the same."""


class Sampler(Protocol):
    """Where the gateway's tokens come from. See sampler.py for the run's engines."""

    async def generate(self, state: TrajectoryState, request: TurnRequest) -> GenerateResult:
        """What follows the state's ids. A call waits here while engines sleep or are restarted.

        The seconds of that waiting are taken from ``state.seconds``, which is 0 before; ``state.timing`` gets what the
        call took, and has the number of the engine that sampled the session's turn before (or None).

        Raises:
            RolloutError, NoEngineAvailable: no engine can answer.
        """


@runtime_checkable
class Ranker(Protocol):
    """A ``Sampler`` that can also say what the model holds of a given text."""

    async def rank(self, input_ids: Sequence[int], count: int) -> RankedText:
        """As ``RankingClient.rank``.

        Raises:
            RolloutError, NoEngineAvailable: no engine can answer.
        """


@dataclass(frozen=True)
class TurnRequest:
    """How one turn is sampled.

    Attributes:
        max_new_tokens: at least 1.
        stop: where it ends.
        deadline_seconds: then it ends with what it has, as "abort"; time in which it was held is not counted.
    """

    max_new_tokens: int
    sampling: SamplingConfig
    stop: StopConditions
    deadline_seconds: float
    steering: Steering = field(default_factory=Steering)
