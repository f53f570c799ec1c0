"""The sandbox as an HTTP service with SandboxFusion's API.

    python -m tools.code_interpreter.server --workers 128 --port 8080

POST /run_code runs a snippet (Python, pytest or bash) in a fresh isolated process, POST /run_jupyter a notebook's
cells; POST /session/create, /session/run and /session/close keep a process for several cells; GET /v1/ping answers
"pong"; GET /health tells which isolation is in force; GET /metrics is for Prometheus. Where the environment has
MEGATRON_RETOOL_SANDBOX_TOKEN, every request must show it ("Authorization: Bearer TOKEN"), or is refused with status
401.

A body of more than --max-body-mb is refused with status 413, one that does not come in --body-seconds with 408, and one
for which --max-bodies-mb have no room left with 503. A connection without a request is closed after --idle-seconds, or
as soon as another one needs its place.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import importlib.util
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import prometheus_client
from aiohttp import web

from code_interpreter import jupyter
from code_interpreter.admission import BodyBudget
from code_interpreter.pool import SandboxStartError, WorkerPool
from code_interpreter.protocol import ExecutionRequest, ExecutionResult, Outcome
from code_interpreter.sessions import ENDED
from code_interpreter.settings import DEFAULT_PREIMPORT, ISOLATION_ORDER, TOKEN_VARIABLE, SandboxSettings
from untrusted import load_json
from untrusted.http_listener import (
    BodyRefused,
    ForeignCaller,
    Listener,
    check_caller,
    is_loopback,
    most_connections,
    read_body,
)

logger = logging.getLogger("code_interpreter")

_PARENT_LOOK_SECONDS = 0.5
_HTTP_STATUS = {Outcome.BUSY: 503, Outcome.INVALID_REQUEST: 422}
_MIB = 1 << 20
_DESCRIPTORS_A_WORKER = 6


class Metrics:
    """Prometheus metrics of one server."""

    def __init__(self, pool: WorkerPool) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        self.requests = prometheus_client.Counter(
            "sandbox_requests", "Answered requests by outcome", ["outcome"], registry=self.registry
        )
        buckets = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300)
        self.queue_seconds = prometheus_client.Histogram(
            "sandbox_queue_seconds", "Wait for a worker", registry=self.registry, buckets=buckets
        )
        self.run_seconds = prometheus_client.Histogram(
            "sandbox_run_seconds", "Run time of snippets", registry=self.registry, buckets=buckets
        )
        for name, text, read in (
            ("workers_started", "Worker processes", lambda: pool.started_workers),
            ("workers_busy", "Workers that run a snippet", lambda: pool.busy_workers),
            ("queue_length", "Requests that wait for a worker", lambda: pool.waiting),
            ("worker_restarts", "Workers that died and were replaced", lambda: pool.restarts),
        ):
            prometheus_client.Gauge(f"sandbox_{name}", text, registry=self.registry).set_function(read)
        for outcome in Outcome:
            self.requests.labels(outcome.value)

    def record(self, result: ExecutionResult, waited: float) -> None:
        """Count a request by its outcome, with the seconds that it waited and ran."""
        self.requests.labels(result.outcome.value).inc()
        self.queue_seconds.observe(waited)
        if result.return_code is not None or result.seconds:
            self.run_seconds.observe(result.seconds)


class _Refused(Exception):
    """A request's body is not read; ``status`` and ``outcome`` go into the answer."""

    def __init__(self, status: int, message: str, outcome: Outcome = Outcome.INVALID_REQUEST) -> None:
        super().__init__(message)
        self.status, self.outcome = status, outcome


