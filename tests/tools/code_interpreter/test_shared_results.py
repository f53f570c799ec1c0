"""Identical snippets run once, and only those of which a second run would say the same."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from megatron_retool.config import CodeInterpreterConfig, ConfigError, ToolsConfig
from tools.code_interpreter import shared_results
from tools.code_interpreter.client import CodeInterpreterClient, SandboxUnavailable
from tools.code_interpreter.protocol import ExecutionResult, Outcome
from tools.code_interpreter.shared_results import SharedResults
from tools.code_interpreter.tool import CodeInterpreterTool


class Runs:
    """Counts runs; each ends with ``result`` once ``go`` is set."""

    def __init__(self, result: ExecutionResult | Exception | None = None) -> None:
        self.codes: list[str] = []
        self.cancelled = 0
        self.go = asyncio.Event()
        self.result = result

    async def __call__(self, code: str) -> ExecutionResult:
        self.codes.append(code)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(self.result, Exception):
            raise self.result
        return self.result or ExecutionResult(Outcome.FINISHED, stdout=str(len(self.codes)), return_code=0)


async def at_rest() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_calls_at_once_and_later_ones_share_a_run():
    async def main():
        runs = Runs()
        shared = SharedResults(runs)
        calls = [asyncio.ensure_future(shared.run(code)) for code in ("print(1)", "print(1)", "print(2)", "print(1)")]
        await at_rest()
        assert runs.codes == ["print(1)", "print(2)"]
        runs.go.set()
        results = await asyncio.gather(*calls)
        assert [again for _, again in results] == [False, True, False, True]
        assert results[0][0] is results[1][0] is results[3][0] is not results[2][0]
        assert await shared.run("print(2)") == (results[2][0], True)
        assert len(runs.codes) == 2

    asyncio.run(main())


def test_impure_code_runs_each_time():
    async def main():
        runs = Runs()
        runs.go.set()
        shared = SharedResults(runs)
        code = "import random; print(random.random())"
        assert [await shared.run(code) for _ in range(2)] == [
            (ExecutionResult(Outcome.FINISHED, stdout=str(number), return_code=0), False) for number in (1, 2)
        ]

    asyncio.run(main())


@pytest.mark.parametrize(
    "result",
    [
        ExecutionResult(Outcome.TIME_LIMIT_EXCEEDED),
        ExecutionResult(Outcome.MEMORY_LIMIT_EXCEEDED),
        ExecutionResult(Outcome.SANDBOX_ERROR),
        ExecutionResult(Outcome.BUSY),
        ExecutionResult(Outcome.FINISHED, return_code=-9),
        ExecutionResult(Outcome.FINISHED, return_code=0, stdout="x" * shared_results.MOST_CHARACTERS),
    ],
)
def test_what_may_be_the_hosts_fault_or_is_long_is_shared_and_not_kept(result):
    async def main():
        runs = Runs(result)
        shared = SharedResults(runs)
        calls = [asyncio.ensure_future(shared.run("print(1)")) for _ in range(3)]
        await at_rest()
        runs.go.set()
        assert [answer for answer, _ in await asyncio.gather(*calls)] == [result] * 3 and len(runs.codes) == 1
        assert await shared.run("print(1)") == (result, False)
        assert len(runs.codes) == 2

    asyncio.run(main())


@pytest.mark.parametrize("result", [ExecutionResult(Outcome.FINISHED, return_code=1, stderr="E"), None])
def test_an_exception_of_the_code_is_kept(result):
    async def main():
        runs = Runs(result)
        runs.go.set()
        shared = SharedResults(runs)
        assert (await shared.run("print(1/0)"))[0] is (await shared.run("print(1/0)"))[0]

    asyncio.run(main())


def test_a_sandbox_that_is_gone_is_told_to_all_and_asked_again():
    async def main():
        runs = Runs(SandboxUnavailable("gone"))
        shared = SharedResults(runs)
        calls = [asyncio.ensure_future(shared.run("print(1)")) for _ in range(2)]
        await at_rest()
        runs.go.set()
        assert [str(each) for each in await asyncio.gather(*calls, return_exceptions=True)] == ["gone"] * 2
        runs.result = None
        assert (await shared.run("print(1)"))[1] is False

    asyncio.run(main())


def test_the_last_one_that_is_cancelled_ends_the_run():
    async def main():
        runs = Runs()
        shared = SharedResults(runs)
        first, second = (asyncio.ensure_future(shared.run("print(1)")) for _ in range(2))
        await at_rest()
        first.cancel()
        await at_rest()
        assert first.cancelled() and not runs.cancelled
        second.cancel()
        await at_rest()
        assert runs.cancelled == 1
        runs.go.set()
        assert (await shared.run("print(1)"))[1] is False and len(runs.codes) == 2

    asyncio.run(main())


def test_no_more_are_kept_than_fit(monkeypatch):
    monkeypatch.setattr(shared_results, "MOST_KEPT", 2)

    async def main():
        runs = Runs()
        runs.go.set()
        shared = SharedResults(runs)
        for code in ("1", "2", "1", "3", "1", "2"):
            await shared.run(code)
        assert runs.codes == ["1", "2", "3", "2"]

    asyncio.run(main())


@pytest.mark.parametrize("shares", [True, False])
def test_the_tool_tells_which_calls_were_shared(sandbox, shares):
    config = CodeInterpreterConfig(share_results=shares, print_last_expression=False)

    async def main():
        tool = CodeInterpreterTool(config, CodeInterpreterClient(sandbox.process.url))
        try:
            calls = [tool.call({"code": code}) for code in ("print(6 * 7)", "print(6 * 7)", "import os; print(1 / 0)")]
            return await asyncio.gather(*calls)
        finally:
            await tool.stop()

    results = asyncio.run(main())
    assert [result.text for result in results[:2]] == ["42"] * 2 and "ZeroDivisionError" in results[2].text
    assert [result.metrics for result in results] == (
        [{"shared": 0.0}, {"shared": 1.0}, {"shared": 0.0}] if shares else [{}] * 3
    )


def test_sessions_share_nothing():
    interpreter = CodeInterpreterConfig(share_results=True, session=True)
    with pytest.raises(ConfigError, match="share_results does not go with"):
        dataclasses.replace(ToolsConfig(), code_interpreter=interpreter).check()
