"""Where a search looks: a protocol, the local corpus, and the registry of what tools.search.backend names.

A backend answers two questions: which passages fit a query, and what the page or document behind one of them says.
``local`` looks in a corpus in memory; the others ask servers (``services``). SearchTool and ReadPageTool of one run
share a backend.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from megatron_retool.config import ConfigError, ReadPageConfig, SearchConfig
from megatron_retool.errors import OperationError
from megatron_retool.registry import ExtensionError, Registry, check_methods
from tools.search.index import BM25Index, CorpusError, Hit
from tools.tool import run_method


class SearchError(OperationError):
    """A search or a page failed. The message is for the model: it holds no address of ours and no key.

    Attributes:
        timed_out: a server did not answer in time.
    """

    def __init__(self, message: str, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


@dataclass(frozen=True)
class Page:
    """A page or document as text; ``truncated``: it has more than tools.read_page.max_bytes."""

    title: str
    text: str
    truncated: bool = False


class SearchBackend(Protocol):
    """Made as ``backend(config: SearchConfig, **tools.search.backend_kwargs)``, before anything runs: it opens nothing.

    All calls come from one event loop, many at the same time.
    """

    async def search(self, query: str, k: int) -> list[Hit]:
        """At most ``k`` passages, best first; a passage's id is what ``read`` takes.

        Raises:
            SearchError: no answer.
        """
        ...

    async def read(self, source: str, limits: ReadPageConfig) -> Page:
        """The page or document ``source``, which the policy names: a URL, or an id in the corpus. Not to be trusted.

        Raises:
            SearchError: it is unknown, refused, or cannot be read.
        """
        ...

    def take_metrics(self) -> dict[str, float]:
        """tool/search/… metrics since the last call."""
        ...

    async def close(self) -> None:
        """Close connections. Called more than once; a later call opens them again."""
        ...


search_backends: Registry[Callable[..., SearchBackend]] = Registry(
    "tools.search.backend",
    takes=("config",),
    built_in={
        "serper": "tools.search.services:Serper",
        "bing": "tools.search.services:Bing",
        "brightdata": "tools.search.services:BrightData",
        "retriever": "tools.search.services:Retriever",
    },
)

_shared: weakref.WeakValueDictionary[str, SearchBackend] = weakref.WeakValueDictionary()


@search_backends.register("local")
class LocalBackend:
    """BM25 in the corpus of tools.search.corpus.

    Raises:
        ConfigError: the corpus is not named, or cannot be read.
    """

    def __init__(self, config: SearchConfig) -> None:
        if config.corpus is None:
            raise ConfigError("tools.search.corpus is not set: name a .parquet or .jsonl file with a column 'text'")
        try:
            self._index = BM25Index.from_file(config.corpus)
        except CorpusError as error:
            raise ConfigError(f"tools.search.corpus: {error}") from error

    async def search(self, query: str, k: int) -> list[Hit]:
        """The ``k`` best passages of the corpus."""
        # In a thread: a search of a large corpus takes milliseconds in which no other trajectory would move.
        hits: list[Hit] = await run_method(self._index.search, query, k)
        return hits

    async def read(self, source: str, limits: ReadPageConfig) -> Page:
        """A document of the corpus by its id.

        Raises:
            SearchError: there is none.
        """
        result = self._index.document(source.strip())
        if not result:
            raise SearchError(f"there is no document {source[:200]!r}: give an id that the search has shown")
        data = "\n\n".join(passage.text for passage in result).encode("utf-8", "replace")
        text = data[: limits.max_bytes].decode("utf-8", "ignore")
        return Page(result[0].title, text, truncated=len(data) > limits.max_bytes)

    def take_metrics(self) -> dict[str, float]:
        """Nothing: a local search has no requests to count."""
        return {}

    async def close(self) -> None:
        """Nothing: a local search has no connection."""


def backend_of(config: SearchConfig) -> SearchBackend:
    """The backend that ``config`` names. Tools share it that differ in nothing but what they show (top_k, show_ranks,
    show_sources).

    Raises:
        ConfigError: a setting of it is missing or wrong.
        ExtensionError: it cannot be loaded or made, or lacks a method.
    """
    settings = repr((config.backend, config.backend_kwargs, config.corpus, config.service))
    result = _shared.get(settings)
    if result is None:
        make = search_backends.bind(config.backend, config.backend_kwargs)
        try:
            result = make(config)
        except ConfigError:
            raise
        except Exception as error:
            raise ExtensionError(f"{make.label}: {make.raised(error)}") from error
        check_methods(make.label, result, SearchBackend, "search", "read", "take_metrics", "close")
        _shared[settings] = result
    return result
