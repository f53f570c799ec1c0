"""The gateway's HTTP server: the APIs' addresses, keys, errors and streams around open sessions.

| address, after the root or after /sessions/<id> | API |
|---|---|
| POST /v1/chat/completions | OpenAI's Chat Completions |
| POST /v1/responses | OpenAI's Responses |
| POST /v1/messages | Anthropic's Messages |
| GET /v1/models | the one model |
| POST /v1/tool_calls | of no API: runs a tool call with the run's tools, answers with the message of its result |

Without /sessions/<id> the session is the key's ("Authorization: Bearer KEY" or "x-api-key: KEY"). With it, the id is
enough on loopback, for agents that bring a key of their own; elsewhere the key must be shown too. Id and key are random
numbers that nobody can guess.

A stream begins when the turn is sampled: an engine's answer comes whole, and an error can still have its status.
"""

from __future__ import annotations

import atexit
import functools
import gc
import hmac
import ipaddress
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from aiohttp import web

from megatron_retool.config import MultiTurnConfig, SamplingConfig
from megatron_retool.untrusted import load_json, without_surrogates
from sglang_rollout.agent.turn_glue import Tokenizer
from sglang_rollout.gateway import anthropic_messages, chat_completions, responses
from sglang_rollout.gateway.conversation import Answer, Call
from sglang_rollout.gateway.errors import ApiError, invalid, session_not_found, unsupported
from sglang_rollout.gateway.interface import GatewayStatistics, Sampler, SessionLimits
from sglang_rollout.gateway.rendering import ContextRenderer
from sglang_rollout.gateway.sessions import OpenSession, session_settings
from tools.tool import ToolSession

logger = logging.getLogger(__name__)

