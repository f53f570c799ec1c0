"""A session's desk for tool calls: the run's own tools, for agents that bring none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_retool.trajectory import RolloutTiming, ToolCall
from sglang_rollout.agent.long_texts import by_size
from sglang_rollout.agent.loop import run_call
from sglang_rollout.agent.written_calls import ParsedCall
from sglang_rollout.gateway.conversation import SpokenCall
from sglang_rollout.gateway.rendering import ContextRenderer
from tools.tool import ToolSession
from untrusted import load_json


class ToolDesk:
    """Runs calls on ``tools``, which whoever opened them closes.

    Attributes:
        at_work: calls under way.
        timing: the seconds in which at least one was, as ``RolloutTiming.tools``.
    """

    def __init__(self, tools: ToolSession, renderer: ContextRenderer) -> None:
        self._tools = tools
        self._renderer = renderer
        self.at_work: set[asyncio.Task[tuple[ToolCall, str]]] = set()
        self.timing = RolloutTiming()
        self._busy_since = 0.0

    async def run(
        self, call: Mapping[str, Any], spoken: SpokenCall | None, deadline_seconds: float
    ) -> tuple[ToolCall, str]:
        """What came of ``call``, a message's tool call, and what the model reads of it.

        Args:
            spoken: the same call as the policy made it; None: it made no such call.

        Raises:
            TimeoutError: it was not done in time.
        """
        if not self.at_work:
            self._busy_since = time.monotonic()
        task = asyncio.create_task(run_call(self._tools, _parsed(call, spoken)))
        self.at_work.add(task)
        try:
            record, text = await asyncio.wait_for(task, deadline_seconds)
        finally:
            self.at_work.discard(task)
            if not self.at_work:
                self.timing = self.timing.plus(tools=time.monotonic() - self._busy_since)
        tokens, truncated = await by_size(len(text), self._renderer.result_size, text)
        return replace(record, output_tokens=tokens, output_truncated=truncated), text

    async def close(self) -> None:
        """Cancel the calls under way."""
        for task in self.at_work:
            task.cancel()
        await asyncio.gather(*self.at_work, return_exceptions=True)


def _parsed(call: Mapping[str, Any], spoken: SpokenCall | None) -> ParsedCall:
    name, written = call["function"]["name"], call["function"]["arguments"]
    if spoken is not None and spoken.error is not None:
        return ParsedCall(name, {}, spoken.raw, spoken.error)
    raw = written if spoken is None else spoken.raw
    try:
        arguments = load_json(written)
    except ValueError as error:
        return ParsedCall(name, {}, raw, f"Error: invalid tool call: {error}")
    if not isinstance(arguments, dict):
        return ParsedCall(name, {}, raw, 'Error: invalid tool call: "arguments" is not an object')
    return ParsedCall(name, arguments, raw)
