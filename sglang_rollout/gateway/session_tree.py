"""The turns that a session has sampled, as a tree: what a request's history is matched against, and its segments.

**Nodes.** A ``Turn`` is what one engine request sampled. Its context is its parent's context, the parent's sampled ids
and ``glue_ids``: what was sent between the two. A turn without a parent has its whole context in ``glue_ids``.

**Matching.** Every turn is filed under the digest of the history that a client would send it back with: tools, the
messages of its request, its answer (``conversation.history_digests``). A request's history is digested from the first
message on, and the longest beginning that ends with a turn is continued: its ids are taken as they were sampled, and
what follows is tokenised. Where several turns fit (the same text sampled twice), the ids of their tool calls decide,
then the newest is taken. Where none fits, the history is new: it is rendered as a whole, and known turns in it (the
same answer in another history) are put in as their sampled ids.

**Segments.** The first turn sampled after another continues its segment; every other child, and every turn without a
parent, begins a segment, whose prompt is the turn's context.

**Invariants.**

1. For every turn, the ids before it in its segment's row are the ids that were sent to the engine for it.
2. Every turn lies in the response of exactly one segment, whole; in the loss masks every sampled token is true once.
3. Turns are added when they are sampled and never change: segments only grow.

Nothing here knows of networks, engines or time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megatron_retool.trajectory import FinishReason, ToolCall
from sglang_rollout.agent.routing_record import whole_column
from sglang_rollout.agent.trajectory_state import TrajectoryState
from sglang_rollout.engine.base import GenerateResult
from sglang_rollout.gateway.conversation import (
    ConversationAnswer,
    Message,
    SpokenCall,
    call_ids,
    followed_by,
    message_key,
)
from sglang_rollout.gateway.interface import Segment
from sglang_rollout.gateway.rendering import ContextRenderer

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}


@dataclass(eq=False)
class Turn:
    """Sampled ids in their context.

    Attributes:
        number: 0, 1, … in the order of the answers.
        glue_ids: sent after the parent's ids, or all that was sent where there is none.
        continued_by: the turn that continues its segment.
        calls: the tool calls of its answer.
    """

    number: int
    parent: Turn | None
    glue_ids: list[int]
    result: GenerateResult
    calls: tuple[SpokenCall, ...]
    continued_by: Turn | None = None

    def path(self) -> list[Turn]:
        """From the first turn of its context to itself."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]


@dataclass(frozen=True, eq=False)
class Context:
    """Where a request's answer is sampled: after ``glue_ids``, which follow ``parent``.

    Attributes:
        digest: of the history.
        draws: a number for each answer, which no other answer in the same history has: they count from 0, and one
            whose answer never came is given again.
    """

    parent: Turn | None
    glue_ids: list[int]
    digest: bytes
    draws: tuple[int, ...]

    def state(self, group_id: int = 0, index: int = 0, seed: int | None = None) -> TrajectoryState:
        """The context as the state of a trajectory, whose next turn is the answer."""
        if self.parent is None:
            return TrajectoryState(list(self.glue_ids), group_id, index, seed=seed)
        state = _state_of(self.parent.path(), group_id, index, seed)
        state.append_unsampled(self.glue_ids)
        state.turn += 1
        state.turn_start = len(state.response_ids)
        return state


