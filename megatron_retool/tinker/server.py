"""The HTTP server of the Tinker protocol: routes, keys, bodies and errors. What is behind them is ``service.py``."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from megatron_retool.target_sequences import RequestRefused
from megatron_retool.tinker.promises import Outcome
from megatron_retool.tinker.requests import metadata, read_copy_weights, read_create_model, required_text
from megatron_retool.tinker.rest import Rest, path_of_route
from megatron_retool.tinker.service import TinkerService
from sglang_rollout.gateway.api import shown_key
from sglang_rollout.gateway.errors import ApiError, invalid
from sglang_rollout.gateway.fields import Json, flag
from sglang_rollout.gateway.text_size import too_many_values
from untrusted import load_json
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

PREFIX = "/api/v1"
FILES = "/files"
MOST_BODY_BYTES = 64 << 20
"""Of a forward_backward. Clients cut calls at 5 MB, but one datum may be longer."""
MOST_JSON_BYTES = 32 << 20
MOST_JSON_VALUES = 4_000_000
"""Of a prompt and the targets that are to be scored; others take far less."""
SMALL_BODY_BYTES = 16 << 10
"""JSON up to here is read at once; more is read in a thread, so that no other call waits."""
POLL_SECONDS = 20.0
"""How long a client's question for a result waits; clients give up after 45 s."""
METADATA_BYTES = 100_000
"""From this size on, a client that asks for it gets to know the size of a result first."""
SHUTDOWN_SECONDS = 2.0
PROTOBUF = "application/x-protobuf"
_KEYS = ("tml-", "eyJ")
_UNEMBED = (
    "train_unembed has no effect on this server: adapters are on attention and MLP layers, not on the output layer"
)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
logger = logging.getLogger(__name__)


