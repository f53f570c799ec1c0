"""Tools and prompts for tests: answers by name, with faults on demand."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Result:
    status: str
    text: str
    seconds: float = 0.001


class ScriptedTools:
    """code_interpreter answers 42 (or 900 letters); other names are unknown. ``timeout_rate`` of calls time out."""

    def __init__(self, timeout_rate: float = 0.0, seconds: float = 0.0) -> None:
        self.timeout_rate = timeout_rate
        self.seconds = seconds
        self.calls: list[tuple[str, Any]] = []
        self.running = self.most_running = 0
        self._random = random.Random(0)

    async def call(self, name: str, arguments: Any) -> Result:
        self.calls.append((name, arguments))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.running -= 1
        if name != "code_interpreter":
            return Result("unknown_tool", f"Error: unknown tool {name}")
        if self._random.random() < self.timeout_rate:
            return Result("timeout", "Error: the code did not finish in time")
        if "raise" in str(arguments):
            raise RuntimeError("the sandbox is gone")
        return Result("ok", "x" * 900 if "900" in str(arguments) else "42")


@dataclass
class Prompt:
    prompt_ids: list[int]
    group_id: int
    extra_info: Mapping[str, Any] = field(default_factory=dict)
