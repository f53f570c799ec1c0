"""Search over a local corpus as a tool: a query in, the best passages out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_retool.config import ConfigError, SearchConfig
from tools.search.index import BM25Index, CorpusError, Hit
from tools.tool import Tool, ToolResult


class SearchTool(Tool):
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

    def __init__(self, config: SearchConfig) -> None:
        """Read and index the corpus.

        Raises:
            ConfigError: the corpus is not named, or cannot be read.
        """
        if config.corpus is None:
            raise ConfigError("tools.search.corpus is not set: name a .parquet or .jsonl file with a column 'text'")
        try:
            self._index = BM25Index.from_file(config.corpus)
        except CorpusError as error:
            raise ConfigError(f"tools.search.corpus: {error}") from error
        self._config = config

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        started = time.monotonic()
        # In a thread: a search of a large corpus takes milliseconds in which no other trajectory would move.
        hits = await asyncio.to_thread(self._index.search, arguments["query"], self._config.top_k)
        return ToolResult("ok", describe(hits, self._config), time.monotonic() - started)


def describe(hits: Sequence[Hit], config: SearchConfig) -> str:
    """What the model reads of a search."""
    return "\n\n".join(_render(number, hit, config) for number, hit in enumerate(hits, 1)) or "No passage matches."


def _render(number: int, hit: Hit, config: SearchConfig) -> str:
    passage = hit.passage
    text = f"{passage.title}\n{passage.text}" if passage.title else passage.text
    return f"[{number}] {text}" if config.show_ranks else text
