"""Reading pages: what is followed, cut, refused, and turned into text."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from megatron_retool.config import ReadPageConfig, SearchConfig, SearchServiceConfig, ToolsConfig
from tests.tools.search.conftest import Service
from tools.registry import ToolRegistry
from tools.search import http_client
from tools.search.backends import SearchError, backend_of
from tools.search.http_client import is_public
from tools.search.page_tool import ReadPageTool
from tools.search.tool import SearchTool
from tools.search.web_text import html_to_text, is_text, to_text
from tools.tool import ToolResult, TrajectoryInfo

PAGE = "<html><head><title>Paris &amp; Lyon</title><style>p {}</style></head><body><p>On the<b> Seine</b>.</p></body>"


def html(text: str = PAGE, **headers: str) -> web.Response:
    return web.Response(body=text.encode(), content_type="text/html", headers=headers)


def read(
    service: Service, source: str = "{base}/page", backend: str = "retriever", cache: Any = None, **settings: Any
) -> ToolResult:
    """What the tool answers; private addresses are allowed, for the server is one."""
    limits = ReadPageConfig(**{"allow_private_addresses": True, **settings})
    kwargs = {"zone": "serp", "page_zone": "unlocker"} if backend == "brightdata" else {}

    async def scenario() -> ToolResult:
        async with service.serving() as base:
            servers = SearchServiceConfig(base_url=base, retries=0, timeout_seconds=5, cache_dir=cache)
            search = SearchConfig(backend=backend, backend_kwargs=kwargs, service=servers)
            config = ToolsConfig(search=search, read_page=limits)
            async with ToolRegistry.from_config(config, ["read_page"]) as registry:
                session = await registry.open(TrajectoryInfo(0, 0))
                return await session.call("read_page", {"source": source.format(base=base)})

    return asyncio.run(scenario())


def test_a_page_becomes_text() -> None:
    service = Service(html())
    result = read(service, " {base}/page?q=1#part ")
    assert (result.status, result.text) == ("ok", "Paris & Lyon\nOn the Seine.")
    assert [(method, path) for method, path, *_ in service.asked] == [("GET", "/page?q=1")]
    headers = service.asked[0][2]
    assert headers["user-agent"] == "megatron-retool" and "authorization" not in headers and "cookie" not in headers


def test_redirections_are_followed_to_a_limit() -> None:
    def moved(to: str) -> web.Response:
        return web.Response(status=302, headers={"Location": to})

    service = Service(moved("/two"), moved("three"), html())
    assert read(service).status == "ok"
    assert [path for _, path, *_ in service.asked] == ["/page", "/two", "/three"]

    async def on_and_on(_: web.Request) -> web.Response:
        return moved("/on")

    service = Service(on_and_on)
    assert "too many redirections" in read(service, max_redirects=2).text and len(service.asked) == 3


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (web.Response(status=404), "HTTP 404"),
        (web.Response(body=b"%PDF", content_type="application/pdf"), "it is no text but application/pdf"),
        (web.Response(status=302, headers={"Location": "file:///etc/passwd"}), "no http:// or https:// URL"),
        (web.Response(status=302, headers={"Location": "http://[::1"}), "URL"),
        (web.Response(status=302), "HTTP 302"),
    ],
)
def test_what_cannot_be_read_is_told(answer: web.Response, words: str) -> None:
    result = read(Service(answer))
    assert result.status == "error" and result.text.startswith("Error: the page cannot be read: ")
    assert words in result.text


def test_long_pages_are_cut() -> None:
    text = "<p>" + "word " * 5000
    cut = read(Service(html(text)), max_characters=40)
    assert cut.text == "word " * 8 + "\n... [the rest is left out]"
    few = read(Service(html(text)), max_bytes=23)
    assert few.text == "word word word word\n... [the rest is left out]"
    # A few kilobytes on the wire may be gigabytes of text.
    bomb = web.Response(body=gzip.compress(b"a" * 50_000_000), content_type="text/plain")
    bomb.headers["Content-Encoding"] = "gzip"
    result = read(Service(bomb), max_bytes=1000, max_characters=2000)
    assert result.text == "a" * 1000 + "\n... [the rest is left out]"


def test_a_page_is_kept_and_read_again_without_its_server(tmp_path: Path) -> None:
    service = Service(html())

    async def scenario() -> None:
        async with service.serving() as base:
            for limits in (ReadPageConfig(allow_private_addresses=True), ReadPageConfig(allow_private_addresses=True)):
                servers = SearchServiceConfig(base_url=base, cache_dir=str(tmp_path))
                backend = backend_of(SearchConfig(backend="retriever", service=servers))
                assert (await backend.read(f"{base}/page", limits)).title == "Paris & Lyon"
                await backend.close()
            with pytest.raises(SearchError, match="not public"):
                await backend.read(f"{base}/page", ReadPageConfig())

    asyncio.run(scenario())
    assert len(service.asked) == 1


def test_a_service_may_read_pages_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIGHTDATA_API_KEY", "secret-key")
    service = Service(web.Response(body=PAGE.encode(), content_type="application/json"))
    result = read(service, "https://example.org/a", "brightdata", allow_private_addresses=False)
    assert result.text == "Paris & Lyon\nOn the Seine."
    ((method, path, headers, body),) = service.asked
    assert (method, path, headers["authorization"]) == ("POST", "/request", "Bearer secret-key")
    assert body == {"zone": "unlocker", "url": "https://example.org/a", "format": "raw"}
    assert "not public" in read(service, "http://10.0.0.1/", "brightdata", allow_private_addresses=False).text


REFUSED = [
    "file:///etc/passwd", "ftp://example.org/a", "gopher://127.0.0.1", "//example.org", "example.org", "", "http://",
    "http://[::1", "javascript:alert(1)", "data:text/plain,a", "http://me:secret@example.org/", "http://me@example.org/",
    "https://example.org/" + "a" * 3000, "http://\x00/", "http://\ud800/",
]  # fmt: skip


@pytest.mark.parametrize("source", REFUSED, ids=lambda source: ascii(source)[:30])
def test_only_http_urls_without_credentials_are_read(source: str) -> None:
    service = Service(html())
    result = read(service, source.replace("{", "{{"))
    assert result.status == "error" and "URL" in result.text
    assert service.asked == []


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "2130706433", "127.1", "0x7f000001", "0177.0.0.1", "0.0.0.0", "[::1]", "[::]",
     "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "169.254.169.254", "10.1.2.3", "192.168.0.1",
     "100.64.0.1", "224.0.0.1", "[fe80::1%25lo]", "[fd00::1]", "localhost."],
)  # fmt: skip
def test_private_addresses_are_not_read(host: str) -> None:
    service = Service(html())

    async def scenario() -> None:
        async with service.serving() as base:
            port = base.rpartition(":")[2]
            backend = backend_of(SearchConfig(backend="retriever", service=SearchServiceConfig(base, retries=0)))
            with pytest.raises(SearchError) as caught:
                await backend.read(f"http://{host}:{port}/page", ReadPageConfig())
            assert (
                "not public" in str(caught.value) or "no connection" in str(caught.value) or "URL" in str(caught.value)
            )
            await backend.close()

    asyncio.run(scenario())
    assert service.asked == []


def test_a_public_page_cannot_lead_into_a_private_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.1 stands for the public web here; what a redirection leads to is checked like the first address."""
    monkeypatch.setattr(http_client, "is_public", lambda address: is_public(address) or address == "127.0.0.1")
    assert read(Service(html()), allow_private_addresses=False).status == "ok"
    assert read(Service(html()), "http://localhost:1/", allow_private_addresses=False).status == "error"
    for target in ("http://10.0.0.1/", "http://[::1]:{port}/", "file:///etc/passwd"):

        async def moved(request: web.Request, target: str = target) -> web.Response:
            return web.Response(status=301, headers={"Location": target.replace("{port}", str(request.url.port))})

        service = Service(moved)
        assert read(service, allow_private_addresses=False).status == "error" and len(service.asked) == 1


