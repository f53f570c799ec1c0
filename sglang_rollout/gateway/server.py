"""The gateway: open sessions, and the HTTP server through which agents reach them.

What its addresses are and answer is in ``api.py``; agents of this process need no socket (``in_process.py``).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import gc
import hmac
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from aiohttp import web

from megatron_retool.config import MultiTurnConfig, SamplingConfig
from sglang_rollout.agent.turn_glue import Tokenizer
from sglang_rollout.gateway.api import MAX_BODY_BYTES, Api, ApiRequest, BodyTooLong, shown_key
from sglang_rollout.gateway.conversation import ConversationAnswer, ConversationCall, TextAnswer, TextCall
from sglang_rollout.gateway.errors import ApiError, session_not_found
from sglang_rollout.gateway.in_process import GatewayTransport
from sglang_rollout.gateway.interface import GatewayStatistics, Sampler, SessionLimits
from sglang_rollout.gateway.rendering import ContextRenderer
from sglang_rollout.gateway.sessions import OpenSession, session_settings
from tools.tool import ToolSession
from untrusted.http_listener import (
    BODY_SECONDS,
    BodyRefused,
    ForeignCaller,
    Listener,
    check_caller,
    is_loopback,
    most_connections,
    read_body,
)

SHUTDOWN_SECONDS = 2.0
BACKLOG = 4096
COLLECT_AFTER = 1_000_000
"""Objects that have to be new before the garbage collector looks for cycles among them that nothing refers to. After
Python's 700, and the rounds that follow from it, every call waits for tens of milliseconds, several times a minute."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Door(Protocol):
    """Who may call, and who answers, where sessions are not of one agent each (megatron_retool/serving/)."""

    def session(self, gateway: Gateway, key: str) -> OpenSession:
        """The session of a call that shows ``key``, whichever session its address names.

        Raises:
            ApiError: the key is missing or wrong.
        """
        ...

    async def answer(
        self, session: OpenSession, call: ConversationCall, with_tokens: bool = False
    ) -> list[ConversationAnswer]:
        """As ``OpenSession.answer``."""
        ...

    async def complete(self, session: OpenSession, call: TextCall) -> list[TextAnswer]:
        """As ``OpenSession.complete``."""
        ...

    def knows(self, key: str) -> bool:
        """Whether ``key`` is not in use."""
        ...


