"""What the server refuses, and that connections and bodies of some do not keep the requests of others out."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import resource
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from code_interpreter.admission import BodyBudget
from code_interpreter.process import SandboxServerProcess
from code_interpreter.settings import SandboxSettings

TOKEN = "a-token"
FILES = 1024
IDLE_SECONDS, BODY_SECONDS = 2.0, 1.0


@pytest.fixture(scope="module")
def server() -> Iterator[SandboxServerProcess]:
    """One that needs a token, with few descriptors and little room for bodies."""
    process = SandboxServerProcess(
        SandboxSettings(workers=2, memory_limit_mb=256, preimport=[]),
        token=TOKEN,
        extra_arguments=(
            *("--max-body-mb", "2", "--max-bodies-mb", "4"),
            *("--body-seconds", str(BODY_SECONDS), "--idle-seconds", str(IDLE_SECONDS)),
        ),
        command_prefix=("prlimit", f"--nofile={FILES}:{FILES}"),
    )
    process.start()
    yield process
    process.stop()


def post(server: SandboxServerProcess, body: bytes, token: str = TOKEN) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{server.url}/run_code", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        return error.code, json.loads(text) if text.startswith("{") else text


def ran(server: SandboxServerProcess) -> bool:
    status, body = post(server, b'{"code": "print(6*7)"}')
    return status == 200 and body["run_result"]["stdout"] == "42\n"


def connect(server: SandboxServerProcess, said: bytes = b"") -> socket.socket:
    made = socket.create_connection((server.host, server.port), timeout=30)
    made.sendall(said)
    return made


def headers(length: int, token: str = TOKEN) -> bytes:
    lines = ("POST /run_code HTTP/1.1", "Host: x", f"Authorization: Bearer {token}", f"Content-Length: {length}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"code": "1", "x": ' + b'{"a":' * 100_000, "nested too deeply"),
        (b'{"code": "1", "x": ' + b"[" * 100 + b"]" * 100 + b"}", "nested too deeply"),
        (b'{"code": "1", "run_timeout": ' + b"9" * 4301 + b"}", "a number has too many digits"),
        (b'{"code": "1", "run_timeout": 1' + b"0" * 400 + b"}", "run_timeout: 1000"),
        (b'{"code": "1", "run_timeout": 1e999}', "1e999 is beyond the range of a float"),
        (b'{"code": "1", "language": ' + json.dumps(["x"] * 10_000).encode() + b"}", "language: ['x', 'x'"),
        (b'{"code": "\xff"}', "no UTF-8 at byte 10"),
    ],
)
def test_bodies_that_nothing_can_read_are_refused_with_their_reason(server, body, said):
    status, answer = post(server, body)
    assert (status, answer["outcome"]) == (422, "invalid_request")
    assert answer["message"].startswith(said) and len(answer["message"]) < 200


@pytest.mark.parametrize("route", ["run_code", "run_jupyter", "session/create", "session/run", "session/close"])
def test_every_route_bounds_a_body_before_reading_it(server, route):
    def started(length: int) -> socket.socket:
        return connect(server, headers(length).replace(b"/run_code", f"/{route}".encode()) + b'{"code": "')

    def status(connection: socket.socket) -> bytes:
        return connection.recv(65536).split(b" ")[1]

    with started((2 << 20) + 1) as too_large:
        assert status(too_large) == b"413"
    with started((2 << 20) - 1), started((2 << 20) - 1) as slow, started(1000) as third:
        assert status(third) == b"503"
        assert status(slow) == b"408"
    assert ran(server)


def test_a_number_beyond_all_limits_is_brought_within_them(server):
    body = b'{"code": "print(1)", "memory_limit_MB": 1' + b"0" * 400 + b', "run_timeout": 1e300}'
    assert post(server, body)[1]["run_result"]["stdout"] == "1\n"


def test_idle_and_slow_connections_are_closed_and_nobody_waits_for_them(server):
    slow = {
        "silent": connect(server),
        "half a header": connect(server, b"POST /run_code HTTP/1.1\r\nHost: x\r\nAuthor"),
        "half a body": connect(server, headers(1000) + b'{"code": '),
        "after a request": connect(server, headers(14) + b'{"code": "1"} '),
    }
    began = time.monotonic()
    assert ran(server)
    assert time.monotonic() - began < IDLE_SECONDS
    answers = {}
    for name, connection in slow.items():
        with connection:
            received = b""
            while part := connection.recv(65536):
                received += part
            answers[name] = received
    assert time.monotonic() - began < IDLE_SECONDS + 10
    assert answers["silent"] == answers["half a header"] == b""
    assert b" 408 " in answers["half a body"].splitlines()[0] and b"--body-seconds" in answers["half a body"]
    assert b" 200 " in answers["after a request"].splitlines()[0]


@pytest.mark.parametrize("said", [b"", headers(9, token="wrong")])
def test_connections_that_ask_nothing_keep_no_request_out(server, said):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip("this process may not open so many connections")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as opened:
        for _ in range(FILES + 76):
            opened.enter_context(connect(server, said))
        began = time.monotonic()
        assert all(ran(server) for _ in range(3))
        assert time.monotonic() - began < 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_large_bodies_are_refused_before_they_are_read(server):
    with open(f"/proc/{server.pid}/status") as status:
        before = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

    def upload(_: int) -> bytes:
        with connect(server, headers(190_000_000)) as connection, contextlib.suppress(ConnectionError):
            for _ in range(20):
                connection.sendall(bytes(1_000_000))
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(4096)
        return b""

    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(upload, range(10)))
    assert all(b" 413 " in answer.splitlines()[0] for answer in answers if answer) and any(answers)
    with open(f"/proc/{server.pid}/status") as status:
        after = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    assert after - before < 50_000
    assert ran(server)


def test_a_body_of_unknown_length_is_refused_where_it_grows_too_large(server):
    head = headers(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    with connect(server, head) as connection, contextlib.suppress(ConnectionError):
        for _ in range(3):
            connection.sendall(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
        assert b" 413 " in connection.recv(4096).splitlines()[0]
    assert ran(server)


def test_bodies_beyond_what_may_be_held_are_asked_to_come_again(server):
    with connect(server, headers(1_900_000)), connect(server, headers(1_900_000)):
        time.sleep(0.3)
        status, answer = post(server, b'{"code": "' + b" " * 1_000_000 + b'"}')
        assert (status, answer["outcome"]) == (503, "busy")
        assert ran(server), "a small one has room"
    deadline = time.monotonic() + 10
    while post(server, b'{"code": "' + b" " * 1_000_000 + b'"}')[0] != 200:
        assert time.monotonic() < deadline


# ---- the rules alone


def test_the_budget_of_bodies():
    budget = BodyBudget(10, 25)
    with budget.held(10) as first, budget.held(10) as second, budget.held(10) as third, budget.held(5) as fourth:
        assert (first, second, third, fourth) == (True, True, False, True)
    with budget.held(25) as all_free:
        assert all_free
    assert budget.size(make_mocked_request("POST", "/", headers={"Content-Length": "7"})) == 7
    compressed = make_mocked_request("POST", "/", headers={"Content-Length": "7", "Content-Encoding": "gzip"})
    assert budget.size(compressed) in (0, 10), "what it says is not what it comes to"
