"""A trajectory under way: its tokens and what is known of each, its calls, its time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_retool.routed_experts import ExpertArray
from megatron_retool.trajectory import RESPONSE_COLUMNS, FinishReason, RolloutTiming, ToolCall, Trajectory
from sglang_rollout.agent.routing_record import still_true, whole_column
from sglang_rollout.agent.written_calls import ParsedCall
from sglang_rollout.engine.base import GenerateResult

MAX_EMPTY_ANSWERS = 4
"""Times in a row that an engine may end a request by itself without a token."""


@dataclass
class TrajectoryState:
    """A trajectory under way. The lists below run along the response and always have equal lengths.

    Attributes:
        turn: index of the assistant turn that is being sampled, or will be next.
        turn_start: where that turn begins in the response.
        pending_calls: calls of the turn that was sampled last, whose results are not in the response yet.
        seconds: time it was worked on, pauses and what engines that failed have cost left out.
        timing: what that time was spent on, and what engines that failed have cost.
        age: training steps for which it was paused.
        routed_experts: rows [n, layers, k] of the tokens from the prompt's first on, in consecutive chunks, which end
            where no engine has answered yet, before the last token. Copies share them: none is ever changed.
        routed_ids: int32, the tokens that those rows were received for; None: for those that it has.
        messages: of the prompt, where the data have them.
        rows: what a finished task agent has left, in place of the lists here.
        own_prompt: ``prompt_ids`` come from an environment, and not from the data.
    """

    prompt_ids: list[int]
    group_id: int
    index: int
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    response_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    routed_experts: list[ExpertArray] = field(default_factory=list)
    routed_ids: npt.NDArray[np.int32] | None = field(default=None, repr=False, compare=False)
    tool_calls: list[ToolCall] = field(default_factory=list)
    turn: int = 0
    turn_start: int = 0
    pending_calls: list[ParsedCall] = field(default_factory=list)
    seconds: float = 0.0
    timing: RolloutTiming = RolloutTiming()
    age: int = 0
    finish_reason: FinishReason | None = None
    reward_info: dict[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()
    rows: list[Trajectory] = field(default_factory=list)
    own_prompt: bool = False

    @property
    def length(self) -> int:
        """Prompt and response tokens."""
        return len(self.prompt_ids) + len(self.response_ids)

    def routed_tokens(self) -> int:
        """Tokens that ``routed_experts`` has rows of, which is the first that has none.

        Where an agent has taken back tokens since, their rows go, and those after them.
        """
        if self.routed_experts:
            ids = self._ids()
            self.routed_experts = still_true(self.routed_experts, self.routed_ids, ids)
            self.routed_ids = ids if self.routed_ids is None else self.routed_ids
        return sum(map(len, self.routed_experts))

    def _ids(self) -> npt.NDArray[np.int32]:
        return np.array([*self.prompt_ids, *self.response_ids], np.int32)

    def append_sampled(self, result: GenerateResult) -> None:
        """Append the sampled tokens with their log-probs, versions and experts."""
        count, known = len(result.output_ids), self.routed_tokens()
        self.response_ids += result.output_ids
        self.loss_mask += [True] * count
        self.log_probs += result.log_probs
        self.turn_ids += [self.turn] * count
        self.weight_versions += result.weight_versions
        # Rows after a gap are asked for again; rows of tokens that the agent left out belong to no row.
        if result.routed_experts is not None and result.routed_experts_start in (None, known):
            rows = result.routed_experts[: self.length - known]
            if len(rows):
                self.routed_experts.append(rows)
                self.routed_ids = self._ids()[: known + len(rows)]

    def append_unsampled(self, ids: Sequence[int]) -> None:
        """Tool results and template glue: part of the context, never of the loss."""
        count = len(ids)
        self.response_ids += ids
        self.loss_mask += [False] * count
        self.log_probs += [0.0] * count
        self.turn_ids += [-1] * count
        self.weight_versions += [-1] * count

    def copy(self) -> TrajectoryState:
        """The same trajectory, which does not change when this one continues."""
        self.routed_tokens()
        return replace(
            self,
            response_ids=list(self.response_ids),
            loss_mask=list(self.loss_mask),
            log_probs=list(self.log_probs),
            turn_ids=list(self.turn_ids),
            weight_versions=list(self.weight_versions),
            routed_experts=list(self.routed_experts),
            tool_calls=list(self.tool_calls),
            pending_calls=list(self.pending_calls),
            reward_info=dict(self.reward_info),
        )

    def unstarted(self) -> TrajectoryState:
        """The same trajectory before anything of it was sampled."""
        return TrajectoryState(
            *(self.prompt_ids, self.group_id, self.index, self.extra_info, self.seed),
            age=self.age,
            messages=self.messages,
        )

    def fork(self, index: int, seed: int | None) -> TrajectoryState:
        """An independent trajectory with the same past, which samples on its own from here."""
        return replace(self.copy(), index=index, seed=seed)

    def response_columns(self, start: int = 0) -> dict[str, Any]:
        """``RESPONSE_COLUMNS`` of the response from its token ``start`` on."""
        columns = zip(RESPONSE_COLUMNS.items(), self._columns, strict=True)
        return {name: np.array(column[start:], dtype) for (name, dtype), column in columns}

    @property
    def _columns(self) -> tuple[list[Any], ...]:
        return self.response_ids, self.loss_mask, self.log_probs, self.turn_ids, self.weight_versions

    def check_contract(self, finished: bool) -> None:
        """Raise ValueError where an agent's run, which returned ``finished``, left what cannot be continued."""
        if len({len(column) for column in self._columns}) > 1:
            raise ValueError("the agent left columns of different lengths in its state")
        if finished and self.finish_reason is None:
            raise ValueError("the agent's run returned True and left finish_reason unset")

    def end_abruptly(self, reason: str) -> None:
        """End as aborted, whatever an agent that failed has left here; reward_info["agent_failure"] says why."""
        columns = self._columns
        whole = min(map(len, columns))
        for column in columns:
            del column[whole:]
        self.pending_calls = []
        self.finish_reason = FinishReason.ABORTED
        try:
            self.to_trajectory()
        except (TypeError, ValueError, OverflowError):
            for column in columns:
                column.clear()
            self.routed_experts = []
        self.reward_info = {**self.reward_info, "agent_failure": reason}

    def to_trajectories(self, oldest_version: int | None = None) -> list[Trajectory]:
        """The rows of the finished rollout; see ``to_trajectory``."""
        if not self.rows:
            return [self.to_trajectory(oldest_version)]
        return [without_older(row, oldest_version) for row in self.rows]

    def to_trajectory(self, oldest_version: int | None = None) -> Trajectory:
        """The finished trajectory. Sampled tokens of versions before ``oldest_version`` are taken out of the loss.

        They keep their turns: reward and metrics are those of the whole response.
        """
        if self.finish_reason is None:
            raise ValueError(f"trajectory {self.group_id}/{self.index} is not finished")
        whole = Trajectory(
            prompt_ids=np.array(self.prompt_ids, np.int32),
            **self.response_columns(),
            group_id=self.group_id,
            index=self.index,
            finish_reason=self.finish_reason,
            reward_info=dict(self.reward_info),
            tool_calls=list(self.tool_calls),
            extra_info=dict(self.extra_info),
            routed_experts=whole_column(self.routed_experts, self.length) if self.routed_tokens() else None,
            timing=self.timing,
        )
        return without_older(whole, oldest_version)


