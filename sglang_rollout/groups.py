"""The trajectories of one prompt, from the prompt or from what an earlier stream left of them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from megatron_retool.config import RolloutConfig
from megatron_retool.rollout_rows import ROW_NAMES, with_row
from sglang_rollout.agent.branching import EntropyBranching
from sglang_rollout.agent.paused_groups import PausedGroup
from sglang_rollout.agent.trajectory_state import TrajectoryState

Purpose = Literal["train", "validation"]
"""What trajectories are for. Those of validation do not branch, are not paused, and are not counted."""


class ScheduledPrompt(Protocol):
    """A prompt as the data room yields it."""

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Token ids of the chat-templated prompt."""

    @property
    def group_id(self) -> int:
        """Names the group."""

    @property
    def extra_info(self) -> Mapping[str, Any]:
        """Further columns of the prompt's row."""


@dataclass
class Group:
    """The trajectories of one prompt."""

    group_id: int
    states: list[TrajectoryState]
    size: int
    """Trajectories that the group will have; with branching it starts with fewer."""
    branching: EntropyBranching | None = None
    age: int = 0

    def finished(self) -> bool:
        """Every trajectory that it has so far has ended."""
        return all(state.finish_reason is not None for state in self.states)

    def full(self) -> bool:
        """It has all its trajectories; with branching, forks and fresh ones fill it."""
        return len(self.states) >= self.size

    def paused(self) -> PausedGroup:
        """What it has so far; it stays as it is when the group continues."""
        states = [state.copy() for state in self.states]
        branching = None if self.branching is None else self.branching.state_dict()
        return PausedGroup(self.group_id, self.size, self.age, states, branching)


class GroupFactory:
    """Makes groups as the configuration says.

    Args:
        config: rollout.
        vocabulary_size: for the entropy that branching measures.
    """

    def __init__(self, config: RolloutConfig, vocabulary_size: int) -> None:
        self.config = config
        self._vocabulary_size = vocabulary_size

    def new(self, row: ScheduledPrompt, purpose: Purpose, size: int) -> Group:
        """A group of ``size`` trajectories that begin at the prompt."""
        prompt_ids = [int(token) for token in row.prompt_ids]
        known = {name: getattr(row, name) for name in ROW_NAMES if hasattr(row, name)}
        extra_info = with_row(row.extra_info, known)
        messages = getattr(row, "messages", ())
        branching = self.config.branching
        forks = branching.enable and purpose == "train"
        states = [
            TrajectoryState(
                *(prompt_ids, row.group_id, index, extra_info, self.seed(row.group_id, index)), messages=messages
            )
            for index in range(min(size, branching.initial_rollouts) if forks else size)
        ]
        group = Group(row.group_id, states, size)
        if forks:
            seed = self.seed(row.group_id, -1) or row.group_id
            group.branching = EntropyBranching(branching, size, self._vocabulary_size, seed)
        return group

    def continued(self, row: ScheduledPrompt, paused: PausedGroup) -> Group:
        """The group that was paused."""
        group = self.new(row, "train", paused.size)
        first = group.states[0]
        group.age = paused.age
        # With its prompt before it is looked at: routed experts out of a file are of the prompt's tokens too.
        group.states = [
            replace(
                state,
                prompt_ids=state.prompt_ids if state.own_prompt else first.prompt_ids,
                extra_info=first.extra_info,
                messages=first.messages,
            ).copy()
            for state in paused.states
        ]
        if paused.branching is None:
            group.branching = None
        elif group.branching is not None:
            group.branching.load_state_dict(paused.branching)
        else:  # The resumed run does not branch: what forks would have filled starts from the prompt.
            group.states += [self.fresh_state(group, index) for index in range(len(group.states), group.size)]
        return group

    def fresh_state(self, group: Group, index: int) -> TrajectoryState:
        """Trajectory ``index`` of a group, which begins at the prompt."""
        first = group.states[0]
        seed = self.seed(group.group_id, index)
        return TrajectoryState(first.prompt_ids, group.group_id, index, first.extra_info, seed, messages=first.messages)

    def seed(self, group_id: int, index: int) -> int | None:
        """Sampling seed of a trajectory; the engine mixes the token's position into it."""
        base = self.config.engine.random_seed
        if base is None:
            return None
        digest = hashlib.blake2b(f"{base}/{group_id}/{index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True)
class Changes:
    """What a stream of groups is sent while it runs.

    Attributes:
        prompts: of further groups.
        group_sizes: trajectories of a group by its group id, where that is not the stream's number.
        abort: ids of groups to drop with what they have.
    """

    prompts: Sequence[ScheduledPrompt] = ()
    group_sizes: Mapping[int, int] = field(default_factory=dict)
    abort: Collection[int] = ()


def unfinished(groups: Iterable[Group]) -> int:
    """Trajectories that have no finish reason yet."""
    return sum(state.finish_reason is None for group in groups for state in group.states)