class SessionTree:
    """One session's turns.

    Args:
        renderer: of the run's tokenizer.
    """

    def __init__(self, renderer: ContextRenderer) -> None:
        self._renderer = renderer
        self._turns: list[Turn] = []
        self._by_history: dict[bytes, list[Turn]] = {}
        self._by_answer: dict[bytes, Turn] = {}
        self._draws: dict[bytes, set[int]] = {}
        self._overflow: tuple[Turn, list[int]] | None = None
        self._spoken: dict[str, SpokenCall] = {}
        self._ran: dict[str, ToolCall] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def longest_known(self, messages: Sequence[Message], digests: Sequence[bytes]) -> tuple[Turn | None, int]:
        """The turn that ends the longest known beginning of a history, and how many messages that beginning has.

        Args:
            digests: ``history_digests`` of it.
        """
        for place in range(len(messages) - 1, -1, -1):
            candidates = self._by_history.get(digests[place + 1])
            if candidates:
                return _chosen(candidates, messages[place]), place + 1
        return None, 0

    def context(self, parent: Turn | None, glue_ids: list[int], digest: bytes, choices: int = 1) -> Context:
        """The context in which a request is answered, ``choices`` times.

        Args:
            digest: of its history.
        """
        taken = self._draws.setdefault(digest, set())
        draws = tuple(itertools.islice((draw for draw in itertools.count() if draw not in taken), choices))
        taken.update(draws)
        return Context(parent, glue_ids, digest, draws)

    def unanswered(self, context: Context) -> None:
        """A request came to nothing: who asks again gets the answer that it would have had."""
        self._draws[context.digest].difference_update(context.draws)

    def add(self, context: Context, result: GenerateResult, answer: ConversationAnswer) -> Turn:
        """File what was sampled in ``context`` (at least one token) and answered as ``answer``."""
        message = answer.message()
        turn = Turn(len(self._turns), context.parent, context.glue_ids, result, answer.calls)
        self._spoken |= {call.id: call for call in answer.calls}
        self._turns.append(turn)
        if context.parent is not None and context.parent.continued_by is None:
            context.parent.continued_by = turn
        self._by_history.setdefault(followed_by(context.digest, message), []).append(turn)
        self._by_answer[message_key(message)] = turn
        self._overflow = None
        return turn

    def overflowed(self, parent: Turn | None, glue_ids: list[int]) -> None:
        """What followed ``parent`` was too long to be answered: of it, ``glue_ids`` had room."""
        if parent is not None:
            self._overflow = (parent, glue_ids)

    def spoken(self, identifier: str) -> SpokenCall | None:
        """The tool call of this id that a turn has made."""
        return self._spoken.get(identifier)

    def ran(self, identifier: str, record: ToolCall) -> None:
        """The tool call of this id was run, for the first time, as ``record`` says."""
        self._ran.setdefault(identifier, record)

    def segments(self) -> list[Segment]:
        """All that was sampled, in the order in which the segments began."""
        return [
            self._segment(turn) for turn in self._turns if turn.parent is None or turn.parent.continued_by is not turn
        ]

    def _segment(self, first: Turn) -> Segment:
        turns = [first]
        while (following := turns[-1].continued_by) is not None:
            turns.append(following)
        before = first.path()[:-1]
        state = _state_of([*before, *turns])
        # Where the response of the first turn begins, in the response of the whole path.
        start = 0
        for place, turn in enumerate(before):
            start += len(turn.result.output_ids) + (len(turn.glue_ids) if place else 0)
        if before:
            start += len(first.glue_ids)
        finish = _FINISH[turns[-1].result.finish_reason]
        if self._overflow is not None and self._overflow[0] is turns[-1]:
            state.append_unsampled(self._overflow[1])
            finish = FinishReason.LENGTH
        columns = state.response_columns(start)
        turn_ids = columns["turn_ids"]
        turn_ids[turn_ids >= 0] -= len(before)
        return Segment(
            prompt_ids=np.array([*state.prompt_ids, *state.response_ids[:start]], np.int32),
            **columns,
            finish_reason=finish,
            routed_experts=whole_column(state.routed_experts, state.length) if state.routed_tokens() else None,
            calls=tuple(turn.number for turn in turns),
            tool_calls=self._tool_calls(turns, np.flatnonzero(np.diff(turn_ids, prepend=-1) > 0)),
        )

    def _tool_calls(self, turns: Sequence[Turn], starts: npt.NDArray[np.int64]) -> list[ToolCall]:
        """What was run of the calls of ``turns``, whose sampled tokens begin at ``starts`` of the response."""
        result = []
        for turn, start in zip(turns, starts, strict=True):
            if not any(call.id in self._ran for call in turn.calls):
                continue
            positions = self._renderer.positions(turn.result.output_ids, turn.calls)
            for call, position in zip(turn.calls, positions, strict=True):
                if call.id in self._ran:
                    place = -1 if position < 0 else int(start) + position
                    result.append(replace(self._ran[call.id], position=place))
        return result

    def known(self, messages: Sequence[Message]) -> dict[int, list[int]]:
        """Sampled ids of the turns in a history that is new as a whole, by their place in it."""
        known = {}
        for place, message in enumerate(messages):
            turn = self._by_answer.get(message_key(message)) if message["role"] == "assistant" else None
            if turn is not None:
                known[place] = turn.result.output_ids
        return known


def _chosen(candidates: Sequence[Turn], message: Message) -> Turn:
    ids = call_ids(message)
    same = (turn for turn in reversed(candidates) if tuple(call.id for call in turn.calls) == ids)
    return next(same, candidates[-1])


def _state_of(path: Sequence[Turn], group_id: int = 0, index: int = 0, seed: int | None = None) -> TrajectoryState:
    """The trajectory of the turns of ``path``, the first of which has no parent."""
    state = TrajectoryState(list(path[0].glue_ids), group_id, index, seed=seed)
    for place, turn in enumerate(path):
        if place:
            state.append_unsampled(turn.glue_ids)
        state.turn = place
        state.turn_start = len(state.response_ids)
        state.append_sampled(turn.result)
    return state


def seed_of(seed: int | None, draw: int) -> int | None:
    """The seed of one of the answers in a history (``Context.draws``); that of number 0 is ``seed`` itself."""
    return None if seed is None else (seed + 0x9E3779B97F4A7C15 * draw) & (2**63 - 1)