class SandboxApplication:
    """The HTTP routes over a worker pool.

    Args:
        token: what requests must show; None: nothing, and pages of other sites are refused.
        any_name: of ``check_caller``.
    """

    def __init__(self, pool: WorkerPool, token: str | None = None, *, any_name: bool = False) -> None:
        self._pool = pool
        self._token = token
        self._any_name = any_name
        self._metrics = Metrics(pool)
        self._started = time.monotonic()
        self._has_ipython = importlib.util.find_spec("IPython") is not None
        settings = pool.settings
        self._bodies = BodyBudget(settings.max_body_mb * _MIB, settings.max_bodies_mb * _MIB)
        self.listener: Listener | None = None

    def build(self) -> web.Application:
        """The web application with its routes."""
        application = web.Application(client_max_size=self._bodies.largest, middlewares=[self._check_caller])
        application.router.add_post("/run_code", self.run_code)
        application.router.add_post("/run_jupyter", self.run_jupyter)
        for name in ("create", "run", "close"):
            application.router.add_post(f"/session/{name}", self.session)
        application.router.add_get("/v1/ping", self.ping)
        application.router.add_get("/health", self.health)
        application.router.add_get("/metrics", self.metrics)
        return application

    @web.middleware
    async def _check_caller(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self._token is not None:
            shown = request.headers.get("Authorization", "").encode(errors="replace")
            if not hmac.compare_digest(shown, f"Bearer {self._token}".encode()):
                text = f"the token is missing or wrong: set {TOKEN_VARIABLE} to the one this server was started with"
                raise web.HTTPUnauthorized(text=text, headers={"WWW-Authenticate": "Bearer"})
        else:
            try:
                check_caller(request.headers, any_name=self._any_name)
            except ForeignCaller as error:
                raise web.HTTPForbidden(text=str(error)) from None
        assert self.listener is not None and self.listener.connections is not None
        with self.listener.connections.serving(request.protocol):
            return await handler(request)

    async def run_code(self, http_request: web.Request) -> web.Response:
        """POST /run_code."""
        return await self._answer(http_request, ExecutionRequest.from_json, ExecutionResult.to_json)

    async def session(self, http_request: web.Request) -> web.Response:
        """Create (memory_limit_MB) a session, run (session, code, run_timeout, print_last_expression) a cell in it,
        close (session) it. What an answer of ``run`` says of ``session_open`` holds for the next cell."""
        what, sessions = http_request.path.rpartition("/")[2], self._pool.sessions
        result: Any
        try:
            async with self._body(http_request) as data:
                body = load_json(data)
                request = ExecutionRequest.from_json({"code": "", **body} if isinstance(body, dict) else body)
        except _Refused as refusal:
            return self._refuse(refusal, ExecutionResult.to_json)
        except ValueError as error:
            result = ExecutionResult(Outcome.INVALID_REQUEST, message=str(error))
            return web.json_response(result.to_json(), status=422)
        identifier = str(body.get("session"))
        if what == "create":
            client = http_request.headers.get("X-Client-Id") or http_request.remote or ""
            result = await sessions.create(request.memory_limit_mb, client)
            if not isinstance(result, ExecutionResult):
                return web.json_response({"session": result.id})
        elif what == "close":
            return web.json_response({"closed": await sessions.close(identifier)})
        else:
            last = request.print_last_expression
            last = self._pool.settings.print_last_expression if last is None else last
            result = await sessions.run(identifier, request.code, request.run_timeout, last)
            if result is None:
                result = ExecutionResult(Outcome.SANDBOX_ERROR, message=f"there is no such session: {ENDED}")
        self._metrics.record(result, 0.0)
        answer = {**result.to_json(), "session_open": sessions.has(identifier)}
        return web.json_response(answer, status=_HTTP_STATUS.get(result.outcome, 200))

    async def run_jupyter(self, http_request: web.Request) -> web.Response:
        """POST /run_jupyter; refused where the server's Python lacks IPython."""
        if not self._has_ipython:
            message = "notebooks need IPython, which this server's Python does not have"
            return web.json_response(jupyter.result_to_json(ExecutionResult(Outcome.SANDBOX_ERROR, message=message)))
        return await self._answer(http_request, jupyter.request_from_json, jupyter.result_to_json)

    async def _answer(
        self,
        http_request: web.Request,
        from_json: Callable[[Any], ExecutionRequest],
        to_json: Callable[[ExecutionResult], dict[str, Any]],
    ) -> web.Response:
        try:
            async with self._body(http_request) as body:
                result, waited = await self._run(http_request, body, from_json)
        except _Refused as refusal:
            return self._refuse(refusal, to_json)
        self._metrics.record(result, waited)
        headers = {"Retry-After": "1"} if result.outcome is Outcome.BUSY else {}
        return web.json_response(to_json(result), status=_HTTP_STATUS.get(result.outcome, 200), headers=headers)

    @contextlib.asynccontextmanager
    async def _body(self, http_request: web.Request) -> AsyncIterator[bytes]:
        """The request's body, whose bytes count as held for the length of the block.

        Raises:
            _Refused: it is too large, does not come in time, or has no room beside the others.
        """
        size, largest = self._bodies.size(http_request), self._bodies.largest
        if size > largest:
            raise _Refused(413, f"the body has {size} bytes; at most {largest} are taken (--max-body-mb)")
        with self._bodies.held(size) as free:
            if not free:
                message = "too many bytes of other requests are held (--max-bodies-mb); try again"
                raise _Refused(503, message, Outcome.BUSY)
            try:
                body = await read_body(http_request, self._pool.settings.body_seconds)
            except BodyRefused as error:
                setting = {408: " (--body-seconds)", 413: " (--max-body-mb)"}.get(error.status, "")
                raise _Refused(error.status, f"{error}{setting}") from None
            yield body

    def _refuse(self, refusal: _Refused, to_json: Callable[[ExecutionResult], dict[str, Any]]) -> web.Response:
        """The answer to a request whose body was not read."""
        result = ExecutionResult(refusal.outcome, message=str(refusal))
        self._metrics.record(result, 0.0)
        headers = {"Retry-After": "1"} if refusal.outcome is Outcome.BUSY else {}
        response = web.json_response(to_json(result), status=refusal.status, headers=headers)
        response.force_close()
        return response

    async def _run(
        self, http_request: web.Request, body: bytes, from_json: Callable[[Any], ExecutionRequest]
    ) -> tuple[ExecutionResult, float]:
        """What comes of the request, and its wait for a worker in seconds."""
        try:
            request = from_json(load_json(body))
        except ValueError as error:
            return ExecutionResult(Outcome.INVALID_REQUEST, message=str(error)), 0.0
        client = http_request.headers.get("X-Client-Id") or http_request.remote or ""
        try:
            return await self._pool.run(request, client)
        except Exception as error:
            logger.exception("request failed")
            return ExecutionResult(Outcome.SANDBOX_ERROR, message=f"{type(error).__name__}: {error}"), 0.0

    async def ping(self, _: web.Request) -> web.Response:
        """GET /v1/ping: pong, or 503 where no worker can be isolated any more."""
        if self._pool.broken is not None:
            return web.json_response(f"broken: {self._pool.broken}", status=503)
        return web.json_response("pong")

    async def health(self, _: web.Request) -> web.Response:
        """GET /health: isolation, workers and queue."""
        pool = self._pool
        weak = pool.isolation.get("isolation") == "rlimits"
        body = {
            "status": "down" if not pool.is_up else "broken" if pool.broken else "degraded" if weak else "ok",
            "broken": pool.broken,
            **pool.isolation,
            "workers": {
                "limit": pool.settings.workers,
                "started": pool.started_workers,
                "busy": pool.busy_workers,
                "restarts": pool.restarts,
            },
            "queue": {"waiting": pool.waiting, "limit": pool.settings.max_queue},
            "sessions": {
                "open": pool.sessions.count,
                "limit": pool.settings.most_sessions,
                "reaped": pool.sessions.reaped,
            },
            "memory_limit_mb": pool.settings.memory_limit_mb,
            "print_last_expression": pool.settings.print_last_expression,
            "uptime_seconds": round(time.monotonic() - self._started, 3),
        }
        return web.json_response(body)

    async def metrics(self, _: web.Request) -> web.Response:
        """GET /metrics, in Prometheus' format."""
        body = prometheus_client.generate_latest(self._metrics.registry)
        return web.Response(body=body, headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST})