class Gateway:
    """Serves agents' API calls from the run's engines. An asynchronous context manager, of one event loop.

    Args:
        sampler: where tokens come from: ``PoolSampler``.
        tokenizer: the model's.
        config: rollout.multi_turn: tool-call format, longest tool result.
        model: the name that answers carry where a request has none.
        host: address to listen on. Where it is not loopback every call must show the session's key.
        port: 0: a free one.
        stop_strings: whether the engines end a turn at a text, for which they have a tokenizer; without it a request
            that asks for that is refused.
        steers: whether they take penalties, and grammars where they have a tokenizer (``engine.base.Steering``).
        door: decides about every call; None: sessions are found by their id or key, and answer by themselves.
        pages: further addresses of GET, which need no key.

    Attributes:
        port: where it listens, once it was entered.
        transport: of httpx's clients in this process, from then on.

    Raises:
        ExtensionError, ChatTemplateError: see ``ContextRenderer``.
    """

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: Tokenizer,
        config: MultiTurnConfig,
        *,
        model: str = "policy",
        host: str = "127.0.0.1",
        port: int = 0,
        stop_strings: bool = True,
        steers: bool = False,
        door: Door | None = None,
        pages: Mapping[str, Handler] | None = None,
    ) -> None:
        self.statistics = GatewayStatistics()
        self.transport: GatewayTransport
        self._api = Api(self, self.statistics, model=model, stop_strings=stop_strings)
        self._renderer = ContextRenderer(tokenizer, config)
        self._sampler = sampler
        self._steers, self._grammars = steers, steers and stop_strings
        self._host, self.port = host, port
        self._door = door
        self._pages = dict(pages or {})
        self._by_id: dict[str, OpenSession] = {}
        self._by_key: dict[str, OpenSession] = {}
        self._needs_key = not is_loopback(host)
        self._listener: Listener | None = None
        self._root = ""

    async def __aenter__(self) -> Gateway:
        spare_collector()
        application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._check_caller])
        for path, page in self._pages.items():
            application.router.add_get(path, page)
        application.router.add_route("*", "/{path:.*}", self._serve)
        # A client that goes away cancels its call, and with it the engine's request.
        # When it ends all sessions are closed: who still reads an answer is not worth waiting for.
        # A call needs a second connection, to an engine.
        self._listener = Listener(
            application,
            limit=most_connections() // 2,
            cancels=True,
            shutdown_seconds=SHUTDOWN_SECONDS,
            backlog=BACKLOG,
        )
        self.port = await self._listener.start(self._host, self.port)
        self._root = f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self.port}"
        self.transport = GatewayTransport(self._api, self._root, asyncio.get_running_loop())
        return self

    async def __aexit__(self, *exception: object) -> None:
        for session in list(self._by_id.values()):
            await session.close()
        if self._listener is not None:
            await self._listener.close()
        gc.collect(1)  # what the sessions left in cycles: no call waits now

    def open_session(
        self,
        sampling: SamplingConfig,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_session: ToolSession | None = None,
        limits: SessionLimits | None = None,
        seed: int | None = None,
        group_id: int = 0,
        index: int = 0,
        calls_choose_sampling: bool = False,
    ) -> OpenSession:
        """A new session; the gateway must have been entered.

        Args:
            sampling: of every call; what a call asks for itself (temperature, top_p, …) is checked and not used.
            tools: schemas shown to the model where a call brings none.
            tool_session: runs calls that come to …/tool_calls; to be closed after the session.
            seed: of the draws; a call may bring its own. Answers in one history differ in all but the first's seed.
            group_id: sessions of one group are sent to the engine that has their prompt in its cache.
            index: of the rollout in its group; for messages.
            calls_choose_sampling: a call's own temperature, top_p, penalties and grammar count. Log-probs are of that
                distribution then.
        """
        settings = session_settings(
            sampling, tools, limits, seed, group_id, index, calls_choose_sampling, self._steers, self._grammars
        )
        session = OpenSession(
            settings, self._renderer, self._sampler, self.statistics, self._root, self._forget, tool_session
        )
        self._by_id[session.id] = self._by_key[session.key] = session
        self.statistics.sessions += 1
        return session

    @property
    def open_sessions(self) -> int:
        """Sessions that are not closed yet."""
        return len(self._by_id)

    def find(self, identifier: str | None, key: str) -> OpenSession:
        """See ``api.Sessions``."""
        if self._door is not None:
            return self._door.session(self, key)
        session = self._by_key.get(key) if identifier is None else self._by_id.get(identifier)
        if session is None:
            raise session_not_found()
        if self._needs_key and not hmac.compare_digest(key.encode(errors="replace"), session.key.encode()):
            raise ApiError(401, "the session's key is missing or wrong: set it as the API key", code="invalid_api_key")
        return session

    async def answers(
        self, session: OpenSession, call: ConversationCall, with_tokens: bool
    ) -> list[ConversationAnswer]:
        """See ``api.Sessions``."""
        if self._door is not None:
            return await self._door.answer(session, call, with_tokens)
        return await session.answer(call, with_tokens)

    async def complete(self, session: OpenSession, call: TextCall) -> list[TextAnswer]:
        """See ``api.Sessions``."""
        if self._door is not None:
            return await self._door.complete(session, call)
        return await session.complete(call)

    def _forget(self, session: OpenSession) -> None:
        self._by_id.pop(session.id, None)
        self._by_key.pop(session.key, None)

    @web.middleware
    async def _check_caller(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        key = shown_key(request.headers)
        if not (key in self._by_key if self._door is None else self._door.knows(key)):
            try:
                check_caller(request.headers, any_name=self._needs_key)
            except ForeignCaller as error:
                refusal = self._api.refusal(request.path, ApiError(403, str(error), code="foreign_caller"))
                assert isinstance(refusal.body, bytes)
                return web.Response(body=refusal.body, status=refusal.status, headers=refusal.headers)
        return await handler(request)

    async def _serve(self, http: web.Request) -> web.StreamResponse:
        with contextlib.ExitStack() as running:

            async def read(most: int) -> bytes:
                body = await _read(http, most)
                # Until here its connection has to make room for others.
                if self._listener is not None and self._listener.connections is not None:
                    running.enter_context(self._listener.connections.serving(http.protocol))
                return body

            reply = await self._api.answer(ApiRequest(http.method, http.path, http.headers, read))
            if isinstance(reply.body, bytes):
                return web.Response(body=reply.body, status=reply.status, headers=reply.headers)
            response = web.StreamResponse(status=reply.status, headers=reply.headers)
            await response.prepare(http)
            for event in reply.body:
                await response.write(event)
            await response.write_eof()
            return response


@functools.cache
def spare_collector() -> None:
    """Leave all that the process has by now out of the garbage collector's rounds, and have it make fewer.

    Once, and before calls come: with torch and transformers loaded a full round takes longer than a hundred calls, all
    of which would wait for it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])
    atexit.register(gc.unfreeze)


async def _read(http: web.Request, most: int) -> bytes:
    try:
        return await read_body(http, BODY_SECONDS, most)
    except BodyRefused as error:
        if error.status == 413:
            raise BodyTooLong from None
        raise ApiError(error.status, str(error), code="invalid_body") from None
