"""What an environment is: it begins an episode from a row of the data, answers the policy's turns, and scores it.

    class Guess(Environment):
        def __init__(self, *, most: int = 100) -> None: ...        # settings: rollout.environment_kwargs

        async def reset(self, row): ...                            # the messages and tools that it begins with
        async def step(self, action): ...                          # what the policy reads next, and whether it is done
        async def score(self): ...                                 # the reward
        async def close(self): ...

One object serves one trajectory, so its state is its attributes. Methods may be synchronous; they are then run in a
thread. What is expensive and the same for all trajectories belongs into a function with ``functools.cache``.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_retool.registry import Registry

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Start:
    """How an episode begins.

    Attributes:
        messages: the prompt; None: that of the data.
        tools: OpenAI function schemas, for the chat template.
    """

    messages: Sequence[Message] | None = None
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Call:
    """A tool call of the policy: one of ``Start.tools``, with arguments that satisfy its schema."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Action:
    """A turn of the policy.

    Attributes:
        text: all of it, calls included, without the end of turn.
        calls: in the order in which they were written. Those that cannot be read, or name no tool, or break its
            schema, are left out: the loop tells the policy so.
    """

    text: str
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Step:
    """What comes of a turn.

    Attributes:
        messages: what the policy reads before its next turn. After calls: one message of role tool for each of them,
            in their order, and then others; without calls: messages of any role but assistant.
        done: the episode is over; ``messages`` are then not read.
    """

    messages: Sequence[Message] = field(default_factory=list)
    done: bool = False


class Environment(ABC):
    """The world of one trajectory. See the module."""

    replays: bool = False
    """The same row and the same turns always give the same messages. Then an episode can be gone through again, which
    rollout.partial (a trajectory that was paused) and rollout.branching (a fork) need."""

    @abstractmethod
    def reset(self, row: Mapping[str, Any]) -> Start | Awaitable[Start]:
        """Begin.

        Args:
            row: messages, data_source, ground_truth, uid, extra_info (what else the row carries), group_id, index (of
                the rollout in its group) and seed.
        """

    @abstractmethod
    def step(self, action: Action) -> Step | Awaitable[Step]:
        """Take the policy's turn. Called once for each, the last one included."""

    def score(self) -> Any:
        """The reward of the episode so far: a number, a mapping with it under "reward" (and what a reward function may
        return besides), or None: what reward.function says of the response."""
        return None

    def close(self) -> Any:
        """The trajectory has ended, or starts again later (``replays``). Called once after ``reset``,
        also where that failed."""
        return None


def row_number(row: Mapping[str, Any]) -> int:
    """64 bits from the uid of the data's row (its group, where it has none): the same for the whole group, whose
    rollouts are compared, in every epoch."""
    name = row["group_id"] if row["uid"] is None else row["uid"]
    return int.from_bytes(hashlib.blake2b(str(name).encode(), digest_size=8).digest(), "big")


def seed_of(row: Mapping[str, Any]) -> int:
    """31 bits of it, for a world's own draws. The row's ``seed`` is that of one rollout's sampling."""
    return row_number(row) >> 33


environments: Registry[Callable[..., Any]] = Registry(
    "rollout.environment",
    takes=(),
    built_in={
        "gymnasium_server": "sglang_rollout.environments.gymnasium_server:GymnasiumServerEnvironment",
        "openenv": "sglang_rollout.environments.openenv:OpenEnvEnvironment",
        "reasoning_gym": "sglang_rollout.environments.reasoning_gym:ReasoningGymEnvironment",
    },
)
