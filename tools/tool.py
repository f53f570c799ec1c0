"""What a tool is: a name, an OpenAI function schema, and an asynchronous call that answers with a typed result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

STATUSES = ("ok", "error", "timeout", "unknown_tool", "bad_arguments")


@dataclass(frozen=True)
class ToolResult:
    """What one call came to."""

    status: str
    """One of STATUSES."""
    text: str
    """What the model reads."""
    seconds: float
    """Wall-clock time of the call, with any wait for a free worker."""


class Tool(Protocol):
    """Something that a policy can call."""

    name: str
    schema: dict[str, Any]
    """{"type": "function", "function": {"name", "description", "parameters": JSON schema}}."""

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Run with arguments that satisfy the schema. May raise only where the tool itself is broken."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class ReportsMetrics(Protocol):
    """A tool that counts something of its own."""

    def take_metrics(self) -> dict[str, float]:
        """tool/… metrics since the last call."""
        ...


def shorten_middle(text: str, limit: int) -> str:
    """``text``, or its beginning and end with a note between them where it has more than ``limit`` characters."""
    if len(text) <= limit:
        return text
    note = f"\n... [{len(text) - limit} characters left out] ...\n"
    if len(note) >= limit:
        return text[:limit]
    kept = limit - len(note)
    head = kept - kept // 2
    return text[:head] + note + text[len(text) - kept // 2 :]
