"""Tools and prompts for tests: answers by name, with faults on demand."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.tool import Tool, ToolCaller, ToolResult, ToolSession, TrajectoryInfo


class ScriptedTools:
    """code_interpreter answers 42 (or 900 letters); other names are unknown. ``timeout_rate`` of calls time out."""

    def __init__(self, timeout_rate: float = 0.0, seconds: float = 0.0) -> None:
        self.timeout_rate = timeout_rate
        self.seconds = seconds
        self.calls: list[tuple[str, Any]] = []
        self.running = self.most_running = 0
        self._random = random.Random(0)

    async def open(self, trajectory: TrajectoryInfo) -> ScriptedTools:
        return self

    def schemas(self, extra_info: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        return [Counter.schema]

    async def close(self, returned: dict[str, Any]) -> None:
        return None

    async def call(self, name: str, arguments: Any) -> ToolResult:
        self.calls.append((name, arguments))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.running -= 1
        if name != "code_interpreter":
            return ToolResult("unknown_tool", f"Error: unknown tool {name}")
        if self._random.random() < self.timeout_rate:
            return ToolResult("timeout", "Error: the code did not finish in time")
        if "raise" in str(arguments):
            raise RuntimeError("the sandbox is gone")
        return ToolResult("ok", "x" * 900 if "900" in str(arguments) else "42")


class Counter(Tool):
    """A code_interpreter with a session: it answers how many calls the trajectory has made, earlier ones included."""

    name = "code_interpreter"
    schema: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": name,
            "description": "Count.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.opened: list[TrajectoryInfo] = []
        self.closed: list[dict[str, int]] = []

    async def open(self, trajectory: TrajectoryInfo, *, first: int = 0) -> dict[str, int]:
        self.opened.append(trajectory)
        return {"count": first + len(trajectory.earlier_calls.get(self.name, ()))}

    async def call(self, arguments: Mapping[str, Any], session: dict[str, int], *, step: int = 1) -> str:
        await asyncio.sleep(self.seconds)
        session["count"] += step
        return str(session["count"])

    async def close(self, session: dict[str, int], *, label: str = "count") -> dict[str, int]:
        await asyncio.sleep(0)
        self.closed.append(session)
        return {label: session["count"]}


class FaultyTools:
    """Real tools, of whose calls ``timeout_rate`` time out and ``error_rate`` raise."""

    def __init__(self, tools: ToolCaller, timeout_rate: float, error_rate: float) -> None:
        self.tools = tools
        self.timeout_rate, self.error_rate = timeout_rate, error_rate
        self.answered = self.running = 0
        self._random = random.Random(0)

    async def open(self, trajectory: TrajectoryInfo) -> FaultySession:
        return FaultySession(self, await self.tools.open(trajectory))

    def schemas(self, extra_info: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        return self.tools.schemas(extra_info)

    async def call(self, session: ToolSession, name: str, arguments: Any) -> ToolResult:
        chance = self._random.random()
        if chance < self.timeout_rate:
            return ToolResult("timeout", "Error: the code did not finish in time")
        if chance < self.timeout_rate + self.error_rate:
            raise RuntimeError("the tool is broken")
        self.running += 1
        try:
            result = await session.call(name, arguments)
        finally:
            self.running -= 1
        self.answered += 1
        return result


@dataclass
class FaultySession:
    """A trajectory's share of FaultyTools."""

    faults: FaultyTools
    session: ToolSession

    async def call(self, name: str, arguments: Any) -> ToolResult:
        return await self.faults.call(self.session, name, arguments)

    async def close(self, returned: dict[str, Any]) -> None:
        await self.session.close(returned)


@dataclass
class Prompt:
    prompt_ids: list[int]
    group_id: int
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()
