"""What a task agent is told: its task, and where the model is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_rollout.agent.loop import TrajectoryState, row_of

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
    """The data's row (see ``row_of``), with tools (schemas of the run's tools, which …/tool_calls runs) and purpose:
    "train" or "validation"."""
    return {**row_of(state), "tools": [dict(tool) for tool in tools], "purpose": purpose}
