"""Several servers behind one client: none of them is missed when it dies, falls silent or is too busy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from sandboxes import start

from code_interpreter.client import CodeInterpreterClient, SandboxUnavailable
from code_interpreter.process import SandboxServerError, SandboxServerProcess, kept_running
from code_interpreter.protocol import ExecutionResult, Outcome
from code_interpreter.settings import TOKEN_VARIABLE, SandboxSettings


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[SandboxServerProcess, SandboxServerProcess]]:
    sandboxes = [start(), start()]
    yield sandboxes[0].process, sandboxes[1].process
    for sandbox in sandboxes:
        sandbox.process.stop()


async def until(condition: Callable[[], bool], seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.02)


async def squares(client: CodeInterpreterClient, count: int, seconds: float = 0.02) -> None:
    """So many requests at once, each with the right answer."""

    async def one(i: int) -> str:
        return (await client.run_code(f"import time\ntime.sleep({seconds})\nprint({i} ** 2)", run_timeout=60)).stdout

    assert await asyncio.gather(*(one(i) for i in range(count))) == [f"{i * i}\n" for i in range(count)]


def counts(client: CodeInterpreterClient, name: str) -> tuple[float, ...]:
    metrics = client.take_metrics()
    return tuple(metrics[f"tool/sandbox_{index}/{name}"] for index in range(len(metrics) // 3))


def test_server_that_is_killed_costs_no_request_and_is_used_again(
    pair: tuple[SandboxServerProcess, SandboxServerProcess],
) -> None:
    victim, _ = pair

    async def scenario() -> None:
        urls = [server.url for server in pair]
        async with CodeInterpreterClient(urls, ping_interval_seconds=0.1) as client:
            load = asyncio.ensure_future(squares(client, 300))
            await asyncio.sleep(0.5)
            os.killpg(victim.pid, signal.SIGKILL)
            killed = time.monotonic()
            await load
            metrics = client.take_metrics()
            assert metrics["tool/sandboxes_up"] == 1
            lost = metrics["tool/sandbox_0/failures"]
            assert lost > 0 and metrics["tool/sandbox_1/retries"] == lost
            assert sum(metrics[f"tool/sandbox_{i}/requests"] for i in (0, 1)) == 300 + lost
            assert time.monotonic() - killed < 60

            await squares(client, 20)
            assert counts(client, "requests") == (0, 20), "all go to the other server"

            assert victim.start() == urls[0]
            await until(lambda: client.take_metrics()["tool/sandboxes_up"] == 2)
            await squares(client, 20)
            assert min(counts(client, "requests")) >= 5

    asyncio.run(scenario())


def test_requests_do_not_wait_for_a_server_that_fell_silent(
    pair: tuple[SandboxServerProcess, SandboxServerProcess],
) -> None:
    """As on a node without power: connections stay open, or are even made, and nothing answers."""
    victim, _ = pair

    async def scenario() -> None:
        settings = {"ping_interval_seconds": 0.1, "ping_timeout_seconds": 3.0}
        async with CodeInterpreterClient([server.url for server in pair], **settings) as client:
            load = asyncio.ensure_future(squares(client, 40, seconds=0.3))
            await asyncio.sleep(0.2)
            os.kill(victim.pid, signal.SIGSTOP)
            started = time.monotonic()
            try:
                await load
                assert time.monotonic() - started < 30
                metrics = client.take_metrics()
                assert metrics["tool/sandbox_0/failures"] > 0 and metrics["tool/sandboxes_up"] == 1
            finally:
                os.kill(victim.pid, signal.SIGCONT)
            await until(lambda: client.take_metrics()["tool/sandboxes_up"] == 2)
            await squares(client, 20)
            assert min(counts(client, "requests")) >= 5

    asyncio.run(scenario())


def test_server_that_is_dropped_or_put_in_its_place(pair: tuple[SandboxServerProcess, SandboxServerProcess]) -> None:
    first, second = (server.url for server in pair)

    async def scenario() -> None:
        async with CodeInterpreterClient([], ping_interval_seconds=0.1) as client:
            load = asyncio.ensure_future(squares(client, 8, seconds=1.0))
            await asyncio.sleep(0.2)
            client.put_server(0, first)  # requests that came before it wait for it
            await until(lambda: client._balancer.servers[0].outstanding == 8)
            client.put_server(1, second)
            client.drop_server(0)
            await load
            assert counts(client, "retries") == (0, 8) and client.urls == [second]
            client.put_server(0, f"{first}/run_code")
            await squares(client, 4)
            assert counts(client, "requests") == (2, 2)

    asyncio.run(scenario())


def test_call_ends_when_no_server_answers_for_long() -> None:
    async def scenario() -> None:
        urls = ["http://127.0.0.1:9", "http://127.0.0.1:7"]
        async with CodeInterpreterClient(urls, give_up_seconds=0.6, ping_interval_seconds=0.1) as client:
            started = time.monotonic()
            with pytest.raises(SandboxUnavailable, match=r"127.0.0.1:[79].*gave up after 0.[0-9] s"):
                await client.run_code("print(1)")
            assert time.monotonic() - started < 5
            assert await client.silent_servers() == urls
            assert min(counts(client, "failures")) >= 1
        async with CodeInterpreterClient([], give_up_seconds=0.2) as client:
            with pytest.raises(SandboxUnavailable, match="there is no server"):
                await client.run_code("print(1)")

    asyncio.run(scenario())


@contextlib.asynccontextmanager
async def server_that_says(result: ExecutionResult | None) -> AsyncIterator[str]:
    """A server with one answer to everything; None: it hangs up without one."""

    async def run_code(request: web.Request) -> web.Response:
        if result is None:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        return web.json_response(result.to_json(), status=503 if result.outcome is Outcome.BUSY else 200)

    async def ping(_: web.Request) -> web.Response:
        return web.json_response("pong")

    application = web.Application()
    application.router.add_post("/run_code", run_code)
    application.router.add_get("/v1/ping", ping)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_call_waits_for_the_server_that_is_started_again(number: signal.Signals) -> None:
    async def scenario() -> None:
        server = SandboxServerProcess(SandboxSettings(workers=1, preimport=[]))
        try:
            async with CodeInterpreterClient([]) as client:
                client.put_server(0, server.start())
                watch = asyncio.create_task(kept_running(server, lambda _: None))
                call = asyncio.create_task(client.run_code("import time; time.sleep(3); print(1)", run_timeout=60))
                await until(lambda: client._balancer.servers[0].outstanding == 1)
                await asyncio.sleep(1)
                os.kill(server.pid, number)
                assert (await call).stdout == "1\n"
                watch.cancel()
        finally:
            server.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("leaves_in_order", [True, False])
def test_server_that_is_killed_while_it_starts_is_started_again(
    number: signal.Signals, leaves_in_order: bool, tmp_path: Path
) -> None:
    starting = tmp_path / "starting"
    # The first start waits for the signal, so that it always comes before the server is ready.
    trap = "trap 'exit 0' TERM; " if leaves_in_order else ""
    wait = f"if mkdir {starting}; then {trap}while :; do sleep 0.05; done; fi"
    server = SandboxServerProcess(
        SandboxSettings(workers=1, preimport=[]), command_prefix=("sh", "-c", f'{wait}; exec "$@"', "sh")
    )
    killed: list[int] = []

    def kill() -> None:
        while server._process is None or not starting.exists():
            time.sleep(0.01)
        killed.append(server.pid)
        os.kill(server.pid, number)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        server.start()
        thread.join()
        assert server.is_running() and killed != [server.pid]
    finally:
        server.stop()


def test_start_that_cannot_succeed_is_not_repeated(tmp_path: Path) -> None:
    log = tmp_path / "log"
    server = SandboxServerProcess(
        SandboxSettings(workers=1, preimport=[]), log_file=log, extra_arguments=("--workers", "0")
    )
    with pytest.raises(SandboxServerError, match="--workers must be positive"):
        server.start()
    assert log.read_text().count("--workers must be positive") == 1


def test_a_sandbox_that_breaks_and_then_is_away_is_waited_for() -> None:
    async def scenario() -> None:
        answers = [ExecutionResult(Outcome.SANDBOX_ERROR, message="broken"), None, None]
        good = ExecutionResult(Outcome.FINISHED, "right\n", "", 0)

        async def run_code(request: web.Request) -> web.Response:
            answer = answers.pop(0) if answers else good
            if answer is None:
                assert request.transport is not None
                request.transport.close()
                return web.Response()
            return web.json_response(answer.to_json())

        application = web.Application()
        application.router.add_post("/run_code", run_code)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with CodeInterpreterClient(url, first_delay_seconds=0.01) as client:
            assert (await client.run_code("code")).stdout == "right\n"
        await runner.cleanup()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "answer",
    [ExecutionResult(Outcome.BUSY, message="full"), ExecutionResult(Outcome.SANDBOX_ERROR, message="broken"), None],
    ids=["busy", "broken", "hangs_up"],
)
def test_answers_that_do_not_serve_come_from_another_server(answer: ExecutionResult | None) -> None:
    good = ExecutionResult(Outcome.FINISHED, "right\n", "", 0)

    async def scenario() -> None:
        async with (
            server_that_says(answer) as bad_url,
            server_that_says(good) as good_url,
            CodeInterpreterClient([bad_url, good_url], first_delay_seconds=0.01) as client,
        ):
            results = await asyncio.gather(*(client.run_code("code") for _ in range(20)))
            assert [result.stdout for result in results] == ["right\n"] * 20
            failures, untouched = counts(client, "failures")
            assert failures > 0 and untouched == 0

    asyncio.run(scenario())


def test_snippet_that_breaks_every_sandbox_is_tried_twice() -> None:
    async def scenario() -> None:
        answer = ExecutionResult(Outcome.SANDBOX_ERROR, message="broken")
        async with (
            server_that_says(answer) as first,
            server_that_says(answer) as second,
            CodeInterpreterClient([first, second], first_delay_seconds=0.01) as client,
        ):
            assert (await client.run_code("code")).outcome is Outcome.SANDBOX_ERROR
            assert counts(client, "requests") == (1, 1)

    asyncio.run(scenario())


def test_token() -> None:
    config = SandboxSettings(workers=1, preimport=[])
    process = SandboxServerProcess(config, token="the token")
    url = process.start()

    async def status(method: str, path: str, **headers: str) -> int:
        async with aiohttp.ClientSession() as session, session.request(method, url + path, headers=headers) as response:
            return response.status

    async def scenario() -> None:
        for method, path in (("POST", "/run_code"), ("GET", "/v1/ping"), ("GET", "/health"), ("GET", "/metrics")):
            assert await status(method, path) == 401
            assert await status(method, path, Authorization="Bearer the tokem") == 401
        assert await status("GET", "/v1/ping", Authorization="Bearer the token") == 200
        assert await status("GET", "/v1/ping", Authorization="Bearer the token", Host="sandbox.example") == 200
        async with CodeInterpreterClient(url, token="the token") as client:
            assert await client.ping() and (await client.run_code("print(1)")).stdout == "1\n"
        async with CodeInterpreterClient(url) as client:
            assert await client.silent_servers() == [url]
            result = await client.run_code("print(1)")
            assert result.outcome is Outcome.INVALID_REQUEST and TOKEN_VARIABLE in result.message

    try:
        asyncio.run(scenario())
        assert b"the token" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    finally:
        process.stop()


def test_client_takes_the_token_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "the token")
    with SandboxServerProcess(SandboxSettings(workers=1, preimport=[])) as server:
        assert asyncio.run(CodeInterpreterClient(server.url).ping())
        monkeypatch.delenv(TOKEN_VARIABLE)
        assert not asyncio.run(CodeInterpreterClient(server.url).ping())
