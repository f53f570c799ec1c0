"""Who may call a listener, and what comes of requests that are no HTTP or only half of it."""

from __future__ import annotations

import asyncio
import resource
import socket
import time

import pytest
from aiohttp import web
from multidict import CIMultiDict

from untrusted.http_listener import (
    BodyRefused,
    Connections,
    ForeignCaller,
    Listener,
    check_caller,
    is_loopback,
    most_connections,
    read_body,
)

IDLE_SECONDS, BODY_SECONDS = 1.0, 0.5
OWN_NAME = socket.gethostname()


def refused(*headers: tuple[str, str], any_name: bool = False) -> bool:
    try:
        check_caller(CIMultiDict(headers), any_name=any_name)
    except ForeignCaller as error:
        assert len(str(error)) < 400 and ("localhost" in str(error) or "pages of other sites" in str(error))
        return True
    return False


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:80", "localhost", "LOCALHOST.:81", "[::1]:80", "10.1.2.3", "[fd00::1]", OWN_NAME, f"{OWN_NAME}:1"],
)
def test_this_machine_may_be_called_by_its_names_and_addresses(host):
    assert not refused(("Host", host))
    assert not refused(("Host", host), ("Origin", f"http://{host}"))
    assert not refused(("Host", host), ("Origin", f"http://{host}"), any_name=True)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "[::", "", "x" * 9000],
)
def test_a_name_that_leads_here_is_refused_on_loopback_and_to_pages_everywhere(host):
    assert refused(("Host", host))
    assert not refused(("Host", host), any_name=True)
    assert refused(("Host", host), ("Origin", f"http://{host}"), any_name=True)


@pytest.mark.parametrize("any_name", [False, True])
@pytest.mark.parametrize(
    "headers",
    [
        [("Origin", "https://evil.example")],
        [("Origin", "null")],
        [("Origin", "http://127.0.0.1:8001")],
        [("Origin", "http://127.0.0.1")],
        [("Origin", "http://127.0.0.1:8000"), ("Origin", "http://evil.example")],
        [("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "no-cors")],
        [("Sec-Fetch-Site", "same-site")],
    ],
)
def test_pages_of_other_sites_are_refused(headers, any_name):
    assert refused(("Host", "127.0.0.1:8000"), *headers, any_name=any_name)


def test_links_own_pages_and_callers_without_a_browser_are_answered():
    assert not refused(("Host", "127.0.0.1:8000"), ("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "navigate"))
    assert not refused(("Host", "127.0.0.1:8000"), ("Sec-Fetch-Site", "same-origin"), ("Sec-Fetch-Mode", "cors"))
    assert not refused()


def test_loopback():
    assert [is_loopback(host) for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "node7", "")] == [False] * 5


async def answers(*requests: bytes) -> list[tuple[bytes, float]]:
    """What each of them, sent at once, is answered until its connection ends, and after how many seconds that is."""

    async def handle(request: web.Request) -> web.Response:
        try:
            return web.Response(text=f"{len(await read_body(request, BODY_SECONDS))} bytes")
        except BodyRefused as error:
            return web.Response(status=error.status, text=str(error))

    application = web.Application(client_max_size=1000)
    application.router.add_route("*", "/{path:.*}", handle)
    listener = Listener(application, limit=64, idle_seconds=IDLE_SECONDS)
    port = await listener.start("127.0.0.1", 0)

    async def one(request: bytes) -> tuple[bytes, float]:
        began = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        return answer, time.monotonic() - began

    try:
        return await asyncio.gather(*map(one, requests))
    finally:
        await listener.close()


POST = b"POST / HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "request_",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"\x00" * 100_000,
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET http://[x HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: x\r\n" % number for number in range(3000)) + b"\r\n",
        POST + b"Content-Length: -5\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nZZZ\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab\r\nZZZ\r\n",
        POST + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nnone",
        POST + b"Content-Length: 2\r\n\r\nok" + b"\x00" * 100_000,
    ],
)
def test_what_is_no_http_is_told_so_shortly_and_leaves_no_traceback(request_, caplog, capfd):
    ((answer, seconds),) = asyncio.run(answers(request_))
    last = answer.rpartition(b"HTTP/1.")[2]
    assert last.split()[1] == b"400" and len(last) < 1000 and seconds < 5
    assert not caplog.records and capfd.readouterr() == ("", "")


def test_half_a_request_ends_in_time():
    whole = POST + b"Content-Length: 2\r\n\r\nok"
    half = [b"", b"POST / HTT", POST + b"Auth", POST + b"Content-Length: 99\r\n\r\nx", whole, whole + POST + b"Auth"]
    got = asyncio.run(answers(*half))
    assert [answer.split()[1] if answer else b"" for answer, _ in got] == [b"", b"", b"", b"408", b"200", b"200"]
    assert all(seconds < IDLE_SECONDS + 3 for _, seconds in got)


def test_a_large_body_is_refused():
    ((answer, _),) = asyncio.run(answers(POST + b"Content-Length: 2000\r\nConnection: close\r\n\r\n" + b"x" * 2000))
    assert answer.split()[1] == b"413"


def test_who_makes_room_for_whom():
    async def scenario() -> None:
        async def handler(request: web.BaseRequest) -> web.Response:
            if request.headers.get("Proof"):
                with connections.serving(request.protocol):
                    if request.path == "/wait":
                        await release.wait()
            return web.Response(text="ok")

        release = asyncio.Event()
        aiohttp_server = web.Server(handler)
        connections = Connections(aiohttp_server, limit=4)
        listener = await asyncio.get_running_loop().create_server(connections.accept, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]

        async def opened(said: str = "") -> asyncio.StreamReader:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(writer)
            writer.write(said.encode())
            await writer.drain()
            if said and "/wait" not in said:
                assert b"200" in await reader.readuntil(b"ok")
            await asyncio.sleep(0.01)
            return reader

        writers: list[asyncio.StreamWriter] = []
        proven = await opened("GET / HTTP/1.1\r\nHost: x\r\nProof: 1\r\n\r\n")
        busy = await opened("GET /wait HTTP/1.1\r\nHost: x\r\nProof: 1\r\n\r\n")
        unproven = [await opened("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), await opened()]
        newer = await opened()
        await asyncio.sleep(0.05)
        assert unproven[0].at_eof() and not any(each.at_eof() for each in (proven, busy, unproven[1], newer))
        for _ in range(3):
            newest = await opened("GET / HTTP/1.1\r\nHost: x\r\nProof: 1\r\n\r\n")
        await asyncio.sleep(0.05)
        assert unproven[1].at_eof() and newer.at_eof() and proven.at_eof(), "the oldest idle one is the next"
        assert not busy.at_eof() and not newest.at_eof() and connections.closed == 4
        release.set()
        assert b"200" in await busy.readuntil(b"ok")
        for writer in writers:
            writer.close()
        listener.close()
        await aiohttp_server.shutdown(1)

    asyncio.run(scenario())


def test_connections_leave_descriptors_for_the_workers(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 4096))
    assert most_connections(768, 8192) == 4096 - 128 - 256 - 768
    assert most_connections(768, 100) == 100
    assert most_connections(600_000, 8192) == 64
