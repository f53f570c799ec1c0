"""The APIs' addresses: from a call's method, path, headers and body to its answer, whoever brings it.

| address, after the root or after /sessions/<id> | API |
|---|---|
| POST /v1/chat/completions | OpenAI's Chat Completions |
| POST /v1/completions | OpenAI's Completions, of a served model |
| POST /v1/responses | OpenAI's Responses |
| POST /v1/responses/input_tokens | the tokens of such a request |
| POST /v1/messages | Anthropic's Messages |
| POST /v1/messages/count_tokens | the tokens of such a request |
| GET /v1/models, /v1/models/<name> | the one model, by any name |
| POST /v1/tool_calls | of no API: runs a tool call with the run's tools, answers with the message of its result |

Without /sessions/<id> the session is the key's ("Authorization: Bearer KEY" or "x-api-key: KEY"). With it, the id is
enough on loopback, for agents that bring a key of their own; elsewhere the key must be shown too. Id and key are random
numbers that cannot be guessed.

A stream begins when the turn is sampled: an engine's answer comes whole, and an error can still have its status.

Nothing here knows of sockets: ``server.py`` has the calls of HTTP clients, ``in_process.py`` those of this process.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_retool.tracebacks import drop_tracebacks
from sglang_rollout.agent.long_texts import in_thread
from sglang_rollout.gateway import anthropic_messages, chat_completions, completions, responses
from sglang_rollout.gateway.conversation import ConversationAnswer, ConversationCall, TextAnswer, TextCall
from sglang_rollout.gateway.errors import OVERFLOW, ApiError, invalid, unsupported
from sglang_rollout.gateway.interface import GatewayStatistics
from sglang_rollout.gateway.sessions import OpenSession
from sglang_rollout.gateway.text_size import MOST_JSON_VALUES, too_many_values
from untrusted import load_json, without_surrogates

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
MAX_PROMPTS_BYTES = 8 << 20
"""A body of several prompts may have in any case."""
_ONE_MODEL = "/v1/models/"
_ADDRESS = re.compile(r"(?:/sessions/([^/]+))?(/v1/.+)")


@dataclass(frozen=True)
class ApiRequest:
    """A call as it came.

    Attributes:
        path: of its URL, decoded, without the query.
        headers: by names of any case.
        read: its body. Given the number of bytes that it may have, it raises ``BodyTooLong`` instead of reading more.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    read: Callable[[int], Awaitable[bytes]]


