"""The web page's server: JSON below /api/ from the run's files, and the page itself, all from this machine.

It answers only GET, reads nothing outside the folder that it was given, and each answer forbids the page to load or
run anything from elsewhere: what a model wrote is text on it and nothing else.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from run_files.parquet_files import UnreadableFile
from run_viewer.answer_cache import PageCache
from run_viewer.compare_runs import comparison
from run_viewer.curves import curves_page
from run_viewer.run_directories import NoSuchRun, check_below, file_below, run_directory
from run_viewer.runs_table import run_page, runs_page
from run_viewer.step_pages import files_of_step, response_page, search_step, step_page
from run_viewer.timeline import step_time_page, time_page
from run_viewer.tokenizers import Tokenizers, own_files
from untrusted import clipped
from untrusted.http_listener import ForeignCaller, Listener, check_caller, is_loopback, most_connections

PAGE = Path(__file__).parent / "page"
HEADERS = {
    # Plotly draws with style attributes and a style element of its own, and shows its pictures as data: and blob: URLs.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(root: Path, *, any_name: bool = False) -> web.Application:
    """The server of the run, or of the runs, in ``root``.

    Args:
        any_name: answer whatever name the browser has for this machine; see ``check_caller``.
    """
    tokenizers = Tokenizers()
    answers = PageCache()
    # Two at once: each may hold a large file's columns.
    readers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="reader")
    app = web.Application(middlewares=[_guarded, _called_from_here(any_name)])

    def route(path: str, answer: Callable[[web.Request], dict[str, Any]]) -> None:
        def body(request: web.Request) -> bytes:
            # ASCII: a text may hold half a surrogate pair, which is no UTF-8.
            def make() -> bytes:
                try:
                    return json.dumps(answer(request), allow_nan=False).encode("ascii")
                except (OSError, ValueError):
                    raise
                except Exception as error:  # of a file that no check has found out
                    raise UnreadableFile(f"{request.path}: a file that it shows is damaged: {error!r}") from error

            if "step" not in request.match_info:
                return make()
            number = int(request.match_info["step"])
            run_dir = run_directory(root, request.match_info["run"])
            files = files_of_step(run_dir, number)
            check_below(root, files)
            return answers.answer(request.path_qs, [*files, *own_files(run_dir)], make)

        async def handle(request: web.Request) -> web.Response:
            # Reading files takes a while, in which other requests are answered.
            result = await asyncio.get_running_loop().run_in_executor(readers, body, request)
            response = web.Response(body=result, content_type="application/json")
            response.enable_compression()
            return response

        app.router.add_get(path, handle)

    def of_run(function: Callable[..., dict[str, Any]], *numbers: str) -> Callable[[web.Request], dict[str, Any]]:
        def answer(request: web.Request) -> dict[str, Any]:
            run_dir = run_directory(root, request.match_info["run"])
            return function(run_dir, *(int(request.match_info[name]) for name in numbers))

        return answer

    def one_response(request: web.Request) -> dict[str, Any]:
        run_dir = run_directory(root, request.match_info["run"])
        step, group = (int(request.match_info[name]) for name in ("step", "group"))
        decode, problem = tokenizers.of_run(run_dir)
        return response_page(run_dir, step, group, request.match_info["index"], decode, problem)

    run, step = "/api/runs/{run}", r"/steps/{step:\d{1,9}}"
    route("/api/runs", lambda request: runs_page(root))
    route(run, lambda request: run_page(run_directory(root, request.match_info["run"]), request.match_info["run"]))
    route(
        f"{run}/metrics",
        lambda request: curves_page(
            run_directory(root, request.match_info["run"]), [n for n in request.query.get("names", "").split(",") if n]
        ),
    )
    route(f"{run}/time", of_run(time_page))
    route(rf"{run}/time/{{step:\d{{1,9}}}}", of_run(step_time_page, "step"))
    route(run + step, of_run(step_page, "step"))
    route(
        f"{run}{step}/search",
        lambda request: search_step(
            run_directory(root, request.match_info["run"]),
            int(request.match_info["step"]),
            request.query.get("text", ""),
        ),
    )
    route(rf"{run}{step}/{{group:\d{{1,18}}}}/{{index:\d{{1,9}}(?:\.\d{{1,9}})?}}", one_response)
    route(
        "/api/compare",
        lambda request: comparison(*(run_directory(root, request.query.get(name, "")) for name in ("a", "b"))),
    )

    async def run_file(request: web.Request) -> web.StreamResponse:
        path = file_below(run_directory(root, request.match_info["run"]), request.match_info["file"])
        # Logs may hold what a model wrote, and a report is another page: neither may act as part of this one.
        kind = "text/html" if path.suffix == ".html" else "image/png" if path.suffix == ".png" else "text/plain"
        return web.FileResponse(path, headers={"Content-Type": f"{kind}; charset=utf-8"})

    app.router.add_get("/files/{run}/{file:.+}", run_file)
    app.router.add_get("/", _page_file)
    app.router.add_get(r"/page/{file:[a-z_]+\.(?:js|css)}", _page_file)
    app.router.add_get("/page/plotly.min.js", _plotly)
    return app


async def serve(root: Path, host: str, port: int, started: Callable[[str], None]) -> None:
    """Answer until the task is cancelled; ``started`` gets the page's address.

    Raises:
        OSError: the port is taken.
    """
    listener = Listener(build_app(root, any_name=not is_loopback(host)), limit=most_connections())
    try:
        started(f"http://{host}:{await listener.start(host, port)}/")
        await asyncio.Event().wait()
    finally:
        await listener.close()


def plotly_file() -> Path:
    """Plotly's script in the package of that name, which need not be imported for it."""
    result = importlib.util.find_spec("plotly")
    if result is None or result.origin is None:
        raise FileNotFoundError("the package plotly is not installed: run scripts/setup.sh")
    return Path(result.origin).parent / "package_data" / "plotly.min.js"


async def _page_file(request: web.Request) -> web.StreamResponse:
    path = PAGE / request.match_info.get("file", "index.html")
    if not path.is_file():
        raise web.HTTPNotFound
    return web.Response(body=path.read_bytes(), content_type=_TYPES[path.suffix], charset="utf-8")


async def _plotly(request: web.Request) -> web.StreamResponse:
    return web.FileResponse(plotly_file(), headers={"Content-Type": "text/javascript; charset=utf-8"})


@web.middleware
async def _guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Headers on every answer, and errors as JSON that names the file."""
    try:
        response = await handler(request)
    except ForeignCaller as error:
        response = web.json_response({"error": clipped(str(error))}, status=403)
    except (NoSuchRun, FileNotFoundError) as error:
        response = web.json_response({"error": clipped(str(error))}, status=404)
    except (UnreadableFile, OSError) as error:
        response = web.json_response({"error": clipped(str(error))}, status=500)
    except ValueError as error:
        response = web.json_response({"error": clipped(str(error))}, status=400)
    except web.HTTPException as error:
        response = web.json_response({"error": f"{error.status} {error.reason}"}, status=error.status)
    response.headers.update(HEADERS)
    return response


def _called_from_here(any_name: bool) -> Middleware:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        check_caller(request.headers, any_name=any_name)
        return await handler(request)

    return check