def test_a_name_with_one_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(*_: Any) -> list[dict[str, Any]]:
        return [{"host": "93.184.216.34"}, {"host": "10.0.0.1"}]

    async def scenario() -> None:
        resolver = http_client.PublicResolver()
        monkeypatch.setattr(resolver._resolver, "resolve", resolve)
        with pytest.raises(http_client.PrivateAddress, match="rebinding.example"):
            await resolver.resolve("rebinding.example", 80)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("address", "public"),
    [("93.184.216.34", True), ("2606:4700::1", True), ("64:ff9b::5db8:d822", True), ("2002:5db8:d822::", True),
     ("::ffff:93.184.216.34", True), ("192.0.2.1", False), ("198.18.0.1", False), ("240.0.0.1", False),
     ("255.255.255.255", False), ("ff02::1", False), ("::7f00:1", False), ("64:ff9b::a00:1", False)],
)  # fmt: skip
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) == public


@pytest.mark.parametrize(
    ("host", "allowed"),
    [("example.org", True), ("a.EXAMPLE.org", True), ("example.org.", True), ("notexample.org", False)],
)
def test_hosts_may_be_chosen(host: str, allowed: bool) -> None:
    service = Service(html())
    result = read(service, f"http://{host}:1/", allowed_hosts=["example.org"], allow_private_addresses=False)
    assert result.status == "error" and ("may not be read" in result.text) != allowed


