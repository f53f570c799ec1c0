"""What a task agent is told: its task, and where the model is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_rollout.agent.loop import TrajectoryState

MODEL = "policy"
"""The name that answers carry; calls may name any."""


@dataclass(frozen=True)
class ClientSettings:
    """Where the model that learns is, for any client of OpenAI's or Anthropic's API.

    Attributes:
        base_url: for clients of OpenAI's API.
        anthropic_base_url: for clients of Anthropic's.
        api_key: tells this rollout's calls from others'.
        model: a name for calls.
    """

    base_url: str
    anthropic_base_url: str
    api_key: str
    model: str = MODEL

    def environment(self) -> dict[str, str]:
        """The variables that the clients read by themselves."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_MODEL": self.model,
        }


def task_of(state: TrajectoryState, purpose: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The data's row as an agent sees it: messages, data_source, ground_truth, uid, extra_info (what else the row
    carries), tools (schemas of the run's tools, which …/tool_calls runs), group_id, index (of the rollout in its
    group), purpose ("train" or "validation") and seed."""
    extra: Mapping[str, Any] = state.extra_info
    known = ("data_source", "ground_truth", "uid")
    return {
        "messages": [dict(message) for message in state.messages],
        **{name: extra.get(name) for name in known},
        "extra_info": {name: value for name, value in extra.items() if name not in known},
        "tools": [dict(tool) for tool in tools],
        "group_id": state.group_id,
        "index": state.index,
        "purpose": purpose,
        "seed": state.seed,
    }
