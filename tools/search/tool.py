"""Search over a local corpus as a tool: a query in, the best passages out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from tools.search.index import BM25Index, Hit
from tools.tool import ToolResult


class SearchTool:
    """Returns the passages of a corpus that match a query best."""

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

    def __init__(self, index: BM25Index, top_k: int) -> None:
        self._index = index
        self._top_k = top_k

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        started = time.monotonic()
        # In a thread: a search of a large corpus takes milliseconds in which no other trajectory would move.
        hits = await asyncio.to_thread(self._index.search, arguments["query"], self._top_k)
        text = "\n\n".join(_render(number, hit) for number, hit in enumerate(hits, 1)) or "No passage matches."
        return ToolResult("ok", text, time.monotonic() - started)

    async def close(self) -> None:
        return None


def _render(number: int, hit: Hit) -> str:
    passage = hit.passage
    return f"[{number}] {passage.title}\n{passage.text}" if passage.title else f"[{number}] {passage.text}"
