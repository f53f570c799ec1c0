"""What a tool hands to the model, in the demo's demonstrations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ToolOutput:
    """Result of one call."""

    text: str
    succeeded: bool
    """Code ran without an error and printed something; a query found something."""
