"""Search services and the web's pages, over HTTP.

A service is a class that says what it is asked and how its answer is read:

    class MySearch(WebSearch):
        base_url = "https://search.example.org"     # tools.search.service.base_url replaces it
        key_variable = "MY_SEARCH_KEY"              # environment variable of its key (self.key); None: it needs none

        def question(self, query, k):
            return Question("GET", "/search", params={"q": query}, headers={"X-Key": self.key})

        def hits(self, answer):                     # the answer as JSON types; best first
            return [hit(each["url"], each["title"], each["text"]) for each in answer["results"]]

Time limit, pace, retries, what is kept on disk and pages are ``WebSearch``'s. A question that several trajectories ask
at the same time is asked once.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from yarl import URL

from megatron_retool.config import ConfigError, ReadPageConfig, SearchConfig
from tools.search.answer_cache import SearchCache, digest
from tools.search.backends import Page, SearchError
from tools.search.http_client import FetchedAnswer, HttpClient, require_public_host
from tools.search.index import Hit, Passage
from tools.search.web_text import is_text, to_text
from tools.tool import run_method
from untrusted import load_json, without_surrogates

__all__ = ["Bing", "BrightData", "Question", "Retriever", "Serper", "WebSearch", "hit"]

logger = logging.getLogger(__name__)

_ANSWER_BYTES = 16_000_000
_LONGEST_QUERY = 2000
_LONGEST_URL = 2000
_REDIRECTIONS = {301, 302, 303, 307, 308}


@dataclass(frozen=True)
class Question:
    """A request to the service. ``path`` is put after its base URL; ``body`` is sent as JSON."""

    method: str
    path: str
    params: Mapping[str, str] | None = None
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


def hit(url: Any, title: Any, text: Any, score: float = 0.0) -> Hit:
    """A passage found; what is no text counts as empty."""
    url, title, text = (each if isinstance(each, str) else "" for each in (url, title, text))
    return Hit(Passage(url, text, title), score)


class WebSearch:
    """A ``SearchBackend`` that asks a service, and reads pages itself.

    Raises:
        ConfigError: its address or its key is missing.
    """

    base_url: str | None = None
    key_variable: str | None = None

    def __init__(self, config: SearchConfig) -> None:
        service = config.service
        backend = f"tools.search.backend={config.backend}"
        base = service.base_url or self.base_url
        if base is None:
            raise ConfigError(f"{backend} has no address of its own: set tools.search.service.base_url")
        variable = service.api_key_env or self.key_variable
        self.key = os.environ.get(variable, "").strip() if variable else ""
        if variable and not self.key:
            raise ConfigError(
                f"{backend} needs its key in the environment variable {variable}, which is not set or empty "
                "(tools.search.service.api_key_env names another)"
            )
        self._base = base.rstrip("/")
        self._identity = {"backend": config.backend, "url": self._base, "settings": repr(dict(config.backend_kwargs))}
        self._client = HttpClient(service)
        self._cache = SearchCache(service.cache_dir, service.cache_days)
        self._under_way: dict[str, asyncio.Task[Any]] = {}

    def question(self, query: str, k: int) -> Question:
        """What to ask for the ``k`` best passages."""
        raise NotImplementedError(f"{type(self).__name__} defines no question")

    def hits(self, answer: Any) -> list[Hit]:
        """The passages of an answer; more than were asked for are left out."""
        raise NotImplementedError(f"{type(self).__name__} defines no hits")

    def page_question(self, url: str) -> Question | None:
        """What to ask the service for a page; None: the page's own server is asked."""
        return None

    async def search(self, query: str, k: int) -> list[Hit]:
        """The ``k`` best hits; a question that was asked before is answered from the cache."""
        query = " ".join(without_surrogates(query).split())[:_LONGEST_QUERY]
        if not query:
            return []
        rows = await self._kept({**self._identity, "query": query, "k": k}, lambda: self._search(query, k))
        return [hit(*row) for row in rows]

    async def read(self, source: str, limits: ReadPageConfig) -> Page:
        """A page's text; one that was read before comes from the cache."""
        url = checked_url(source, limits)
        through = self._identity if self.page_question(str(url)) is not None else {}
        question = {
            **through,
            "page": str(url),
            "max_bytes": limits.max_bytes,
            "private": limits.allow_private_addresses,
            "hosts": limits.allowed_hosts,
        }
        return Page(*await self._kept(question, lambda: self._page(url, limits)))

    def take_metrics(self) -> dict[str, float]:
        """tool/search/* counts since the last call."""
        counts = self._client.counts
        metrics = {
            "tool/search/requests": float(counts["requests"]),
            "tool/search/retries": float(counts["retries"]),
            "tool/search/failures": float(counts["failures"]),
            "tool/search/cached": float(counts["cached"]),
        }
        counts.clear()
        return metrics

    async def close(self) -> None:
        """Stop what is under way, and close the connections."""
        for task in list(self._under_way.values()):
            if not task.get_loop().is_closed():
                task.cancel()
        await self._client.close()

    async def _kept(self, question: Mapping[str, Any], ask: Callable[[], Awaitable[Any]]) -> Any:
        """The answer from the disk, or from a request that is under way, or from ``ask``."""
        kept = await run_method(self._cache.get, question)
        if kept is not None:
            self._client.counts["cached"] += 1
            return kept
        name = digest(question)
        task = self._under_way.get(name)
        if task is None or task.get_loop() is not asyncio.get_running_loop():
            task = self._under_way[name] = asyncio.create_task(self._asked(name, question, ask))
        # Others may wait for the same answer when this trajectory is cancelled.
        return await asyncio.shield(task)

    async def _asked(self, name: str, question: Mapping[str, Any], ask: Callable[[], Awaitable[Any]]) -> Any:
        try:
            answer = await ask()
            await run_method(self._cache.put, question, answer)
            return answer
        finally:
            self._under_way.pop(name, None)

    async def _search(self, query: str, k: int) -> list[Any]:
        answer = await self._answer(self.question(query, k), _ANSWER_BYTES)
        try:
            result = self.hits(load_json(answer.body.decode()))[:k]
            return [[each.passage.id, each.passage.title, each.passage.text, each.score] for each in result]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            logger.warning("%s: an answer could not be read (%r): %.200r", self._base, error, answer.body)
            raise self._failed("its answer could not be read") from error

    async def _page(self, url: URL, limits: ReadPageConfig) -> list[Any]:
        asked = self.page_question(str(url))
        if asked is not None:
            answer = await self._answer(asked, limits.max_bytes)
            title, text = await run_method(to_text, answer.body, "text/html")
            return [title, text, answer.truncated]
        for _ in range(limits.max_redirects + 1):
            public_only = not limits.allow_private_addresses
            answer = await self._client.request("GET", url, max_bytes=limits.max_bytes, public_only=public_only)
            target = answer.headers.get("Location")
            if answer.status not in _REDIRECTIONS or not target:
                break
            try:
                url = checked_url(str(url.join(URL(target))), limits)
            except ValueError:
                raise SearchError("it leads to what is no URL") from None
        else:
            raise SearchError("too many redirections")
        if not 200 <= answer.status < 300:
            raise SearchError(f"HTTP {answer.status}")
        kind = answer.headers.get("Content-Type", "")
        if not is_text(kind):
            raise SearchError(f"it is no text but {kind.partition(';')[0][:60]}")
        title, text = await run_method(to_text, answer.body, kind)
        return [title, text, answer.truncated]

    async def _answer(self, asked: Question, max_bytes: int) -> FetchedAnswer:
        answer = await self._client.request(
            asked.method,
            URL(self._base + asked.path),
            max_bytes=max_bytes,
            headers=asked.headers,
            params=asked.params,
            body=asked.body,
        )
        if not 200 <= answer.status < 300:
            logger.warning("%s: HTTP %d: %.200r", self._base, answer.status, answer.body)
            raise self._failed(f"HTTP {answer.status}")
        return answer

    def _failed(self, reason: str) -> SearchError:
        self._client.counts["failures"] += 1
        return SearchError(reason)