async def serve(settings: SandboxSettings, options: argparse.Namespace, parent: int | None) -> None:
    """Run until SIGTERM, SIGINT, or the end of process ``parent``; then leave nothing behind.

    Args:
        options: host, port, and where to tell the port when the server answers (port_file, ready_fd).

    Raises:
        SandboxStartError: the isolation asked for is not available, or the port is taken.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if parent is not None:
        _watch_parent(parent, stop)
    host, port = options.host, options.port
    pool = WorkerPool(settings)
    token = os.environ.get(TOKEN_VARIABLE) or None
    application = SandboxApplication(pool, token, any_name=not is_loopback(host))
    application.listener = listener = Listener(
        application.build(),
        limit=most_connections(_DESCRIPTORS_A_WORKER * settings.workers, settings.max_connections),
        idle_seconds=settings.idle_seconds,
        cancels=True,
    )
    try:
        starting = asyncio.ensure_future(pool.start())
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            starting.cancel()
            return
        await starting
        try:
            chosen = await listener.start(host, port)
        except OSError as error:
            message = f"cannot listen on {host}:{port}: {error.strerror}; choose another --port"
            raise SandboxStartError(message) from error
        if stop.is_set():  # told to leave while it started: whoever waits for it must not take it for ready
            return
        for warning in pool.isolation["warnings"]:
            logger.warning("%s", warning)
        print(f"sandbox ready on http://{host}:{chosen} isolation={pool.isolation['isolation']}", flush=True)
        if options.port_file is not None:
            temporary = Path(f"{options.port_file}.{os.getpid()}")
            temporary.write_text(str(chosen))
            temporary.replace(options.port_file)
        if options.ready_fd is not None:
            os.write(options.ready_fd, f"{chosen}\n".encode())
            os.close(options.ready_fd)
        await stop.wait()
    finally:
        listener.stop_accepting()
        await pool.close()
        await listener.close()


def _watch_parent(parent: int, stop: asyncio.Event) -> None:
    """Set ``stop`` when process ``parent`` ends.

    PR_SET_PDEATHSIG would fire when the *thread* that started the server ends, however long its process lives on.
    """
    loop = asyncio.get_running_loop()

    def look() -> None:
        if os.getppid() != parent:
            stop.set()
        else:
            loop.call_later(_PARENT_LOOK_SECONDS, look)

    look()


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The server's command line."""
    defaults = SandboxSettings()
    parser = argparse.ArgumentParser(prog="code-interpreter", description=__doc__.split("\n")[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080, help="0: any free port")
    parser.add_argument("--port-file", help="write the port here when the server is ready")
    parser.add_argument("--ready-fd", type=int, help="write the port to this descriptor when the server is ready")
    parser.add_argument("--workers", type=int, default=defaults.workers, help="snippets that run at the same time")
    parser.add_argument("--isolation", choices=("auto", *ISOLATION_ORDER), default="auto")
    parser.add_argument("--memory-limit-mb", type=int, default=defaults.memory_limit_mb, help="of one snippet")
    parser.add_argument("--max-run-seconds", type=float, default=defaults.max_run_seconds)
    parser.add_argument("--max-processes", type=int, default=defaults.max_processes, help="of one snippet")
    parser.add_argument("--workspace-mb", type=int, default=defaults.workspace_mb, help="files of one snippet")
    parser.add_argument("--max-output-bytes", type=int, default=defaults.max_output_bytes, help="of each stream")
    parser.add_argument("--max-queue", type=int, default=defaults.max_queue, help="requests that may wait")
    parser.add_argument("--max-queue-seconds", type=float, default=defaults.max_queue_seconds)
    parser.add_argument("--max-body-mb", type=int, default=defaults.max_body_mb, help="of one request")
    parser.add_argument("--max-bodies-mb", type=int, default=defaults.max_bodies_mb, help="of all requests at a time")
    parser.add_argument("--body-seconds", type=float, default=defaults.body_seconds, help="until a body has come")
    parser.add_argument("--idle-seconds", type=float, default=defaults.idle_seconds, help="until a request has come")
    parser.add_argument("--max-connections", type=int, default=defaults.max_connections)
    parser.add_argument("--max-sessions", type=int, help="sessions at a time; default: half the workers")
    parser.add_argument("--session-seconds", type=float, default=defaults.session_seconds, help="of one's whole life")
    parser.add_argument("--session-idle-seconds", type=float, default=defaults.session_idle_seconds)
    parser.add_argument("--print-last-expression", action="store_true", help="as an interactive interpreter does")
    parser.add_argument(
        "--preimport", nargs="*", default=list(DEFAULT_PREIMPORT), help="modules that every snippet finds imported"
    )
    parser.add_argument("--read-only-path", action="append", default=[], help="a directory that snippets may read")
    parser.add_argument("--die-with-parent", action="store_true", help="stop when the process that started this ends")
    parsed = parser.parse_args(arguments)
    positive = ("workers", "memory_limit_mb", "max_run_seconds", "max_processes", "workspace_mb", "max_output_bytes")
    sessions = ("max_sessions", "session_seconds", "session_idle_seconds")
    for name in (
        *positive,
        *sessions,
        "max_body_mb",
        "max_bodies_mb",
        "body_seconds",
        "idle_seconds",
        "max_connections",
    ):
        value = getattr(parsed, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    return parsed


def main(arguments: list[str] | None = None) -> int:
    """Run the server until it is ended; the exit status."""
    parsed = parse_arguments(arguments)
    parent = os.getppid() if parsed.die_with_parent else None
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Each running request holds five or six descriptors and each client one; the usual soft limit is 1024.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    settings = SandboxSettings(
        workers=parsed.workers,
        isolation=parsed.isolation,
        memory_limit_mb=parsed.memory_limit_mb,
        max_run_seconds=parsed.max_run_seconds,
        max_processes=parsed.max_processes,
        workspace_mb=parsed.workspace_mb,
        max_output_bytes=parsed.max_output_bytes,
        max_queue=parsed.max_queue,
        max_queue_seconds=parsed.max_queue_seconds,
        max_body_mb=parsed.max_body_mb,
        max_bodies_mb=parsed.max_bodies_mb,
        body_seconds=parsed.body_seconds,
        idle_seconds=parsed.idle_seconds,
        max_connections=parsed.max_connections,
        max_sessions=parsed.max_sessions,
        session_seconds=parsed.session_seconds,
        session_idle_seconds=parsed.session_idle_seconds,
        print_last_expression=parsed.print_last_expression,
        preimport=tuple(parsed.preimport),
        read_only_paths=tuple(parsed.read_only_path),
    )
    with contextlib.suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    try:
        asyncio.run(serve(settings, parsed, parent))
    except SandboxStartError as error:
        print(f"sandbox: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
