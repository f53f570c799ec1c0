"""How a task agent's rollout ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_retool.rewards.base import BadResultError, normalize_result
from megatron_retool.rollout_rows import AgentOutcome as Outcome

MESSAGE_CHARACTERS = 2000


@dataclass(frozen=True)
class AgentEnd:
    """
    Attributes:
        message: what is said of an end other than FINISHED.
        result: what the agent has returned as a reward (score, acc, pred and what else it said); None: nothing.
    """

    outcome: Outcome
    message: str = ""
    result: Mapping[str, Any] | None = None

    @classmethod
    def returned(cls, value: Any) -> AgentEnd:
        """The end of an agent that returned ``value``: a reward, a mapping with one under "reward", or None."""
        if value is None:
            return cls(Outcome.FINISHED)
        try:
            if isinstance(value, Mapping):
                rest = {str(name): each for name, each in value.items() if name != "reward"}
                if "reward" not in value and "score" not in value:
                    raise BadResultError(f"a mapping needs a number under 'reward', and has {sorted(rest)}"[:500])
                value = {"score": value["reward"], **rest} if "reward" in value else rest
            return cls(Outcome.FINISHED, result=normalize_result(value))
        except BadResultError as error:
            return cls(Outcome.BAD_RESULT, str(error)[:MESSAGE_CHARACTERS])
