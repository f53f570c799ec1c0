"""The code interpreter as a tool whose calls share a session, with a real sandbox server."""

from __future__ import annotations

import asyncio

import pytest

from code_interpreter.client import CodeInterpreterClient
from code_interpreter.process import SandboxServerProcess
from megatron_retool.config import CodeInterpreterConfig, ConfigError, load_config
from tools.code_interpreter_tool import CodeInterpreterTool
from tools.loading import named_tool
from tools.registry import ToolRegistry, check_tools
from tools.tool import TrajectoryInfo


@pytest.fixture(scope="module")
def server():
    config = CodeInterpreterConfig(workers=6, memory_limit_mb=256, preimport=["math"], max_sessions=3)
    with SandboxServerProcess(config) as process:
        yield process.url


def tool_of(url, **settings):
    config = CodeInterpreterConfig(url=url, session=True, run_timeout_seconds=60, memory_limit_mb=256, **settings)
    return CodeInterpreterTool(config)


def test_the_tool_keeps_a_session_for_its_trajectory_and_says_when_it_is_gone(server):
    async def scenario():
        tool = tool_of(server)
        async with ToolRegistry([named_tool(tool)]) as registry:
            assert "Variables live" in registry.schemas()[0]["function"]["description"]
            opened = [await registry.open(TrajectoryInfo(1, index)) for index in range(2)]
            said = []
            for code in ("x = 5", "x + 1", "import os; os._exit(1)", "x"):
                result = await opened[0].call("code_interpreter", {"code": code})
                said.append((result.status, result.text))
            other = await opened[1].call("code_interpreter", {"code": "x"})
            for each in opened:
                await each.close({})
            async with CodeInterpreterClient(server) as client:
                return said, other, (await client.health())["sessions"]["open"]

    said, other, left = asyncio.run(scenario())
    assert said[:2] == [("ok", ""), ("ok", "6")] and left == 0
    assert said[2][0] == "error" and "variables are gone; the next call begins a new one" in said[2][1]
    assert said[3][0] == "error" and "NameError" in said[3][1] and other.status == "error"


def test_a_trajectory_without_calls_holds_no_worker(server):
    async def scenario():
        tool = tool_of(server)
        async with ToolRegistry([named_tool(tool)]) as registry:
            opened = [await registry.open(TrajectoryInfo(1, index)) for index in range(9)]
            async with CodeInterpreterClient(server) as client:
                count = (await client.health())["sessions"]["open"]
            for each in opened:
                await each.close({})
            return count

    assert asyncio.run(scenario()) == 0


@pytest.mark.parametrize("setting", ["partial", "branching"])
def test_a_session_is_no_part_of_a_fork_or_of_what_is_paused(setting):
    config = load_config(None, ["tools.code_interpreter.session=true", f"rollout.{setting}.enable=true"])
    with pytest.raises(ConfigError, match=f"set rollout.{setting}.enable to false"):
        check_tools(config.tools, config.rollout)