def without_older(row: Trajectory, oldest_version: int | None) -> Trajectory:
    """``row`` with sampled tokens of versions before ``oldest_version`` taken out of the loss; None: of no version."""
    if oldest_version is None:
        return row
    younger = row.loss_mask & (row.weight_versions >= oldest_version)
    return replace(row, loss_mask=younger, rollout_log_probs=np.where(younger, row.rollout_log_probs, 0.0))


def joined(head: GenerateResult | None, tail: GenerateResult) -> GenerateResult:
    """Two consecutive results of one turn as one, without ``top_log_probs``; ``tail`` where nothing came before it."""
    if head is None:
        return tail
    rows: list[Any] = [each.routed_experts for each in (head, tail) if each.routed_experts is not None]
    return replace(
        tail,
        output_ids=[*head.output_ids, *tail.output_ids],
        log_probs=[*head.log_probs, *tail.log_probs],
        weight_versions=[*head.weight_versions, *tail.weight_versions],
        prompt_tokens=head.prompt_tokens,
        cached_tokens=head.cached_tokens,
        top_log_probs=None,
        top_ids=None,
        routed_experts=np.concatenate(rows) if rows else None,
        routed_experts_start=tail.routed_experts_start if head.routed_experts is None else head.routed_experts_start,
    )
