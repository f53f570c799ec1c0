"""Search services against a server on this machine: what they are asked, what becomes of their answers and failures."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megatron_retool.config import ConfigError, SearchConfig, SearchServiceConfig, ToolsConfig, load_config
from megatron_retool.ports import free_port
from megatron_retool.registry import ExtensionError
from tests.tools.search.conftest import Service
from tools.registry import ToolRegistry, check_tools
from tools.search.backends import SearchError, backend_of
from tools.search.index import Hit, Passage
from tools.search.services import WebSearch
from tools.tool import ToolResult, TrajectoryInfo

ORGANIC = {"organic": [{"title": f"T{i}", "link": f"https://e.org/{i}", "snippet": f"text {i}"} for i in range(5)]}


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SERPER_API_KEY", "BING_SEARCH_API_KEY", "BRIGHTDATA_API_KEY"):
        monkeypatch.setenv(name, "secret-key")


def config(base: str, backend: str = "serper", /, **settings: Any) -> SearchConfig:
    shared = {name: settings.pop(name) for name in ("top_k", "show_sources", "backend_kwargs") if name in settings}
    return SearchConfig(backend=backend, service=SearchServiceConfig(base_url=base, **settings), **shared)


CASES = [
    (
        "serper",
        {"country": "fr"},
        ORGANIC,
        ("POST", "/search", {"q": "capital of France", "num": 2, "gl": "fr"}, ("x-api-key", "secret-key")),
        ["https://e.org/0", "https://e.org/1"],
    ),
    (
        "bing",
        {"market": "en-GB"},
        {"webPages": {"value": [{"name": "Paris", "url": "https://p.fr", "snippet": "on the Seine"}]}},
        (
            "GET",
            "/v7.0/search?q=capital+of+France&count=2&mkt=en-GB",
            None,
            ("ocp-apim-subscription-key", "secret-key"),
        ),
        ["https://p.fr"],
    ),
    (
        "brightdata",
        {"zone": "serp1"},
        {"organic": [{"title": "Paris", "link": "https://p.fr", "description": "on the Seine"}]},
        (
            "POST",
            "/request",
            {
                "zone": "serp1",
                "url": "https://www.google.com/search?q=capital+of+France&num=2&brd_json=1",
                "format": "raw",
            },
            ("authorization", "Bearer secret-key"),
        ),
        ["https://p.fr"],
    ),
    (
        "retriever",
        {},
        {"result": [[{"document": {"id": "7", "contents": '"Paris"\nOn the Seine.'}, "score": 3.5}]]},
        ("POST", "/retrieve", {"queries": ["capital of France"], "topk": 2, "return_scores": True}, None),
        ["7"],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_what_a_service_is_asked_and_how_its_answer_is_read(case: tuple[Any, ...]) -> None:
    name, kwargs, answer, (method, path, body, header), urls = case
    service = Service(answer)

    async def scenario() -> list[Hit]:
        async with service.serving() as base:
            backend = backend_of(config(base, name, backend_kwargs=kwargs))
            hits = await backend.search(" capital  of France", 2)
            await backend.close()
            return hits

    hits = asyncio.run(scenario())
    ((asked_method, asked_path, headers, asked_body),) = service.asked
    assert (asked_method, asked_path, asked_body) == (method, path, body)
    assert header is None or headers[header[0]] == header[1]
    assert [hit.passage.id for hit in hits] == urls
    if name == "retriever":
        assert hits == [Hit(Passage("7", "On the Seine.", "Paris"), 3.5)]


@pytest.mark.parametrize("answer", [{}, {"organic": None}, {"organic": []}])
def test_no_result_is_no_failure(answer: Any) -> None:
    assert ask(Service(answer)).text == "No passage matches."


def ask(service: Service, *queries: str, **settings: Any) -> Any:
    """What the search tool answers to each query, one after the other; the metrics are in ``service.metrics``."""

    async def scenario() -> list[ToolResult]:
        async with service.serving() as base:
            tools = ToolsConfig(search=config(base, **settings))
            async with ToolRegistry.from_config(tools, ["search"]) as registry:
                session = await registry.open(TrajectoryInfo(0, 0))
                results = [await session.call("search", {"query": query}) for query in queries or ("apple",)]
                service.metrics = registry.take_metrics()  # type: ignore[attr-defined]
                return results

    results = asyncio.run(scenario())
    return results if queries else results[0]


def metrics(service: Any) -> list[float]:
    return [service.metrics[f"tool/search/{name}"] for name in ("requests", "retries", "failures", "cached")]


def test_the_tool_shows_sources() -> None:
    result = ask(Service(ORGANIC), top_k=2, show_sources=True)
    assert result.text == "[1] (https://e.org/0) T0\ntext 0\n\n[2] (https://e.org/1) T1\ntext 1"
    assert result.status == "ok" and result.seconds > 0


def test_passing_failures_are_tried_again() -> None:
    service = Service(web.Response(status=503), web.Response(status=429, headers={"Retry-After": "0.02"}), ORGANIC)
    began = time.monotonic()
    assert ask(service).status == "ok"
    assert time.monotonic() - began >= 0.02, "the server asked for that"
    assert metrics(service) == [3.0, 2.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "requests", "words"),
    [
        (lambda: web.Response(status=503), 3, "HTTP 503"),
        (lambda: web.Response(status=403, text="secret-key is no key"), 1, "HTTP 403"),
        (lambda: web.Response(status=302, headers={"Location": "https://elsewhere.org"}), 1, "HTTP 302"),
        (lambda: web.Response(text="<html>"), 1, "could not be read"),
        (lambda: web.Response(body=b"\xff"), 1, "could not be read"),
        (lambda: web.json_response([1]), 1, "could not be read"),
        (lambda: web.json_response({"organic": ["text"]}), 1, "could not be read"),
    ],
)
def test_a_failure_is_told_to_the_model_without_the_key(
    answer: Any, requests: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def made(_: web.Request) -> web.Response:
        response: web.Response = answer()
        return response

    service = Service(made)
    result = ask(service, retries=2)
    assert result.status == "error" and result.text.startswith("Error: the search failed: ") and words in result.text
    assert metrics(service) == [requests, requests - 1.0, 1.0, 0.0]
    assert service.base not in result.text and "secret" not in result.text
    assert service.base in caplog.text


def test_a_slow_service_is_a_timeout() -> None:
    async def slow(_: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    service = Service(slow)
    result = ask(service, timeout_seconds=0.2, retries=1)
    assert (result.status, result.text) == ("timeout", "Error: the search failed: no answer within 0.2 s")
    assert metrics(service) == [2.0, 1.0, 1.0, 0.0]


def test_a_service_out_of_reach() -> None:
    async def scenario() -> None:
        backend = backend_of(config(f"http://127.0.0.1:{free_port()}", retries=1))
        with pytest.raises(SearchError, match="no connection"):
            await backend.search("apple", 3)
        await backend.close()

    asyncio.run(scenario())


def test_hostile_queries_are_asked_or_not_but_raise_nothing() -> None:
    service = Service(ORGANIC)
    results = ask(service, "\ud800 x", "a\nb\x00", "é" * 9000, "  ", top_k=1)
    assert [result.status for result in results] == ["ok"] * 4
    assert [body["q"] for *_, body in service.asked] == ["\N{REPLACEMENT CHARACTER} x", "a b\x00", "é" * 2000]


def test_what_was_found_is_kept_on_disk_for_other_runs(tmp_path: Path) -> None:
    service = Service(ORGANIC)
    kept = {"cache_dir": str(tmp_path / "kept"), "show_sources": True}
    first = ask(service, "apple", " apple ", "pear", **kept)
    assert len(service.asked) == 2 and metrics(service) == [2.0, 0.0, 0.0, 1.0]
    assert first[0].text == first[1].text
    (file, *_) = sorted((tmp_path / "kept").rglob("*.json"))
    assert "secret" not in file.read_text()

    async def again(days: float | None) -> None:
        settings = config(service.base, **kept, cache_days=days, retries=0)
        backend = backend_of(dataclasses.replace(settings))
        assert [hit.passage.id for hit in await backend.search("apple", 3)] == [f"https://e.org/{i}" for i in range(3)]
        assert backend.take_metrics()["tool/search/requests"] == 0.0
        await backend.close()

    asyncio.run(again(None))  # the service is gone
    with pytest.raises(SearchError):
        asyncio.run(again(1e-9))
    for each in (tmp_path / "kept").rglob("*.json"):
        each.write_text(each.read_text()[:-5])
    with pytest.raises(SearchError):
        asyncio.run(again(None))


def test_other_settings_are_another_question(tmp_path: Path) -> None:
    service = Service(ORGANIC)
    for kwargs in ({}, {"country": "fr"}, {}):
        ask(service, cache_dir=str(tmp_path), backend_kwargs=kwargs, top_k=3)
    ports = {json.loads(each.read_text())["question"]["url"] for each in tmp_path.rglob("*.json")}
    assert len(service.asked) == 3 and len(ports) == 3, "each test server has a port of its own"


def test_a_disk_that_keeps_nothing_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    service = Service(ORGANIC)
    results = ask(service, "apple", "pear", cache_dir=str(tmp_path / "file"))
    assert [each.status for each in results] == ["ok", "ok"] and caplog.text.count("was not written") == 1


def test_trajectories_that_ask_the_same_at_once_ask_once() -> None:
    async def slow(_: web.Request) -> web.Response:
        await asyncio.sleep(0.1)
        return web.json_response(ORGANIC)

    service = Service(slow)

    async def scenario() -> None:
        async with service.serving() as base:
            backend = backend_of(config(base))
            calls = [asyncio.create_task(backend.search("apple", 3)) for _ in range(8)]
            other = asyncio.create_task(backend.search("pear", 3))
            await asyncio.sleep(0.02)
            calls[0].cancel()  # its trajectory has ended; the others go on
            found = await asyncio.gather(*calls, other, return_exceptions=True)
            assert isinstance(found[0], asyncio.CancelledError)
            assert all(len(hits) == 3 for hits in found[1:])
            await backend.close()

    asyncio.run(scenario())
    assert len(service.asked) == 2


def test_the_pace_is_held() -> None:
    service = Service(ORGANIC)
    began = time.monotonic()
    ask(service, *"abcde", requests_per_second=50)
    assert time.monotonic() - began >= 4 / 50 and len(service.asked) == 5


class Own(WebSearch):
    """Half a service."""


class Half:
    def __init__(self, config: SearchConfig) -> None: ...

    def search(self) -> None: ...


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["tools.search.backend=serper"], "in the environment variable SERPER_API_KEY, which is not set"),
        (["tools.search.backend=serper", "tools.search.service.api_key_env=MINE"], "environment variable MINE"),
        (["tools.search.backend=retriever"], "set tools.search.service.base_url"),
        (["tools.search.backend=bink"], "tools.search.backend='bink' is not one of local, serper, bing"),
        (["tools.search.backend=brightdata"], "needs zone: set tools.search.backend_kwargs"),
        (["tools.search.backend=local", "tools.search.backend_kwargs={depth: 2}"], "tools.search.backend_kwargs.depth"),
        (["tools.search.backend=local"], "tools.search.corpus is not set"),
        (["tools.search.service.base_url=search.example.org"], "must be a URL such as https://"),
        ([f"tools.search.backend={__name__}:Half"], "Half has no method read"),
    ],
)
def test_a_backend_that_cannot_be_used_is_refused(
    overrides: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SERPER_API_KEY")
    with pytest.raises((ConfigError, ExtensionError)) as caught:
        config = load_config(None, ["rollout.multi_turn.tools=[search, read_page]", *overrides])
        check_tools(config.tools, config.rollout)
    assert words in str(caught.value)


def test_a_backend_of_ones_own() -> None:
    async def scenario() -> None:
        backend = backend_of(config("http://127.0.0.1:1", f"{__name__}:Own"))
        with pytest.raises(NotImplementedError, match="Own defines no question"):
            await backend.search("apple", 3)

    asyncio.run(scenario())