MAX_BODY_MIB = 64
SHUTDOWN_SECONDS = 2.0
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

    async def answer(self, session: OpenSession, call: Call, with_tokens: bool = False) -> list[Answer]:
        """As ``OpenSession.answer``."""
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
        stop_strings: whether the engines end a turn at a text; without it a request that asks for that is refused.
        door: decides about every call; None: sessions are found by their id or key, and answer by themselves.
        pages: further addresses of GET, which need no key.

    Attributes:
        port: where it listens, once it was entered.

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
        door: Door | None = None,
        pages: Mapping[str, Handler] | None = None,
    ) -> None:
        self.statistics = GatewayStatistics()
        self.model = model
        self._renderer = ContextRenderer(tokenizer, config)
        self._sampler = sampler
        self._host, self.port = host, port
        self._stop_strings = stop_strings
        self._door = door
        self._pages = dict(pages or {})
        self._by_id: dict[str, OpenSession] = {}
        self._by_key: dict[str, OpenSession] = {}
        self._needs_key = not is_loopback(host)
        self._runner: web.AppRunner | None = None
        self._root = ""

    async def __aenter__(self) -> Gateway:
        spare_collector()
        application = web.Application(client_max_size=MAX_BODY_MIB << 20, middlewares=[self._errors])
        for prefix in ("", "/sessions/{session}"):
            application.router.add_post(f"{prefix}/v1/chat/completions", self._chat)
            application.router.add_post(f"{prefix}/v1/responses", self._responses)
            application.router.add_post(f"{prefix}/v1/messages", self._messages)
            application.router.add_post(f"{prefix}/v1/tool_calls", self._tool_calls)
            application.router.add_get(f"{prefix}/v1/models", self._models)
        for path, page in self._pages.items():
            application.router.add_get(path, page)
        # A client that goes away cancels its call, and with it the engine's request.
        # When it ends all sessions are closed: who still reads an answer is not worth waiting for.
        self._runner = web.AppRunner(
            application, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self.port, backlog=4096)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self._root = f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self.port}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        for session in list(self._by_id.values()):
            await session.close()
        if self._runner is not None:
            await self._runner.cleanup()
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
            calls_choose_sampling: a call's own temperature and top_p count. Log-probs are of that distribution then.
        """
        settings = session_settings(sampling, tools, limits, seed, group_id, index, calls_choose_sampling)
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

    def _forget(self, session: OpenSession) -> None:
        self._by_id.pop(session.id, None)
        self._by_key.pop(session.key, None)

    def _session(self, request: web.Request) -> OpenSession:
        shown = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self._door is not None:
            return self._door.session(self, shown)
        identifier = request.match_info.get("session")
        session = self._by_key.get(shown) if identifier is None else self._by_id.get(identifier)
        if session is None:
            raise session_not_found()
        if self._needs_key and not hmac.compare_digest(shown.encode(errors="replace"), session.key.encode()):
            raise ApiError(401, "the session's key is missing or wrong: set it as the API key", code="invalid_api_key")
        return session

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        session = self._session(http)
        request = chat_completions.read(await _body(http))
        self._check_stop("stop", request.call.stop)
        answers = await self._answers(session, request.call, request.log_probs)
        if not request.stream:
            return _json(chat_completions.completion(request, answers, self.model))
        chunks = (f"data: {_dumps(chunk)}\n\n" for chunk in chat_completions.chunks(request, answers, self.model))
        return await _stream(http, [*chunks, "data: [DONE]\n\n"])

    async def _responses(self, http: web.Request) -> web.StreamResponse:
        session = self._session(http)
        request = responses.read(await _body(http), session.responses)
        (answer,) = await self._answers(session, request.call)
        session.responses[request.id] = [*request.history, answer.message()]
        if not request.stream:
            return _json(responses.response(request, answer, self.model))
        return await _stream(http, map(_event, responses.events(request, answer, self.model)))

    async def _messages(self, http: web.Request) -> web.StreamResponse:
        session = self._session(http)
        request = anthropic_messages.read(await _body(http))
        self._check_stop("stop_sequences", request.call.stop)
        (answer,) = await self._answers(session, request.call)
        if not request.stream:
            return _json(anthropic_messages.message(request, answer, self.model))
        return await _stream(http, map(_event, anthropic_messages.events(request, answer, self.model)))

    async def _answers(self, session: OpenSession, call: Call, with_tokens: bool = False) -> list[Answer]:
        answering = session.answer if self._door is None else functools.partial(self._door.answer, session)
        return await answering(call, with_tokens)

    async def _tool_calls(self, http: web.Request) -> web.StreamResponse:
        session = self._session(http)
        return _json(await session.run_tool(chat_completions.read_call(await _body(http))))

    async def _models(self, http: web.Request) -> web.StreamResponse:
        self._session(http)
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "megatron-retool"}
        return _json({"object": "list", "data": [model]})

    def _check_stop(self, field: str, stop: Sequence[str]) -> None:
        if stop and not self._stop_strings:
            raise unsupported(field, "the engines have no tokenizer, which ending a turn at a text needs")

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answers every failure in the form of the API that was called."""
        began = time.monotonic()
        try:
            response = await handler(request)
            self.statistics.call_seconds.append(time.monotonic() - began)
            return response
        except ApiError as raised:
            error = raised
        except web.HTTPRequestEntityTooLarge:
            error = ApiError(413, f"the body is larger than {MAX_BODY_MIB} MiB", code="request_too_large")
        except web.HTTPException as raised:
            if raised.status not in (404, 405):
                raise
            error = ApiError(raised.status, f"there is no {request.method} {request.path}", code="unknown_url")
        except ConnectionResetError:
            raise  # of a client that went away while it was answered
        except Exception as raised:
            logger.exception("gateway: %s %s", request.method, request.path)
            error = ApiError(500, f"the gateway failed: {type(raised).__name__}", code="internal_error")
        self.statistics.errors[error.code] += 1
        body = error.anthropic() if request.path.endswith("/messages") else error.openai()
        # Clients would try again, and a limit of the session's whole life does not go away.
        return _json(body, status=error.status, headers={"x-should-retry": "false"})


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


async def _body(http: web.Request) -> dict[str, Any]:
    try:
        body = load_json(await http.read())
    except ValueError as error:
        raise invalid("body", f"no JSON: {error}") from error
    if not isinstance(body, dict):
        raise invalid("body", "expected an object")
    return body


def _dumps(value: Any) -> str:
    return without_surrogates(json.dumps(value, ensure_ascii=False))


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.json_response(text=_dumps(value), status=status, headers=headers)


def _event(event: Mapping[str, Any]) -> str:
    return f"event: {event['type']}\ndata: {_dumps(event)}\n\n"


async def _stream(http: web.Request, events: Iterable[str]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(http)
    for event in events:
        await response.write(event.encode(errors="replace"))
    await response.write_eof()
    return response


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
