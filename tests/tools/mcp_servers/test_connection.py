"""A connection that several calls share: one of them is cancelled, or several find the server gone."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tools.mcp_servers.connection import McpConnection, McpServer, McpUnavailable

needs_mcp = pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="needs the package mcp")


class Client:
    def __init__(self, number: int) -> None:
        self.number = number
        self.gone = asyncio.Event()

    async def call_tool(self, name: str, arguments: dict) -> str:
        if name == "wait":
            await self.gone.wait()
            raise ConnectionResetError("the server has gone")
        return f"{name} of {self.number}"


class Server:
    """Stands in for ``McpServer``."""

    label, start_seconds = "a server", 20.0

    def __init__(self) -> None:
        self.may_begin = asyncio.Event()
        self.clients: list[Client] = []

    @contextlib.asynccontextmanager
    async def client(self):
        self.clients.append(Client(len(self.clients)))
        mine = self.clients[-1]
        await self.may_begin.wait()
        yield mine


def test_who_is_cancelled_while_a_server_begins_does_not_keep_it_from_others():
    async def scenario():
        server = Server()
        connection = McpConnection(server)
        first = asyncio.create_task(connection.call("a", {}, 5))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait({first})
        second = asyncio.create_task(connection.call("b", {}, 5))
        await asyncio.sleep(0.01)
        server.may_begin.set()
        found = await second
        await connection.close()
        return found, len(server.clients)

    assert asyncio.run(scenario()) == ("b of 0", 1)


@needs_mcp
def test_calls_that_find_a_server_gone_leave_its_successor_alone():
    async def scenario():
        server = Server()
        server.may_begin.set()
        connection = McpConnection(server)
        late = [asyncio.create_task(connection.call("wait", {}, 5)) for _ in range(3)]
        await asyncio.sleep(0.01)
        (first,) = server.clients
        await connection.close()  # as the first call does that finds it gone
        assert await connection.call("a", {}, 5) == "a of 1"
        first.gone.set()
        gone = await asyncio.gather(*late, return_exceptions=True)
        again = await connection.call("b", {}, 5)
        await connection.close()
        return gone, again

    gone, again = asyncio.run(scenario())
    assert all(isinstance(error, McpUnavailable) for error in gone)
    assert again == "b of 1", "a call that failed late ends no connection but its own"


@needs_mcp
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("no utf-8", "caf\ufffd"),
        ("no json", "fine"),
        ("unknown id", "fine"),
        ("crash", None),
        ("endless line", None),
        ("huge", None),
    ],
)
def test_what_a_careless_server_writes_does_not_end_the_calls_that_follow(kind: str, said: str | None) -> None:
    server = McpServer((sys.executable, str(Path(__file__).with_name("careless_server.py"))), start_seconds=60.0)

    async def scenario() -> list[str | None]:
        connection = McpConnection(server)
        texts: list[str | None] = []
        for asked in (kind, "plain"):
            try:
                texts.append((await connection.call("answer", {"kind": asked}, 20.0)).content[0].text)
            except McpUnavailable:
                texts.append(None)
        await connection.close()
        return texts

    assert asyncio.run(scenario()) == [said, "fine"]


@needs_mcp
@pytest.mark.parametrize("compressed", [False, True])
def test_a_huge_answer_by_http_ends_its_call_alone(compressed: bool) -> None:
    async def answer(request: web.Request) -> web.Response:
        message = await request.json() if request.method == "POST" else {}
        if "id" not in message:
            return web.Response(status=202 if message else 405)
        if message["method"] == "initialize":
            about = {"name": "careless", "version": "1"}
            version = message["params"]["protocolVersion"]
            result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
        elif message["method"] == "tools/list":
            result = {"tools": [{"name": "answer", "inputSchema": {"type": "object"}}]}
        elif message["method"] == "tools/call":
            length = message["params"]["arguments"]["length"]
            result = {"content": [{"type": "text", "text": "x" * length}]}
        else:
            error = {"code": -32601, "message": "no"}
            return web.json_response({"jsonrpc": "2.0", "id": message["id"], "error": error})
        response = web.json_response({"jsonrpc": "2.0", "id": message["id"], "result": result})
        if compressed and result.get("content") and length > 9:
            response.enable_compression(web.ContentCoding.gzip)
        return response

    async def scenario() -> str:
        application = web.Application()
        application.router.add_route("*", "/mcp", answer)
        async with TestServer(application) as server:
            connection = McpConnection(McpServer(url=str(server.make_url("/mcp"))))
            with pytest.raises(McpUnavailable):
                await connection.call("answer", {"length": 20 << 20}, 20.0)
            text = (await connection.call("answer", {"length": 9}, 20.0)).content[0].text
            await connection.close()
            return text

    assert asyncio.run(scenario()) == "x" * 9
