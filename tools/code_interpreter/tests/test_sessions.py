"""Sessions of real sandbox servers: what lives on, what ends them, and that nobody else is reached."""

from __future__ import annotations

import asyncio
import time

import pytest

from code_interpreter.client import CodeInterpreterClient, SandboxUnavailable
from code_interpreter.process import SandboxServerProcess
from code_interpreter.protocol import Outcome
from code_interpreter.settings import SandboxSettings


@pytest.fixture(scope="module")
def server():
    settings = SandboxSettings(workers=6, memory_limit_mb=256, preimport=["math"], print_last_expression=True)
    limits = ("--max-sessions", "3", "--session-idle-seconds", "300")
    with SandboxServerProcess(settings, extra_arguments=limits) as process:
        yield process.url


def in_session(url, *cells, timeout=60.0, memory=None):
    """Results of ``cells`` in one session, and whether it was open after each."""

    async def scenario():
        async with CodeInterpreterClient(url) as client:
            session = await client.open_session(memory)
            found = []
            for cell in cells:
                result = await session.run(cell, run_timeout=timeout, print_last_expression=True)
                found.append((result, session.open))
            await session.close()
            health = await client.health()
            return found, health

    found, health = asyncio.run(scenario())
    assert health["sessions"]["open"] == 0
    return found


def test_variables_files_and_imports_live_from_cell_to_cell(server):
    cells = [
        "import math\nx = 6\ndef f(n):\n    return n * x",
        "print('printed')\nf(7)",
        "open('note', 'w').write('kept')",
        "1 / 0",
        "x = = 2",
        "raise SystemExit(3)",
        "print(open('note').read(), x, math.floor(2.5), __name__)",
    ]
    results = in_session(server, *cells)
    assert all(still_open for _, still_open in results)
    printed = [result.stdout.strip() for result, _ in results]
    assert printed == ["", "printed\n42", "4", "", "", "", "kept 6 2 __main__"]
    assert "ZeroDivisionError" in results[3][0].stderr and "cell_4.py" in results[3][0].stderr
    assert "console.py" not in results[3][0].stderr
    outcomes = [result.outcome for result, _ in results]
    assert outcomes == [Outcome.FINISHED] * 4 + [Outcome.COMPILE_ERROR] + [Outcome.FINISHED] * 2
    assert [result.return_code for result, _ in results] == [0, 0, 0, 1, 1, 1, 0]


def test_sessions_do_not_see_each_other(server):
    async def scenario():
        async with CodeInterpreterClient(server) as client:
            one, two = await client.open_session(), await client.open_session()
            how = {"run_timeout": 60.0, "print_last_expression": True}
            await one.run("secret = 1\nopen('/tmp/secret', 'w').write('s'); open('here', 'w').write('s')", **how)
            look = "import os; print('secret' in globals(), os.path.exists('/tmp/secret'), os.path.exists('here'))"
            seen = await two.run(look, **how)
            alone = await client.run_code(look, run_timeout=60)
            await one.close()
            await two.close()
            return seen.stdout.strip(), alone.stdout.strip()

    assert asyncio.run(scenario()) == ("False False False", "False False False")


@pytest.mark.parametrize(
    ("code", "timeout", "outcomes"),
    [
        ("kept = []\nwhile True: kept.append(bytearray(1 << 24))", 60.0, {Outcome.MEMORY_LIMIT_EXCEEDED}),
        ("print('before', flush=True)\nwhile True: pass", 1.0, {Outcome.TIME_LIMIT_EXCEEDED}),
        ("print('before', flush=True)\nimport ctypes; ctypes.string_at(0)", 60.0, {Outcome.FINISHED}),
        ("import os; os._exit(0)", 60.0, {Outcome.FINISHED}),
        ("import os\nfor each in range(3, 64):\n    try: os.write(each, b'junk' * 4)\n    except OSError: pass", 60.0,
         {Outcome.FINISHED}),
    ],
)  # fmt: skip
def test_what_ends_a_session_is_an_outcome(server, code, timeout, outcomes):
    first, (result, still_open) = in_session(server, "x = 1", code, timeout=timeout)
    assert first[1] and not still_open and result.outcome in outcomes and not result.ok
    assert "the session ended, and its variables are gone" in result.message
    if "before" in code:
        assert result.stdout.startswith("before")


def test_memory_is_limited_over_the_whole_life(server):
    grow = "kept = [*globals().get('kept', []), bytearray(60 << 20)]"
    results = in_session(server, *[grow] * 8)
    assert results[0][0].ok and not results[-1][1]
    ended = next(result for result, still_open in results if not still_open)
    assert ended.outcome is Outcome.MEMORY_LIMIT_EXCEEDED


def test_output_of_each_cell_is_its_own_however_much_there_was(server):
    cells = ["print('x' * (20 << 20))"] * 5 + ["print('y')"]
    results = in_session(server, *cells)
    assert all(still_open and result.ok for result, still_open in results)
    assert results[0][0].truncated and results[-1][0].stdout == "y\n"


def test_there_are_only_so_many_and_one_that_is_abandoned_ends():
    settings = SandboxSettings(workers=4, preimport=[])
    with SandboxServerProcess(settings, extra_arguments=("--session-idle-seconds", "2")) as process:

        async def scenario():
            async with CodeInterpreterClient(process.url, give_up_seconds=0.3) as client:
                kept = [await client.open_session(), await client.open_session()]
                with pytest.raises(SandboxUnavailable, match="2 sessions are open"):
                    await client.open_session()
                assert (await client.run_code("print(1)", run_timeout=60)).ok, "other workers are free"
                deadline = time.monotonic() + 120
                while (await client.health())["sessions"]["open"] and time.monotonic() < deadline:
                    await asyncio.sleep(0.2)
                health = await client.health()
                late = await kept[0].run("1", run_timeout=60, print_last_expression=True)
                again = await client.open_session()
                await again.close()
                return health["sessions"], late, kept[0].open, (await client.health())["workers"]["busy"]

        sessions, late, still_open, busy = asyncio.run(scenario())
    assert sessions == {"open": 0, "limit": 2, "reaped": 2}
    assert not late.ok and "no such session" in late.message and not still_open and busy == 0