def checked_url(source: str, limits: ReadPageConfig) -> URL:
    """``source`` as a URL that may be read, as far as its text tells.

    Raises:
        SearchError: it is none, or may not be read.
    """
    source = without_surrogates(source.strip())
    if len(source) > _LONGEST_URL:
        raise SearchError("the URL is too long")
    if not source.isprintable():
        raise SearchError("this is no URL")
    try:
        url = URL(source).with_fragment(None)
        host, credentials = url.host, url.user is not None or url.password is not None
    except ValueError:
        raise SearchError("this is no URL") from None
    if url.scheme not in ("http", "https") or not host:
        raise SearchError("this is no http:// or https:// URL")
    if credentials:
        raise SearchError("URLs with a user name or password are not read")
    allowed = [each.lower().lstrip(".") for each in limits.allowed_hosts]
    name = host.lower().rstrip(".")
    if allowed and not any(name == each or name.endswith(f".{each}") for each in allowed):
        raise SearchError(f"pages of {host[:100]} may not be read")
    if not limits.allow_private_addresses:
        require_public_host(host)
    return url


class Serper(WebSearch):
    """serper.dev, and services that speak its JSON: {"organic": [{"title", "link", "snippet"}]}."""

    base_url = "https://google.serper.dev"
    key_variable = "SERPER_API_KEY"

    def __init__(self, config: SearchConfig, *, country: str | None = None, language: str | None = None) -> None:
        super().__init__(config)
        self._where = {name: value for name, value in (("gl", country), ("hl", language)) if value}

    def question(self, query: str, k: int) -> Question:
        """The request that asks the service."""
        return Question("POST", "/search", body={"q": query, "num": k, **self._where}, headers={"X-API-KEY": self.key})

    def hits(self, answer: Any) -> list[Hit]:
        """The hits in the service's answer."""
        return [hit(each.get("link"), each.get("title"), each.get("snippet")) for each in answer.get("organic") or []]


