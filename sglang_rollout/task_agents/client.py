"""What a task agent gets to know: its task, and where the model is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from sglang_rollout.agent.loop import row_of
from sglang_rollout.agent.trajectory_state import TrajectoryState
from sglang_rollout.gateway.in_process import GatewayClient, GatewayTransport

if TYPE_CHECKING:
    from openai import AsyncOpenAI

MODEL = "policy"
"""The name that answers carry; calls may name any."""


@dataclass(frozen=True)
class ClientSettings:
    """Where the model that learns is, for any client of OpenAI's or Anthropic's API.

    What takes the least of the driver's time, of a function agent, is ``openai()``.

    Attributes:
        base_url: for clients of OpenAI's API.
        anthropic_base_url: for clients of Anthropic's.
        api_key: tells this rollout's calls from others'.
        transport: of the clients below.
        model: a name for calls.
    """

    base_url: str
    anthropic_base_url: str
    api_key: str
    transport: GatewayTransport
    model: str = MODEL

    def openai(self) -> AsyncOpenAI:
        """``openai``'s client of this rollout, for any event loop. It needs no socket, leads only to the gateway, and
        waits for an answer as long as the rollout may last."""
        from sglang_rollout.task_agents.openai_client import client_of_session

        return client_of_session(self.transport, self.api_key)

    def http_client(self) -> httpx.AsyncClient:
        """For ``AsyncOpenAI`` and others that take one of httpx's. It leads only to the gateway, and waits for an
        answer as long as the rollout may last."""
        return GatewayClient(self.transport)

    def sync_http_client(self) -> httpx.Client:
        """The same for ``OpenAI``, in agents that are plain functions."""
        return httpx.Client(transport=self.transport, timeout=None)

    async def call_tool(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Run a tool call, as an answer's JSON has it, with the run's tools (rollout.multi_turn.tools).

        Returns:
            The message of its result, for the next call of the model.

        Raises:
            httpx.HTTPStatusError: there are no tools, a limit holds, or the rollout has ended.
        """
        message: dict[str, Any] = await self.transport.post("/v1/tool_calls", self.api_key, call)
        return message

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
