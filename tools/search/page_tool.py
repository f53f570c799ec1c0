"""Reading a page of the web, or a document of the corpus, as a tool: a URL or id in, its text out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from megatron_retool.config import ReadPageConfig, SearchConfig
from tools.search.backends import SearchError, backend_of
from tools.tool import Tool, ToolResult

__all__ = ["ReadPageTool"]


class ReadPageTool(Tool):
    """Returns the text of what a search has found, as tools.search.backend has it."""

    name = "read_page"
    schema: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": name,
            "description": "Read the page or document that a search has found.",
            "parameters": {
                "type": "object",
                "properties": {"source": {"type": "string", "description": "Its URL or id, as the search shows it."}},
                "required": ["source"],
            },
        },
    }

    def __init__(self, config: ReadPageConfig, search: SearchConfig) -> None:
        """Make the backend that the search has too.

        Raises:
            ConfigError, ExtensionError: it cannot be made.
        """
        self._config = config
        self._backend = backend_of(search)

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Read the page ``arguments["source"]``, cut to the limit."""
        started = time.monotonic()
        try:
            page = await self._backend.read(arguments["source"], self._config)
        except SearchError as error:
            status, text = ("timeout" if error.timed_out else "error"), f"Error: the page cannot be read: {error}"
        else:
            whole = f"{page.title}\n{page.text}" if page.title else page.text
            limit = self._config.max_characters
            status, text = "ok", whole or "The page is empty."
            if page.truncated or len(whole) > limit:
                text = f"{whole[:limit]}\n... [the rest is left out]"
        return ToolResult(status, text, time.monotonic() - started)

    def take_metrics(self) -> dict[str, float]:
        """The backend's counts since the last call."""
        return self._backend.take_metrics()

    async def stop(self) -> None:
        """Close the backend."""
        await self._backend.close()