class Bing(WebSearch):
    """Bing's Web Search API v7, and services that speak its JSON:
    {"webPages": {"value": [{"name", "url", "snippet"}]}}."""

    base_url = "https://api.bing.microsoft.com"
    key_variable = "BING_SEARCH_API_KEY"

    def __init__(self, config: SearchConfig, *, market: str | None = None) -> None:
        super().__init__(config)
        self._where = {"mkt": market} if market else {}

    def question(self, query: str, k: int) -> Question:
        """The request that asks the service."""
        headers = {"Ocp-Apim-Subscription-Key": self.key}
        return Question("GET", "/v7.0/search", params={"q": query, "count": str(k), **self._where}, headers=headers)

    def hits(self, answer: Any) -> list[Hit]:
        """The hits in the service's answer."""
        result = (answer.get("webPages") or {}).get("value") or []
        return [hit(each.get("url"), each.get("name"), each.get("snippet")) for each in result]


class BrightData(WebSearch):
    """Bright Data's SERP API, which asks a search engine: {"organic": [{"link", "title", "description"}]}.

    Args:
        zone: of the SERP API.
        page_zone: a zone of its Web Unlocker, which then reads pages; None: their own servers are asked.
        engine: of which the zone parses the results.
    """

    base_url = "https://api.brightdata.com"
    key_variable = "BRIGHTDATA_API_KEY"

    def __init__(
        self,
        config: SearchConfig,
        *,
        zone: str,
        page_zone: str | None = None,
        engine: str = "https://www.google.com/search",
    ) -> None:
        super().__init__(config)
        self._zone, self._page_zone, self._engine = zone, page_zone, engine

    def question(self, query: str, k: int) -> Question:
        """The request that asks the service."""
        url = URL(self._engine).with_query({"q": query, "num": str(k), "brd_json": "1"})
        return self._request(self._zone, str(url))

    def hits(self, answer: Any) -> list[Hit]:
        """The hits in the service's answer."""
        result = answer.get("organic") or []
        return [hit(each.get("link"), each.get("title"), each.get("description")) for each in result]

    def page_question(self, url: str) -> Question | None:
        """The request that reads a page through the service; None where no zone is set for pages."""
        return None if self._page_zone is None else self._request(self._page_zone, url)

    def _request(self, zone: str, url: str) -> Question:
        headers = {"Authorization": f"Bearer {self.key}"}
        return Question("POST", "/request", body={"zone": zone, "url": url, "format": "raw"}, headers=headers)


class Retriever(WebSearch):
    """A retrieval server of one's own, as Search-R1's and verl's: POST /retrieve with {"queries", "topk",
    "return_scores"} answers {"result": [[{"document": {"id", "contents"}, "score"}]]}. A document's first line is its
    title."""

    def question(self, query: str, k: int) -> Question:
        """The request that asks the service."""
        return Question("POST", "/retrieve", body={"queries": [query], "topk": k, "return_scores": True})

    def hits(self, answer: Any) -> list[Hit]:
        """The hits in the service's answer."""
        result = []
        for each in answer["result"][0]:
            document = each.get("document", each)
            title, _, text = str(document["contents"]).partition("\n")
            score = each.get("score", 0.0)
            result.append(hit(str(document.get("id", "")), title.strip().strip('"'), text, float(score)))
        return result