@dataclass(frozen=True)
class Reply:
    """An answer.

    Attributes:
        headers: all but those of its length.
        body: JSON, or the events of a stream.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes | list[bytes]


class Sessions(Protocol):
    """Whose calls they are, and who answers them."""

    def find(self, identifier: str | None, key: str) -> OpenSession:
        """The session of a call to the address of session ``identifier`` (None: to the root) that shows ``key``.

        Raises:
            ApiError: there is none, or the key is missing or wrong.
        """
        ...

    async def answers(
        self, session: OpenSession, call: ConversationCall, with_tokens: bool
    ) -> list[ConversationAnswer]:
        """As ``OpenSession.answer``."""
        ...

    async def complete(self, session: OpenSession, call: TextCall) -> list[TextAnswer]:
        """As ``OpenSession.complete``."""
        ...


_Methods = dict[str, Callable[[OpenSession, ApiRequest], Awaitable[Reply]]]


class Api:
    """Answers calls.

    Args:
        sessions: theirs.
        statistics: where answers and errors are counted.
        model: the name that answers carry where a request has none.
        stop_strings: whether the engines end a turn at a text; without it a request that asks for that is refused.
    """

    def __init__(
        self, sessions: Sessions, statistics: GatewayStatistics, *, model: str, stop_strings: bool = True
    ) -> None:
        self._sessions = sessions
        self._statistics = statistics
        self._model = model
        self._stop_strings = stop_strings
        self._calls: dict[str, _Methods] = {
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._completions},
            "/v1/responses": {"POST": self._responses},
            "/v1/responses/input_tokens": {"POST": self._count_input_tokens},
            "/v1/messages": {"POST": self._messages},
            "/v1/messages/count_tokens": {"POST": self._count_tokens},
            "/v1/tool_calls": {"POST": self._tool_calls},
            "/v1/models": {"GET": self._models, "HEAD": self._models},
        }

    async def answer(self, request: ApiRequest) -> Reply:
        """The answer to a call; every failure is one too, in the form of the API that was called.

        Who cancels this ends the call, and with it the engine's request.

        Raises:
            ConnectionResetError: the caller went away while its body was read.
        """
        began = time.monotonic()
        try:
            reply = await self._answer(request)
            self._statistics.call_seconds.append(time.monotonic() - began)
            return reply
        except ApiError as raised:
            drop_tracebacks(raised)
            error = raised
        except ConnectionResetError:
            raise
        except Exception as raised:
            logger.exception("gateway: %s %s", request.method, request.path)
            error = ApiError(500, f"the gateway failed: {type(raised).__name__}", code="internal_error")
        return self.refusal(request.path, error)

    def refusal(self, path: str, error: ApiError) -> Reply:
        """``error`` as the API of ``path`` tells it; it is counted."""
        self._statistics.errors[error.code] += 1
        told = error.anthropic() if path.endswith(("/v1/messages", "/v1/messages/count_tokens")) else error.openai()
        # Clients would try again, and a limit of the session's whole life does not go away.
        return _json(told, error.status, {"x-should-retry": "false"})

    async def _answer(self, request: ApiRequest) -> Reply:
        result = _ADDRESS.fullmatch(request.path)
        address = "" if result is None else result[2]
        if address.startswith(_ONE_MODEL) and len(address) > len(_ONE_MODEL):
            methods: _Methods | None = {"GET": self._model_of_name, "HEAD": self._model_of_name}
        else:
            methods = self._calls.get(address)
        call = methods.get(request.method) if methods is not None else None
        if result is None or call is None:
            status = 404 if methods is None else 405
            raise ApiError(status, f"there is no {request.method} {request.path}", code="unknown_url")
        return await call(self._sessions.find(result[1], shown_key(request.headers)), request)

    async def _chat(self, session: OpenSession, http: ApiRequest) -> Reply:
        request = chat_completions.read(await _body(http, session))
        self._check_stop("stop", request.call.stop)
        answers = await self._sessions.answers(session, request.call, request.log_probs)
        if not request.stream:
            return _json(chat_completions.completion(request, answers, self._model))
        chunks = (f"data: {_dumps(chunk)}\n\n" for chunk in chat_completions.chunks(request, answers, self._model))
        return _stream([*chunks, "data: [DONE]\n\n"])

    async def _completions(self, session: OpenSession, http: ApiRequest) -> Reply:
        request = completions.read(await _body(http, session, MAX_PROMPTS_BYTES))
        self._check_stop("stop", request.call.stop)
        answers = await self._sessions.complete(session, request.call)
        if not request.stream:
            return await in_thread(_json, completions.completion(request, answers, self._model))
        chunks = (f"data: {_dumps(chunk)}\n\n" for chunk in completions.chunks(request, answers, self._model))
        return await in_thread(_stream, [*chunks, "data: [DONE]\n\n"])

    async def _responses(self, session: OpenSession, http: ApiRequest) -> Reply:
        body: dict[str, Any] = {}
        try:
            body = await _body(http, session)
            request = responses.read(body, session.responses)
            (answer,) = await self._sessions.answers(session, request.call, False)
        except ApiError as error:
            # A body that is too long is not read: what the client accepts says that it waits for a stream.
            streams = body["stream"] is True if "stream" in body else "event-stream" in http.headers.get("accept", "")
            if error.code != OVERFLOW or not streams:
                raise
            self._statistics.errors[error.code] += 1
            return _stream(map(_event, responses.failure_events(body, error.with_traceback(None), self._model)))
        session.responses[request.id] = [*request.history, answer.message()]
        if not request.stream:
            return _json(responses.response(request, answer, self._model))
        return _stream(map(_event, responses.events(request, answer, self._model)))

    async def _messages(self, session: OpenSession, http: ApiRequest) -> Reply:
        request = anthropic_messages.read(await _body(http, session))
        self._check_stop("stop_sequences", request.call.stop)
        (answer,) = await self._sessions.answers(session, request.call, False)
        if not request.stream:
            return _json(anthropic_messages.message(request, answer, self._model))
        return _stream(map(_event, anthropic_messages.events(request, answer, self._model)))

    async def _count_tokens(self, session: OpenSession, http: ApiRequest) -> Reply:
        request = anthropic_messages.read(await _body(http, session), to_count=True)
        return _json({"input_tokens": await session.count_tokens(request.call)})

    async def _count_input_tokens(self, session: OpenSession, http: ApiRequest) -> Reply:
        call = responses.read(await _body(http, session), session.responses).call
        return _json({"object": "response.input_tokens", "input_tokens": await session.count_tokens(call)})

    async def _tool_calls(self, session: OpenSession, http: ApiRequest) -> Reply:
        return _json(await session.run_tool(chat_completions.read_call(await _body(http, session))))

    async def _models(self, session: OpenSession, http: ApiRequest) -> Reply:
        return _json({"object": "list", "data": [_model(self._model)]})

    async def _model_of_name(self, session: OpenSession, http: ApiRequest) -> Reply:
        return _json(_model(http.path.partition(_ONE_MODEL)[2]))

    def _check_stop(self, field: str, stop: Sequence[str]) -> None:
        if stop and not self._stop_strings:
            raise unsupported(field, "the engines have no tokenizer, which ending a turn at a text needs")


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "megatron-retool"}


def shown_key(headers: Mapping[str, str]) -> str:
    """The key that a call shows; empty: none."""
    return headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")


class BodyTooLong(Exception):
    """A body has more bytes than it may have."""


async def _body(request: ApiRequest, session: OpenSession, least: int = 0) -> dict[str, Any]:
    """The object in a body, which may have ``least`` bytes in any case, and otherwise as many as a context holds."""
    most = max(session.max_body_bytes, least)
    announced = request.headers.get("content-length", "")
    if announced.isdecimal():
        _check_length(int(announced), session, most)
    most = min(most, MAX_BODY_BYTES)
    try:
        read = await request.read(most)
    except BodyTooLong:
        _check_length(most + 1, session, most)
        raise
    if too_many_values(read):
        raise invalid("body", f"it has more than {MOST_JSON_VALUES} values")
    try:
        body = load_json(read)
    except ValueError as error:
        raise invalid("body", f"no JSON: {error}") from error
    if not isinstance(body, dict):
        raise invalid("body", "expected an object")
    return body


def _check_length(size: int, session: OpenSession, most: int) -> None:
    if size > MAX_BODY_BYTES:
        raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MiB", code="request_too_large")
    if size > most:
        raise session.too_long(size)


def _dumps(value: Any) -> str:
    return without_surrogates(json.dumps(value, ensure_ascii=False))


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    kind = {"Content-Type": "application/json; charset=utf-8"}
    return Reply(status, {**kind, **(headers or {})}, _dumps(value).encode())


def _event(event: Mapping[str, Any]) -> str:
    return f"event: {event['type']}\ndata: {_dumps(event)}\n\n"


def _stream(events: Iterable[str]) -> Reply:
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    return Reply(200, headers, [event.encode(errors="replace") for event in events])
