"""A server with the paths of search services and with a few pages."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tools.search import http_client

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Service:
    """Answers every path with ``answers``' next element, and keeps what it was asked.

    An element is a JSON value, a ``web.Response``, or a function of the request. The last one stays.
    """

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, str, dict[str, str], Any]] = []
        """(method, path with query, headers, body as JSON types or None)."""
        self.base = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append((request.method, request.path_qs, headers, json.loads(body) if body else None))
        following = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(following):
            following = await following(request)
        return following if isinstance(following, web.StreamResponse) else web.json_response(following)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        server = TestServer(app, host="127.0.0.1")
        await server.start_server()
        try:
            self.base = str(server.make_url("")).rstrip("/")
            yield self.base
        finally:
            await server.close()


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "_FIRST_DELAY_SECONDS", 0.001)
