"""The registry with a real sandbox: what the model sees for everything it can do right and wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from code_interpreter.client import CodeInterpreterClient
from code_interpreter.process import SandboxServerProcess
from code_interpreter.protocol import ExecutionResult, Outcome
from megatron_retool.config import CodeInterpreterConfig, ConfigError, SearchConfig, ToolsConfig
from tools.code_interpreter_tool import describe
from tools.function_tool import FunctionTool
from tools.loading import named_tool
from tools.registry import ToolRegistry
from tools.tool import MOST_HANGING, STATUSES, ToolResult, TrajectoryInfo, shorten_middle

CONFIG = CodeInterpreterConfig(workers=2, preimport=["math"], run_timeout_seconds=20.0, error_style="last_line")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with SandboxServerProcess(CONFIG) as server:
        yield server.url


def call(
    url: str, name: str, arguments: Any, config: CodeInterpreterConfig = CONFIG, patience: float = 120
) -> ToolResult:
    async def scenario() -> ToolResult:
        tools = ToolsConfig(code_interpreter=config)
        client = CodeInterpreterClient(url, give_up_seconds=patience)
        async with ToolRegistry.from_config(tools, ["code_interpreter"], code_interpreter=client) as registry:
            return await (await registry.open(TrajectoryInfo(0, 0))).call(name, arguments)

    result = asyncio.run(scenario())
    assert result.status in STATUSES
    return result


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("print(1 + 1)", "ok", "2"),
        ("1 + 1", "ok", "2"),
        ("x = 1", "ok", ""),
        ("print(gcd(4, 6))", "error", "NameError: name 'gcd' is not defined"),
        ("print(sum(1", "error", "SyntaxError: '(' was never closed"),
        ("print('before')\n1/0", "error", "before\nZeroDivisionError: division by zero"),
        ("raise ValueError('first\\n  second')", "error", "ValueError: first"),
        ("class Odd(Exception): pass\nraise Odd('x')", "error", "Odd: x"),
        ("while True: pass", "timeout", "TimeoutError: the code ran longer than 0.5 s"),
        ("import sys; sys.exit(3)", "error", "Error: exit status 3"),
        ("import ctypes; ctypes.string_at(0)", "error", "Error: ended by SIGSEGV"),
        ("x = bytes(1 << 40)", "error", "MemoryError"),
    ],
)
def test_code(url: str, code: str, status: str, text: str) -> None:
    config = dataclasses.replace(CONFIG, run_timeout_seconds=0.5) if status == "timeout" else CONFIG
    result = call(url, "code_interpreter", {"code": code}, config)
    assert (result.status, result.text) == (status, text)
    assert 0 < result.seconds < 30


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "'code' is a required property"),
        ({"code": 3}, "code: 3 is not of type 'string'"),
        ([], "not of type 'object'"),
        (None, "not of type 'object'"),
        ("{", "not valid JSON"),
        ("[1]", "not of type 'object'"),
    ],
)
def test_bad_arguments(url: str, arguments: Any, named: str) -> None:
    result = call(url, "code_interpreter", arguments)
    assert result.status == "bad_arguments" and named in result.text


def test_arguments_as_json_text(url: str) -> None:
    assert call(url, "code_interpreter", json.dumps({"code": "print(5)"})).text == "5"


def test_unknown_tool_names_the_known_ones(url: str) -> None:
    result = call(url, "calculator", {"expression": "1"})
    assert result.status == "unknown_tool" and "'calculator'" in result.text and "code_interpreter" in result.text


def test_server_out_of_reach_is_a_result() -> None:
    result = call("http://127.0.0.1:9", "code_interpreter", {"code": "print(1)"}, patience=0.2)
    assert result.status == "error" and result.text.startswith("SandboxError")


def test_whole_traceback_on_request(url: str) -> None:
    config = dataclasses.replace(CONFIG, error_style="traceback")
    text = call(url, "code_interpreter", {"code": "def f(): 1/0\nf()"}, config).text
    assert text.startswith("Traceback (most recent call last)") and "line 1, in f" in text


def test_limits_on_what_the_model_sees() -> None:
    config = dataclasses.replace(CONFIG, max_error_characters=20, max_output_characters=100, empty_output_text="(none)")
    failed = ExecutionResult(Outcome.FINISHED, "", "Traceback:\nNameError: name 'something' is not defined\n", 1)
    assert describe(failed, config) == "NameError: name 'som"
    printed = ExecutionResult(Outcome.FINISHED, "<generator object <genexpr> at 0x7fc102391a80> 0x7fc1", "", 0)
    assert describe(printed, config) == printed.stdout
    assert (
        describe(printed, dataclasses.replace(config, hide_addresses=True))
        == "<generator object <genexpr> at 0x0> 0x7fc1"
    )
    long = ExecutionResult(Outcome.FINISHED, "start" + "x" * 500 + "end", "", 0)
    text = describe(long, config)
    assert len(text) <= 100 and text.startswith("start") and text.endswith("end") and "left out" in text
    assert describe(ExecutionResult(Outcome.FINISHED, "\n", "", 0), config) == "(none)"
    warned = ExecutionResult(Outcome.FINISHED, "1\n", "DeprecationWarning: old\n", 0)
    assert describe(warned, config) == "1", "what a run that succeeds says on stderr is not for the model"


def test_shorten_middle_never_exceeds_its_limit() -> None:
    for limit in range(0, 200, 7):
        assert len(shorten_middle("x" * 150, limit)) <= limit or limit >= 150


def test_schemas_are_openai_functions(url: str, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "one"}\n')
    interpreter = dataclasses.replace(CONFIG, url=url)
    config = ToolsConfig(code_interpreter=interpreter, search=SearchConfig(corpus=str(corpus)))
    registry = ToolRegistry.from_config(config, ["code_interpreter", "search"])
    assert registry.names == ["code_interpreter", "search"]
    for schema in registry.schemas():
        assert schema["type"] == "function"
        assert schema["function"]["parameters"]["required"] and schema["function"]["description"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["code_interpreter"], "tools.code_interpreter.url"),
        (["search"], "tools.search.corpus"),
    ],
)
def test_a_built_in_that_lacks_a_setting(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ToolRegistry.from_config(ToolsConfig(), names)


def test_a_tool_that_hangs_keeps_no_other_tool_waiting_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    def hang(query: str) -> str:
        """Hang.

        Args:
            query: Anything.
        """
        release.wait(60)
        return "late"

    def quick(query: str) -> str:
        """Answer.

        Args:
            query: Anything.
        """
        return query

    async def scenario() -> tuple[set[str], ToolResult, ToolResult, ToolResult]:
        hanging = dataclasses.replace(named_tool(FunctionTool(hang)), timeout_seconds=0.3)
        registry = ToolRegistry([hanging, named_tool(FunctionTool(quick))])
        tools = await registry.open(TrajectoryInfo(0, 0))
        late = await asyncio.gather(*(tools.call("hang", {"query": "x"}) for _ in range(MOST_HANGING)))
        other = await asyncio.wait_for(tools.call("quick", {"query": "x"}), 5)
        refused = [await tools.call("hang", {"query": "x"}) for _ in range(3)][-1]
        registry.take_metrics()
        release.set()
        while (again := await tools.call("hang", {"query": "x"})).status != "ok":
            await asyncio.sleep(0.01)
        return {f"{each.status}: {each.text}" for each in late}, other, refused, again

    late, other, refused, again = asyncio.run(scenario())
    assert late == {"timeout: Error: hang did not answer within 0.3 s"}
    assert (other.status, other.text, refused.status, again.text) == ("ok", "x", "error", "late")
    assert caplog.text.count("Traceback") == 1 and "64 earlier calls of it hang" in caplog.text
    assert "tool hang failed 2 more times with RuntimeError" in caplog.text
