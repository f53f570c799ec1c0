"""Search as a tool, in a corpus or in the web: a query in, the best passages out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_retool.config import SearchConfig
from tools.search.backends import SearchError, backend_of
from tools.search.index import Hit
from tools.tool import Tool, ToolResult


class SearchTool(Tool):
    """Returns the passages that match a query best, as tools.search.backend has them."""

    name = "search"
    schema: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": name,
            "description": "Search a collection of texts and return the passages that match best.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string", "description": "What to look for."}},
                "required": ["query"],
            },
        },
    }

    def __init__(self, config: SearchConfig) -> None:
        """Make the backend: a corpus is read and indexed, nothing is connected.

        Raises:
            ConfigError, ExtensionError: it cannot be made.
        """
        self._config = config
        self._backend = backend_of(config)

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Search for ``arguments["query"]``; the hits as text."""
        started = time.monotonic()
        try:
            hits = await self._backend.search(arguments["query"], self._config.top_k)
        except SearchError as error:
            status, text = ("timeout" if error.timed_out else "error"), f"Error: the search failed: {error}"
        else:
            status, text = "ok", describe(hits, self._config)
        return ToolResult(status, text, time.monotonic() - started)

    def take_metrics(self) -> dict[str, float]:
        """The backend's counts since the last call."""
        return self._backend.take_metrics()

    async def stop(self) -> None:
        """Close the backend."""
        await self._backend.close()


def describe(hits: Sequence[Hit], config: SearchConfig) -> str:
    """What the model reads of a search."""
    return "\n\n".join(_render(number, hit, config) for number, hit in enumerate(hits, 1)) or "No passage matches."


def _render(number: int, hit: Hit, config: SearchConfig) -> str:
    passage = hit.passage
    text = f"{passage.title}\n{passage.text}" if passage.title else passage.text
    if config.show_sources and passage.id:
        text = f"({passage.id}) {text}"
    return f"[{number}] {text}" if config.show_ranks else text
