"""Tools of real MCP servers: a process over its pipes, and one over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from megatron_retool.config import ConfigError, load_config
from megatron_retool.ports import free_port
from tools.registry import ToolRegistry, check_tools
from tools.tool import TrajectoryInfo

needs_mcp = pytest.mark.skipif(
    importlib.util.find_spec("mcp") is None,
    reason="needs the package mcp: bash scripts/setup.sh",
)
SERVER = Path(__file__).with_name("server.py")
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(sys.path), "NOTES_OWNER": "alice"}
STDIO = {"command": [sys.executable, str(SERVER)], "env": ENVIRONMENT, "start_timeout_seconds": 300}


def registry(*more: dict, **kwargs) -> ToolRegistry:
    config = load_config(None, [])
    return ToolRegistry.from_config(config.tools, [{"tool": "mcp", "kwargs": each} for each in (kwargs, *more)])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def texts(opened, *calls):
    return [(result.status, result.text) for result in [await opened.call(name, given) for name, given in calls]]


async def process_of(opened) -> int:
    return json.loads((await opened.call("where", {})).text)["pid"]


def info(index: int = 0) -> TrajectoryInfo:
    return TrajectoryInfo(1, index)


@pytest.fixture(scope="module")
def http_server():
    port = free_port()
    process = subprocess.Popen([sys.executable, str(SERVER), str(port)], env={**os.environ, **ENVIRONMENT})
    url = f"http://127.0.0.1:{port}/mcp"
    for _ in range(600):
        with contextlib.suppress(urllib.error.URLError):
            try:
                urllib.request.urlopen(url, timeout=5)
            except urllib.error.HTTPError:
                break
        time.sleep(0.1)
    yield url
    process.kill()
    process.wait()


@needs_mcp
def test_a_program_lists_its_tools_answers_and_ends_with_the_run():
    async def scenario():
        made = registry(**STDIO, timeout_seconds=200, include=["keep", "where", "fail", "die"])
        async with made:
            first, second = await made.open(info(0)), await made.open(info(1))
            said = await texts(
                first, ("keep", {"text": "a", "times": 2}), ("keep", {"times": 1}), ("fail", {"reason": "so"})
            )
            said += await texts(second, ("keep", {"text": "b"}))
            assert await process_of(first) == (pid := await process_of(second)) and alive(pid)
            gone = await texts(second, ("die", {}))
            again = await texts(second, ("keep", {"text": "c"}))
            successor = await process_of(first)
            await first.close({})
            await second.close({})
        return made, said, gone, again, pid, successor

    made, said, gone, again, pid, successor = asyncio.run(scenario())
    (keep, *_) = made.schemas()
    assert made.names == ["keep", "where", "fail", "die"]
    assert keep["function"]["description"].startswith("Keep a text.")
    assert keep["function"]["parameters"]["required"] == ["text"]
    assert keep["function"]["parameters"]["properties"]["times"]["type"] == "integer"
    assert [status for status, _ in said] == ["ok", "bad_arguments", "error", "ok"]
    assert said[0][1] == "2 kept by alice" and said[3][1] == "3 kept by alice" and "fail" in said[2][1]
    assert [status for status, _ in gone] == ["error"] and "Error: die" in gone[0][1]
    assert again == [("ok", "1 kept by alice")], "a server that has gone is started again"
    assert successor != pid and not alive(pid) and not alive(successor)


@needs_mcp
def test_a_trajectory_may_have_a_server_of_its_own():
    async def scenario():
        slow = {**STDIO, "include": ["sleep"], "timeout_seconds": 0.5}
        made = registry(
            slow, **STDIO, session="trajectory", prefix="my_", timeout_seconds=200, include=["keep", "where"]
        )
        async with made:
            first, second = await made.open(info(0)), await made.open(info(1))
            said = await texts(first, ("my_keep", {"text": "a"}), ("my_keep", {"text": "b"}))
            said += await texts(second, ("my_keep", {"text": "c"}))
            pid = json.loads((await first.call("my_where", {})).text)["pid"]
            late = await texts(first, ("sleep", {"seconds": 5}))
            assert alive(pid)
            await first.close({})
            ended = not alive(pid)
            still = await texts(second, ("my_keep", {"text": "d"}))
            await second.close({})
        return said, late, ended, still

    said, late, ended, still = asyncio.run(scenario())
    assert [text.split()[0] for _, text in [*said, *still]] == ["1", "2", "1", "2"]
    assert late == [("timeout", "Error: sleep did not answer within 0.5 s")] and ended


@needs_mcp
def test_a_server_over_http(http_server, monkeypatch):
    monkeypatch.setenv("NOTES_KEY", "Bearer 1")

    async def scenario():
        made = registry(url=http_server, headers_env={"Authorization": "NOTES_KEY"}, timeout_seconds=200)
        async with made:
            first, second = await made.open(info(0)), await made.open(info(1))
            return await asyncio.gather(
                texts(first, ("keep", {"text": "a"}), ("fail", {"reason": "no"})), texts(second, ("where", {}))
            )

    (kept, failed), ((status, where),) = asyncio.run(scenario())
    assert kept == ("ok", "1 kept by alice") and failed[0] == "error" and "fail" in failed[1]
    assert status == "ok" and json.loads(where)["pid"] != os.getpid()


@needs_mcp
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({**STDIO, "include": ["forget"]}, r"has no tool 'forget'; it has keep, where"),
        ({"command": [sys.executable, "-c", "import sys; sys.exit(1)"]}, "does not list its tools"),
        ({"url": "http://127.0.0.1:9/mcp"}, "does not list its tools"),
        ({"url": "http://127.0.0.1:9/mcp", "headers_env": {"A": "NOT_SET_ANYWHERE"}}, "no variable NOT_SET_ANYWHERE"),
        ({**STDIO, "session": "trajectory"}, "rollout.branching continues in the middle of one"),
    ],
)
def test_what_a_server_cannot_give_is_said_before_a_run(kwargs, message):
    tools = json.dumps([{"tool": "mcp", "kwargs": kwargs}])
    config = load_config(None, [f"rollout.multi_turn.tools={tools}", "rollout.branching.enable=true"])
    with pytest.raises(ConfigError, match=message):
        check_tools(config.tools, config.rollout)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "set either command .* or url"),
        ({"command": "no-such-program-anywhere x"}, "no such program on PATH"),
        ({"url": "ftp://x"}, "must be an address"),
        ({"url": "http://x/", "session": "turn"}, "must be run or trajectory"),
        ({"url": "http://x/", "timeout_seconds": 0}, "above 0"),
    ],
)
def test_wrong_settings_name_themselves(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        registry(**kwargs)


def test_the_package_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"pip install 'mcp>=2.0,<3'"):
        registry(url="http://127.0.0.1:9/mcp", start_timeout_seconds=7)


def test_tools_of_a_server_have_names_of_their_own(monkeypatch):
    monkeypatch.setattr(
        "tools.mcp_servers.tools._listed",
        lambda server: [{"name": "a", "description": "", "parameters": {"type": "object"}}],
    )
    config = load_config(None, [])
    entry = {"tool": "mcp", "name": "b", "kwargs": {"url": "http://x/"}}
    with pytest.raises(ConfigError, match="names of their own"):
        ToolRegistry.from_config(config.tools, [entry])
