"""Starting, overload, deaths and ends: nothing is lost without a word, and nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import psutil
import pytest
from sandboxes import Sandbox, is_alive, start

from code_interpreter import isolation, seccomp
from code_interpreter.client import CodeInterpreterClient, SandboxUnavailable
from code_interpreter.locked_directory import make_locked
from code_interpreter.process import SandboxServerError, SandboxServerProcess
from code_interpreter.protocol import Outcome
from code_interpreter.settings import SandboxSettings


def wait_for(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if is_alive(process)]


def leftovers(server: int) -> list[str]:
    """Directories that the server ``server`` made outside of snippets."""
    scratch = [str(path) for path in Path(tempfile.gettempdir()).glob(f"retool-sandbox-{server}-*")]
    return scratch + [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/retool-sandbox-{server}-*")]


@pytest.fixture
def busy_sandbox():
    running = start(workers=2)
    yield running
    running.process.stop()


def keep_busy(sandbox: Sandbox) -> subprocess.Popen:
    """A snippet that runs long, asked for by another process."""
    code = f"""
import json, urllib.request
body = json.dumps({{"code": "import os, time\\nos.fork()\\ntime.sleep(50)", "language": "python", "run_timeout": 60}})
urllib.request.urlopen({sandbox.process.url + "/run_code"!r}, body.encode(), timeout=60).read()
"""
    client = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    # Server, warden, zygote, worker, snippet, its child; process 1 of the snippet's namespace.
    wait_for(lambda: len(family(sandbox.process.pid)) == 6 + (sandbox.isolation == "namespaces"))
    return client


def end(client: subprocess.Popen) -> None:
    client.kill()
    client.wait()


def test_nothing_is_left_when_a_worker_is_killed(busy_sandbox: Sandbox) -> None:
    client = keep_busy(busy_sandbox)
    worker, *others = family(busy_sandbox.process.pid)[3:]
    worker.kill()
    wait_for(lambda: not alive(others))
    end(client)
    busy_sandbox.check_alive()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_server_ends(busy_sandbox: Sandbox, number: signal.Signals) -> None:
    server = busy_sandbox.process.pid
    client = keep_busy(busy_sandbox)
    processes = family(server)
    started = time.monotonic()
    os.kill(server, number)
    busy_sandbox.process._process.wait(15)
    wait_for(lambda: not alive(processes))
    wait_for(lambda: not leftovers(server))
    assert time.monotonic() - started < 10
    end(client)


def test_nothing_is_left_when_the_process_that_started_it_is_killed() -> None:
    code = """