def test_a_document_of_the_corpus_is_read_by_its_id(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    rows = [{"id": "a", "title": "Paris", "text": "On the Seine."}, {"id": "b", "text": "On the Rhône."},
            {"id": "a", "text": "Its second part."}]  # fmt: skip
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = ToolsConfig(search=SearchConfig(corpus=str(corpus), show_sources=True))

    async def scenario() -> None:
        entries = [{"tool": "search", "kwargs": {"top_k": 2}}, "read_page"]
        async with ToolRegistry.from_config(config, entries) as registry:
            search, page = (registry._tools[name].tool for name in ("search", "read_page"))
            assert isinstance(search, SearchTool) and isinstance(page, ReadPageTool)
            assert search._backend is page._backend, "one index for both"
            session = await registry.open(TrajectoryInfo(0, 0))
            assert (await session.call("search", {"query": "Rhône"})).text == "[1] (b) On the Rhône."
            assert (await session.call("read_page", {"source": " a "})).text == (
                "Paris\nOn the Seine.\n\nIts second part."
            )
            unknown = await session.call("read_page", {"source": "/etc/passwd"})
            assert (unknown.status, unknown.text) == (
                "error",
                "Error: the page cannot be read: there is no document '/etc/passwd': give an id that the search has "
                "shown",
            )
            assert not any(name.startswith("tool/search") for name in registry.take_metrics())
        short = ReadPageConfig(max_bytes=9)
        assert (await page._backend.read("b", short)) == (await page._backend.read("b", short))
        assert (await page._backend.read("b", short)).text == "On the Rh" and short.max_bytes == 9

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("plain", ("", "plain")),
        ("<p>a</p><p>b<br>c</p>", ("", "a\nb\nc")),
        ("a<script>if (1 < 2) alert('<p>')</script>b<!-- c --><STYLE>d</STYLE >e", ("", "abe")),
        ("<tr><td>1</td><td>2</td></tr><tr><td>3", ("", "1 2\n3")),
        ("<title> A\n&lt;b&gt; </title>x &amp;lt; y &nbsp; z", ("A <b>", "x &lt; y z")),
        ("1 < 2 and 3 > 2 <3", ("", "1 < 2 and 3 > 2 <3")),
        ("a<b", ("", "a")),
        ("a<!-- never ends", ("", "a")),
        ("a<script>never ends", ("", "a")),
        ("<!DOCTYPE html><?xml?>a<svg><text>drawn</text></svg>", ("", "a")),
        ("line\n  of\ttext <i>here</i>", ("", "line of text here")),
    ],
)
def test_markup(source: str, expected: tuple[str, str]) -> None:
    assert html_to_text(source) == expected


@given(st.text(alphabet="<>/!-ab &;'\"=", max_size=60))
def test_any_markup_becomes_text(source: str) -> None:
    title, text = html_to_text(source)
    assert "\n\n" not in text and "<!--" not in text.replace("< ", "")


@pytest.mark.parametrize(
    "piece", ["<", "<a ", "<!", "<!--", "</", "<?", "<a b='", "<script>", "<script></", "<title>", "<div>", "&", "&#1"]
)
def test_hostile_markup_takes_a_time_in_proportion(piece: str) -> None:
    began = time.process_time()
    html_to_text(piece * (600_000 // len(piece)))
    assert time.process_time() - began < 3.0


@pytest.mark.parametrize(
    ("body", "kind", "expected"),
    [
        ("Rhône".encode("latin-1"), "text/plain; charset=ISO-8859-1", "Rhône"),
        (b'<meta charset="windows-1252"><p>' + "Rhône".encode("cp1252"), "text/html", "Rhône"),
        (b"\xef\xbb\xbfRh\xc3\xb4ne", "text/plain; charset=latin-1", "Rhône"),
        ("Rhône".encode(), "", "Rhône"),
        (b"<p>a", "", "a"),
        (b"a\xff", "text/plain; charset=punycode", "a\N{REPLACEMENT CHARACTER}"),
        (b"a", "text/plain; charset=utf-99", "a"),
        (b"{}", "application/json", "{}"),
    ],
)
def test_encodings(body: bytes, kind: str, expected: str) -> None:
    assert is_text(kind) and to_text(body, kind)[1] == expected
