"""examples/run_tools_agent.py with a client of its own for each rollout (gateway_step.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

from examples import run_tools_agent
from sglang_rollout.task_agents.client import ClientSettings


class OwnClient:
    """What the example asks of ``ClientSettings``."""

    def __init__(self, settings: ClientSettings) -> None:
        self.model = settings.model
        self._openai = AsyncOpenAI(base_url=settings.base_url, api_key=settings.api_key)

    def openai(self) -> AsyncOpenAI:
        return self._openai

    async def call_tool(self, call: Mapping[str, Any]) -> Any:
        return await self._openai.post("/tool_calls", body=call, cast_to=object)


async def run(task: dict[str, Any], client: ClientSettings) -> None:
    """No reward: ``reward.function`` judges what was said."""
    await run_tools_agent.run(task, OwnClient(client))