class TinkerServer:
    """Answers clients of Tinker. An asynchronous context manager, of one event loop.

    Args:
        service: entered.
        host: address to listen on.
        port: 0: a free one.
        api_key: that every call must show; None: any of the right form. It is needed where ``host`` is not loopback.
        poll_seconds: how long a client's question for a result waits.

    Attributes:
        port: where it listens, once it was entered.
    """

    def __init__(
        self,
        service: TinkerService,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        assert api_key is not None or is_loopback(host)
        self.port = port
        self._service, self._rest = service, Rest(service)
        self._host, self._api_key, self._poll_seconds = host, api_key, poll_seconds
        self._listener: Listener | None = None

    async def __aenter__(self) -> TinkerServer:
        application = web.Application(client_max_size=MOST_BODY_BYTES, middlewares=[self._guard])
        application.add_routes(self._routes())
        self._listener = Listener(application, limit=most_connections(), shutdown_seconds=SHUTDOWN_SECONDS)
        self.port = await self._listener.start(self._host, self.port)
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._listener is not None:
            await self._listener.close()

    def _routes(self) -> list[web.RouteDef]:
        service, rest = self._service, self._rest
        training, sampling = service.training, service.sampling
        posts: dict[str, Callable[[Json], Awaitable[dict[str, Any] | None]]] = {
            "client/config": _answers({"pjwt_auth_enabled": False}),
            "client/dynamic_config": _answers({"sample_cancel_enabled": True}),
            "telemetry": _answers({"status": "accepted"}),
            "session_heartbeat": self._heartbeat,
            "create_model": lambda body: training.create(read_create_model(body)),
            "get_info": _at_once(lambda body: rest.get_info(required_text(body, "model_id"))),
            "optim_step": training.optim_step,
            "save_weights": training.save_weights,
            "save_weights_for_sampler": training.save_weights_for_sampler,
            "save_weights_external": training.save_weights_external,
            "load_weights": training.load,
            "create_sampling_session": sampling.open,
            "asample": sampling.sample,
            "cancel_future": self._cancel,
            "weights_info": _at_once(rest.weights_info),
        }
        gets: dict[str, Callable[[web.Request], dict[str, Any]]] = {
            "healthz": lambda http: {"status": "ok"},
            "get_server_capabilities": lambda http: rest.capabilities(),
            "samplers/{id}": lambda http: rest.sampler(http.match_info["id"]),
            "sessions": lambda http: rest.sessions(http.query),
            "sessions/{id}": lambda http: rest.session(http.match_info["id"]),
            "training_runs": lambda http: rest.training_runs(http.query),
            "training_runs/{run}": lambda http: rest.training_run(http.match_info["run"]),
            "training_runs/{run}/checkpoints": lambda http: rest.run_checkpoints(http.match_info["run"]),
            "checkpoints": lambda http: rest.checkpoints(http.query),
        }
        one = f"{PREFIX}/training_runs/{{run}}/checkpoints/{{kind}}/{{name}}"
        return [
            *(web.post(f"{PREFIX}/{path}", self._with_body(answer)) for path, answer in posts.items()),
            *(web.get(f"{PREFIX}/{path}", _get(answer)) for path, answer in gets.items()),
            web.post(f"{PREFIX}/create_session", self._create_session),
            web.post(f"{PREFIX}/copy_weights", self._copy_weights),
            web.post(f"{PREFIX}/sessions/{{id}}/finish", self._finish),
            web.post(f"{PREFIX}/forward_backward", self._forward_backward),
            web.post(f"{PREFIX}/retrieve_future", self._retrieve),
            web.delete(one, self._delete),
            web.post(f"{one}/publish", self._publish),
            web.delete(f"{one}/publish", self._publish),
            web.put(f"{one}/ttl", self._set_lifetime),
            web.get(f"{one}/external_weights_urls", self._external_urls),
            web.get(f"{FILES}/{{token}}/{{name}}", self._download),
        ]

    # Who may call, and what is answered where something is wrong.

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._check_key(request)
            return await handler(request)
        except ApiError as error:
            return _refusal(error.status, str(error))
        except RequestRefused as error:
            return _refusal(400, str(error))
        except BodyRefused as error:
            return _refusal(error.status, str(error))
        except web.HTTPException as error:
            return _refusal(error.status, f"{request.method} {request.path[:200]}: {error.reason}")
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            logger.exception("tinker: %s %s", request.method, request.path)
            return _refusal(500, f"{type(error).__name__}: {error}")

    def _check_key(self, http: web.Request) -> None:
        key = shown_key(http.headers)
        if self._api_key is not None and hmac.compare_digest(key.encode(errors="replace"), self._api_key.encode()):
            return
        try:
            check_caller(http.headers, any_name=not is_loopback(self._host))
        except ForeignCaller as error:
            raise ApiError(403, str(error), code="foreign_caller") from None
        if http.path.startswith(f"{FILES}/"):
            return  # whoever knows the URL
        if self._api_key is not None:
            raise ApiError(401, "the API key is missing or wrong: set TINKER_API_KEY", code="invalid_api_key")
        if not key.startswith(_KEYS):
            raise ApiError(401, "the API key is missing: set TINKER_API_KEY=tml-local", code="invalid_api_key")

    async def _body(self, http: web.Request, most: int = MOST_JSON_BYTES) -> bytes:
        if http.content_length is not None and http.content_length > most:
            raise ApiError(413, f"the body has more than {most >> 20} MiB", code="request_too_large")
        body = await read_body(http, BODY_SECONDS)
        if len(body) > most:
            raise ApiError(413, f"the body has more than {most >> 20} MiB", code="request_too_large")
        return body

    async def _json(self, http: web.Request) -> Json:
        body = await self._body(http)
        result = _loaded(body) if len(body) <= SMALL_BODY_BYTES else await asyncio.to_thread(_loaded, body)
        if not isinstance(result, dict):
            raise invalid("body", "expected an object")
        return result

    def _with_body(self, answer: Callable[[Json], Awaitable[dict[str, Any] | None]]) -> Handler:
        async def handle(http: web.Request) -> web.Response:
            body = await self._json(http)
            with self._serving(http):
                return _reply(await answer(body))

        return handle

    def _serving(self, http: web.Request) -> Any:
        """Until its body is there, a connection has to make room for others."""
        assert self._listener is not None and self._listener.connections is not None
        return self._listener.connections.serving(http.protocol)

    # Sessions.

    async def _create_session(self, http: web.Request) -> web.Response:
        body = await self._json(http)
        tags = body.get("tags") or []
        if not isinstance(tags, list) or not all(isinstance(each, str) for each in tags) or len(tags) > 64:
            raise invalid("tags", "expected at most 64 texts")
        session = await self._service.sessions.create(
            [each[:200] for each in tags], metadata(body), _idempotency_key(http)
        )
        return _reply({"type": "create_session", "session_id": session.record.id, "warning_message": _UNEMBED})

    async def _heartbeat(self, body: Json) -> dict[str, Any]:
        self._service.sessions.alive(required_text(body, "session_id"))
        return {"type": "session_heartbeat"}

    async def _finish(self, http: web.Request) -> web.Response:
        await self._json(http)
        await self._service.finish(self._service.sessions.find(http.match_info["id"]))
        return web.Response(status=204)

    # Calls whose results come later.

    async def _forward_backward(self, http: web.Request) -> web.Response:
        if http.content_type != PROTOBUF:
            raise invalid("Content-Type", f"expected {PROTOBUF}: a later or earlier client may send another")
        body = await self._body(http, MOST_BODY_BYTES)
        with self._serving(http):
            return _reply(await self._service.training.forward_backward(body))

    async def _retrieve(self, http: web.Request) -> web.Response:
        body = await self._json(http)
        identifier = required_text(body, "request_id")
        wants_metadata = flag(body, "allow_metadata_only")
        with self._serving(http):
            outcome = await self._service.promises.wait(identifier, self._poll_seconds)
        if outcome is None:
            waiting = {"type": "try_again", "request_id": identifier, "queue_state": "active"}
            return web.json_response(waiting, status=408)
        size = len(outcome.payload)
        if wants_metadata and size > METADATA_BYTES:
            return _reply({"status": "complete_metadata", "request_id": identifier, "response_payload_size": size})
        self._service.promises.take(identifier)
        return _outcome(outcome)

    async def _cancel(self, body: Json) -> None:
        self._service.promises.cancel(required_text(body, "request_id"))

    # Checkpoints.

    async def _copy_weights(self, http: web.Request) -> web.Response:
        request = read_copy_weights(await self._json(http))
        with self._serving(http):
            return _reply(await self._service.training.copy(request, _idempotency_key(http)))

    async def _delete(self, http: web.Request) -> web.Response:
        await self._rest.delete(_path(http))
        return web.Response(status=204)

    async def _publish(self, http: web.Request) -> web.Response:
        await self._rest.publish(_path(http), http.method == "POST")
        return web.Response(status=204)

    async def _set_lifetime(self, http: web.Request) -> web.Response:
        await self._rest.set_lifetime(_path(http), await self._json(http))
        return web.Response(status=204)

    async def _external_urls(self, http: web.Request) -> web.Response:
        root = f"{http.scheme}://{http.host}{FILES}"
        return _reply(self._rest.external_weights_urls(_path(http), root))

    async def _download(self, http: web.Request) -> web.StreamResponse:
        return web.FileResponse(self._service.downloads.find(http.match_info["token"], http.match_info["name"]))


def _loaded(body: bytes) -> Any:
    if too_many_values(body, MOST_JSON_VALUES):
        raise invalid("body", f"it has more than {MOST_JSON_VALUES} values")
    try:
        return load_json(body)
    except ValueError as error:
        raise invalid("body", f"no JSON: {error}") from error


def _idempotency_key(http: web.Request) -> str:
    return http.headers.get("X-Idempotency-Key", "")[:200]


def _path(http: web.Request) -> Any:
    return path_of_route(*(http.match_info[name] for name in ("run", "kind", "name")))


def _answers(answer: dict[str, Any]) -> Callable[[Json], Awaitable[dict[str, Any]]]:
    async def give(body: Json) -> dict[str, Any]:
        return answer

    return give


def _at_once(answer: Callable[[Json], dict[str, Any]]) -> Callable[[Json], Awaitable[dict[str, Any]]]:
    async def give(body: Json) -> dict[str, Any]:
        return answer(body)

    return give


def _get(answer: Callable[[web.Request], dict[str, Any]]) -> Handler:
    async def handle(http: web.Request) -> web.Response:
        return _reply(answer(http))

    return handle


def _reply(answer: dict[str, Any] | None) -> web.Response:
    if answer is None:
        return web.Response(status=204)
    return web.Response(body=orjson.dumps(answer), content_type="application/json")


def _outcome(outcome: Outcome) -> web.Response:
    return web.Response(body=outcome.payload, content_type=PROTOBUF if outcome.is_protobuf else "application/json")


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"detail": message}, status=status)