import threading, time
from code_interpreter.settings import SandboxSettings
from code_interpreter.process import SandboxServerProcess
process = SandboxServerProcess(SandboxSettings(workers=1, preimport=[]))
thread = threading.Thread(target=process.start)  # the end of the starting thread is not the end of the process
thread.start(); thread.join()
print(process.pid, process.port, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as trainer:
        server, port = map(int, trainer.stdout.readline().split())
        time.sleep(0.3)
        assert asyncio.run(_ping(port))
        processes = family(server)
        trainer.kill()
    wait_for(lambda: not alive(processes))
    wait_for(lambda: not leftovers(server))


async def _ping(port: int) -> bool:
    async with CodeInterpreterClient(f"http://127.0.0.1:{port}") as client:
        return await client.ping()


def test_zygote_that_dies_is_replaced(busy_sandbox: Sandbox) -> None:
    async def scenario() -> None:
        async with CodeInterpreterClient(busy_sandbox.process.url, first_delay_seconds=0.05) as client:
            # Two run and three wait.
            code = "import time; time.sleep(1); print('done')"
            running = [asyncio.ensure_future(client.run_code(code)) for _ in range(5)]
            await asyncio.sleep(0.4)
            warden = psutil.Process(busy_sandbox.process.pid).children()[0]
            zygote = warden.children()[0]
            zygote.kill()
            # Requests in flight get a typed answer, which the client takes as a reason to try again.
            assert [result.stdout for result in await asyncio.gather(*running)] == ["done\n"] * 5
            assert (await client.run_code("print(1)")).stdout == "1\n"

    asyncio.run(scenario())
    busy_sandbox.check_alive()


def test_server_that_was_killed_starts_again_where_clients_look_for_it(busy_sandbox: Sandbox) -> None:
    process = busy_sandbox.process

    async def scenario() -> None:
        async with CodeInterpreterClient(process.url, first_delay_seconds=0.05) as client:
            running = [
                asyncio.ensure_future(client.run_code(f"import time; time.sleep(1); print({i})")) for i in range(4)
            ]
            await asyncio.sleep(0.3)
            os.kill(process.pid, signal.SIGKILL)
            await asyncio.to_thread(wait_for, lambda: not process.is_running())
            url = process.url
            assert await asyncio.to_thread(process.start) == url
            assert [(await task).stdout for task in running] == [f"{i}\n" for i in range(4)]

    asyncio.run(scenario())


def test_worker_that_dies_is_replaced(busy_sandbox: Sandbox) -> None:
    client = keep_busy(busy_sandbox)
    zygote = psutil.Process(busy_sandbox.process.pid).children()[0].children()[0]
    zygote.children()[0].kill()
    wait_for(lambda: "sandbox_worker_restarts 1.0" in busy_sandbox.get("/metrics"))
    end(client)
    for _ in range(4):
        busy_sandbox.check_alive()


def test_client_that_hangs_up_frees_its_worker() -> None:
    sandbox = start(workers=1)
    try:
        client = keep_busy(sandbox)
        end(client)
        started = time.monotonic()
        sandbox.check_alive()
        assert time.monotonic() - started < 5
    finally:
        sandbox.process.stop()


def test_overload_is_answered_quickly_and_the_client_tries_again() -> None:
    sandbox = start(workers=1, arguments=("--max-queue", "1", "--max-queue-seconds", "30"))

    async def scenario() -> None:
        url = sandbox.process.url
        async with aiohttp.ClientSession() as session:
            body = {"code": "import time; time.sleep(1.2)", "language": "python"}

            async def post() -> tuple[int, dict, float]:
                started = time.monotonic()
                async with session.post(f"{url}/run_code", json=body) as response:
                    return response.status, await response.json(), time.monotonic() - started

            answers = await asyncio.gather(*(post() for _ in range(8)))
        busy = [answer for answer in answers if answer[0] == 503]
        assert len(busy) == 6, "one runs and one waits"
        first_run = min(seconds for status, _, seconds in answers if status == 200)
        for _, answer, seconds in busy:
            assert (answer["outcome"], answer["status"], answer["run_result"]) == ("busy", "SandboxError", None)
            assert seconds < first_run
        async with CodeInterpreterClient(url) as client:
            results = await asyncio.gather(*(client.run_code(f"print({i})") for i in range(20)))
        assert [result.stdout for result in results] == [f"{i}\n" for i in range(20)]

    try:
        asyncio.run(scenario())
    finally:
        sandbox.process.stop()


def test_wait_for_a_worker_is_bounded() -> None:
    sandbox = start(workers=1, arguments=("--max-queue-seconds", "0.2"))
    try:
        client = keep_busy(sandbox)
        started = time.monotonic()
        status, body = sandbox.post({"code": "print(1)", "language": "python"})
        assert (status, body["outcome"]) == (503, "busy") and 0.2 <= time.monotonic() - started < 3
        end(client)
    finally:
        sandbox.process.stop()


def test_client_gives_up_on_a_server_that_is_not_there() -> None:
    async def scenario() -> None:
        async with CodeInterpreterClient("http://127.0.0.1:9", give_up_seconds=0.5) as client:
            assert not await client.ping()
            with pytest.raises(SandboxUnavailable, match="127.0.0.1:9"):
                await client.run_code("print(1)")
            with pytest.raises(SandboxUnavailable):
                await client.health()

    asyncio.run(scenario())


def test_port_in_use_is_one_clear_message() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = SandboxSettings(workers=1, preimport=[])
        with pytest.raises(SandboxServerError, match=f"127.0.0.1:{port}.*in use.*--port") as caught:
            SandboxServerProcess(settings, port=port).start()
    assert "Traceback" not in str(caught.value)


def test_what_an_import_prints_is_not_a_snippets_output() -> None:
    sandbox = start(workers=1, preimport=["this"])
    try:
        result = sandbox.run("print('own')")
        assert (result.stdout, result.stderr) == ("own\n", "")
    finally:
        sandbox.process.stop()


def test_modules_that_cannot_be_imported_are_named() -> None:
    sandbox = start(preimport=["math", "no_such_module"])
    try:
        assert any("no_such_module" in warning for warning in sandbox.health["warnings"])
        assert sandbox.health["preimported"] == ["math"]
        sandbox.check_alive()
    finally:
        sandbox.process.stop()


IN_A_CONTAINER = """
import os, sys
from code_interpreter import linux, seccomp
linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
seccomp.install(seccomp.build_filter(seccomp.LOCAL_AND_INTERNET))
os.execv(sys.executable, sys.argv[1:])
"""
"""A program that runs another one where namespaces and mounts are refused, as most containers do."""


@pytest.mark.skipif(not seccomp.supported(), reason="no system-call filter for this machine type")
def test_host_without_namespaces_falls_back_and_says_so() -> None:
    container = (sys.executable, "-c", IN_A_CONTAINER)
    sandbox = start("auto", wrapper=container)
    try:
        assert sandbox.isolation == "rlimits" and sandbox.health["status"] == "degraded"
        warnings = " ".join(sandbox.health["warnings"])
        assert "'namespaces' is not available" in warnings and "WITHOUT namespaces" in warnings
        sandbox.check_alive()
        assert sandbox.run("import colorsys; print(colorsys.hsv_to_rgb(0, 0, 1))").ok
    finally:
        sandbox.process.stop()
    with pytest.raises(SandboxServerError, match="'namespaces' is not available"):
        settings = SandboxSettings(workers=1, isolation="namespaces", preimport=[])
        SandboxServerProcess(settings, command_prefix=container).start()


def test_repeated_requests_leave_nothing() -> None:
    """No process, descriptor, file or mount more after 200 requests of every kind than after the first ones."""
    sandbox = start(workers=3)
    server = sandbox.process.pid
    kinds = (
        ("print(1)", {}),
        ("1/0", {}),
        ("import os; os.fork()", {}),
        ("open('a', 'w').write('x' * 100000)", {"fetch_files": ("a", "b")}),
        ("while True: pass", {"run_timeout": 0.02}),
        ("print('x' * 2_000_000)", {"stdin": b"x" * 100_000}),
        ("import os; os.kill(os.getpid(), 9); os._exit(1)", {}),
    )

    async def load(count: int) -> None:
        async with CodeInterpreterClient(sandbox.process.url) as client:

            async def one(i: int) -> None:
                code, fields = kinds[i % len(kinds)]
                result = await client.run_code(code, **fields)
                assert result.outcome is not Outcome.SANDBOX_ERROR, result

            await asyncio.gather(*(one(i) for i in range(count)))

    def counts() -> tuple[int, int, int]:
        processes = family(server)
        descriptors = sum(p.num_fds() for p in processes)
        mounts = sum(len(Path(f"/proc/{p.pid}/mountinfo").read_text().splitlines()) for p in processes)
        return len(processes), descriptors, mounts

    try:
        asyncio.run(load(40))
        time.sleep(0.2)
        before = counts()
        asyncio.run(load(200))
        with contextlib.suppress(AssertionError):
            wait_for(lambda: counts() == before, 3)
        assert counts() == before
    finally:
        sandbox.process.stop()
    assert leftovers(server) == []


def test_interpreter_below_tmp() -> None:
    """A clone under /tmp has its virtual environment there: temporary files must still be possible."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        Path(directory, "module_of_mine.py").write_text("value = 42\n")
        Path(directory).chmod(0o755)
        running = start(arguments=("--read-only-path", directory))
        try:
            code = (
                f"import sys, tempfile\nsys.path.append({directory!r})\nfrom module_of_mine import value\n"
                "with tempfile.TemporaryFile() as file:\n    file.write(b'x')\nprint(value)"
            )
            assert running.run(code).stdout == "42\n"
        finally:
            running.process.stop()


def test_the_directory_of_a_killed_warden_goes(tmp_path):
    """When the next warden starts; those of living wardens stay, also where their process ids mean nothing here."""
    killed, alive = tmp_path / f"retool-sandbox-{os.getpid()}-x", tmp_path / "retool-sandbox-999999999-x"
    (killed / "root").mkdir(parents=True)
    lock = make_locked(alive)
    (alive / "root").mkdir()
    (tmp_path / "retool-sandbox-log").mkdir()
    isolation.remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [alive.name, "retool-sandbox-log"]
    assert (alive / "root").is_dir()
    os.close(lock)
    isolation.remove_abandoned(tmp_path)
    assert not alive.exists()
