"""Tools of one's own: what a configuration may name, what they are made with, and what is said where they are wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megatron_retool.config import ConfigError, MultiTurnConfig, RolloutConfig, ToolsConfig, load_config
from megatron_retool.registry import ExtensionError
from tools.registry import ToolRegistry, check_tools
from tools.tool import ToolResult, TrajectoryInfo

SCHEMA = (
    "{'type': 'function', 'function': {'name': 'own', 'description': 'Own.', "
    "'parameters': {'type': 'object', 'properties': {'n': {'type': 'integer'}}, 'required': ['n']}}}"
)
OWN = f"""
from tools.tool import Tool, ToolResult

class Own(Tool):
    name = 'own'
    schema = {SCHEMA}
    def __init__(self, *, factor: int = 2): self.factor = factor
    async def call(self, arguments): return str(arguments['n'] * self.factor)

class Measured(Own):
    def call(self, arguments): return ToolResult('error', 'no', metrics={{'n': arguments['n']}})

class Wrong(Own):
    async def call(self, arguments): return arguments['n']

async def lookup(query: str, language: str = 'en', *, top_k: int = 3):
    '''Look a term up.

    Args:
        query: What to look for.
        language: Two letters.
    '''
    return f'{{query}} {{language}} {{top_k}}'

def tripling(*, factor: int = 3) -> Own:
    return Own(factor=factor)

def blocking(x: float) -> str:
    '''Half of it.

    Args:
        x: Any number.
    '''
    return str(x / 2)
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def make(*tools: Any) -> ToolRegistry:
    return ToolRegistry.from_config(ToolsConfig(), tools)


def ask(registry: ToolRegistry, name: str, arguments: Any, extra_info: Any = None) -> ToolResult:
    async def scenario() -> ToolResult:
        async with registry:
            return await (await registry.open(TrajectoryInfo(0, 0, extra_info or {}))).call(name, arguments)

    return asyncio.run(scenario())


def test_a_class_in_a_file_gets_its_settings_and_another_name(own: str) -> None:
    registry = make(f"{own}:Own", {"tool": f"{own}:Own", "name": "triple", "kwargs": {"factor": 3}})
    assert registry.names == ["own", "triple"]
    assert [schema["function"]["name"] for schema in registry.schemas()] == ["own", "triple"]
    assert ask(registry, "own", {"n": 5}).text == "10"
    assert ask(registry, "triple", {"n": 5}).text == "15"
    assert "'n' is a required property" in ask(registry, "triple", {}).text


def test_a_function_that_says_so_makes_the_tool(own: str) -> None:
    for kwargs, said in (({}, "12"), ({"factor": 5}, "20")):
        registry = make({"tool": f"{own}:tripling", "kwargs": kwargs})
        assert ask(registry, "own", {"n": 4}).text == said


def test_a_function_is_a_tool_whose_keyword_only_parameters_are_settings(own: str) -> None:
    registry = make({"tool": f"{own}:lookup", "kwargs": {"top_k": 7}}, f"{own}:blocking")
    assert registry.schemas()[0] == {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Look a term up.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for."},
                    "language": {"type": "string", "description": "Two letters."},
                },
                "required": ["query"],
            },
        },
    }
    assert ask(registry, "lookup", {"query": "Peru"}).text == "Peru en 7"
    row = {"tools_kwargs": {"lookup": {"execute_kwargs": {"top_k": 1}}}}
    assert ask(registry, "lookup", {"query": "Peru"}, row).text == "Peru en 1"
    refused = ask(registry, "lookup", {"query": "Peru", "top_k": 1})
    assert refused.status == "bad_arguments" and "'top_k' was unexpected" in refused.text
    result = ask(registry, "blocking", {"x": 3})
    assert (result.status, result.text) == ("ok", "1.5") and result.seconds > 0


def test_an_entry_may_change_settings_of_a_built_in(tmp_path: Path) -> None:
    for name in ("lima", "oslo"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "city {name}"}}\n{{"text": "{name} again"}}\n')
    plain = {"show_ranks": False}
    tools = [
        {"tool": "search", "kwargs": {"corpus": str(tmp_path / "lima.jsonl"), "top_k": 1, **plain}},
        {"tool": "search", "name": "north", "kwargs": {"corpus": str(tmp_path / "oslo.jsonl"), **plain}},
    ]
    assert ask(make(*tools), "search", {"query": "lima"}).text in ("city lima", "lima again")
    assert set(ask(make(*tools), "north", {"query": "oslo"}).text.split("\n\n")) == {"city oslo", "oslo again"}


def test_numbers_of_a_tool_become_means(own: str) -> None:
    registry = make(f"{own}:Measured")
    assert ask(registry, "own", {"n": 1}).text == "no"
    ask(registry, "own", {"n": 4})
    assert registry.take_metrics() == {"tool/own/n": 2.5} and registry.take_metrics() == {}


def test_a_result_of_another_type_is_the_tools_failure(own: str) -> None:
    result = ask(make(f"{own}:Wrong"), "own", {"n": 1})
    assert (result.status, result.text) == ("error", "Error: the tool failed: TypeError")


def test_the_configuration_takes_entries_and_anchors_their_files(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(own).parent)
    override = "rollout.multi_turn.tools=[code_interpreter, {tool: 'own.py:Own', kwargs: {factor: 4}}]"
    config = load_config(None, [override])
    assert config.rollout.multi_turn.uses_code_interpreter
    assert config.rollout.multi_turn.tools == ["code_interpreter", {"tool": f"{own}:Own", "kwargs": {"factor": 4}}]
    check_tools(config.tools, config.rollout)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (3, r"tools\[0\]=3 must be a name, or a mapping"),
        ({"name": "x"}, r"tools\[0\]=.* must be a name, or a mapping"),
        ({"tool": "search", "settings": {}}, r"tools\[0\].settings is unknown: the keys are tool, name and kwargs"),
        ({"tool": "search", "name": 3}, r"tools\[0\].name=3 must be text"),
        ({"tool": "search", "kwargs": [1]}, r"tools\[0\].kwargs=\[1\] must be a mapping"),
    ],
)
def test_entries_of_a_wrong_form(entry: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RolloutConfig(multi_turn=MultiTurnConfig(tools=[entry])).check()


@pytest.mark.parametrize(
    ("target", "kwargs", "said"),
    [
        (
            "calculator",
            {},
            r"tools\[0\]='calculator' is not one of code_interpreter, search, read_page, mcp, and not of the form",
        ),
        ("no.such.module:tool", {}, "there is no module no.such.module"),
        ("tools.tool:missing", {}, "tools.tool has no 'missing'"),
        (
            "{own}:Own",
            {"facotr": 3},
            r"kwargs.facotr: Own has no parameter of that name; its own are factor",
        ),
        ("{own}:lookup", {"k": 3}, r"tools\[0\].kwargs.k: lookup has no parameter of that name; its own are top_k"),
        ("{own}:lookup", {"query": "x"}, r"tools\[0\].kwargs.query: lookup has no parameter of that name"),
        (
            "search",
            {"top": 3},
            r"tools\[0\].kwargs.top is unknown; the settings are backend, backend_kwargs, corpus, top_k",
        ),
        ("search", {"top_k": "many"}, r"tools\[0\].kwargs.top_k=many must be a whole number"),
        ("code_interpreter", {"error_style": "all"}, r"tools\[0\].kwargs.error_style=all must be one of traceback"),
        ("code_interpreter", {"url": "http://x"}, r"kwargs.url belongs to the servers: set tools.code_interpreter.url"),
        ("{bad}:raises", {}, r"has no 'raises'; did you mean Raises"),
        ("{bad}:Raises", {}, r"tools\[0\]=.*bad.py:Raises: making the tool failed: RuntimeError: no licence"),
        ("{bad}:NoTool", {}, "NoTool is no tool: derive the class from tools.tool.Tool, or name a function"),
        ("{bad}:NoSchema", {}, r"bad.py:NoSchema: schema=None must be \{"),
        ("{bad}:OtherName", {}, "the tool's name is 'other' and its schema's 'own': set both to one text"),
        ("{bad}:BadSchema", {}, r"schema.function.parameters.properties.n.type is no JSON schema: 'number\?'"),
        ("{bad}:NoCall", {}, r"NoCall defines no call: add async def call\(self, arguments\)"),
        ("{bad}:OldClose", {}, r"close must take session: .* \(what ends with the run is stop\(self\)\)"),
        ("{bad}:Needs", {}, "open needs seed, which only some prompts may give: give it a default"),
        ("{bad}:Shadows", {}, r"Shadows.start=3 hides the method start of a tool: give the attribute another name"),
        ("{bad}:undescribed", {}, "making the tool failed: .* has no docstring"),
    ],
)
def test_a_wrong_tool_is_one_message(own: str, tmp_path: Path, target: str, kwargs: dict, said: str) -> None:
    (tmp_path / "bad.py").write_text(
        OWN + "class Raises(Own):\n    def __init__(self): raise RuntimeError('no licence')\n"
        "class NoTool: ...\n"
        "class NoSchema(Tool):\n    name = 'x'\n"
        "class OtherName(Own):\n    name = 'other'\n"
        f"class BadSchema(Own):\n    schema = {SCHEMA.replace('integer', 'number?')}\n"
        "class NoCall(Tool):\n    name, schema = Own.name, Own.schema\n"
        "class OldClose(Own):\n    async def close(self): ...\n"
        "class Needs(Own):\n    async def open(self, trajectory, *, seed): ...\n"
        "class Shadows(Own):\n    def __init__(self): self.start = 3\n"
        "def undescribed(x): ...\n"
    )
    target = target.format(own=own, bad=tmp_path / "bad.py")
    entry = {"tool": target, "kwargs": kwargs}
    with pytest.raises((ExtensionError, ConfigError), match=said) as caught:
        check_tools(ToolsConfig(), RolloutConfig(multi_turn=MultiTurnConfig(tools=[entry])))
    assert "rollout.multi_turn.tools[0]" in str(caught.value)


def test_two_tools_of_one_name(own: str) -> None:
    with pytest.raises(ConfigError, match=r"tools\[1\]=.* and .*tools\[0\]=.* have the same name 'own'.*own_2"):
        make(f"{own}:Own", f"{own}:Own")


@pytest.mark.parametrize("seconds", [0, -1, True, "10", float("nan"), 1e9])
def test_a_time_limit_that_is_none_is_refused(own: str, seconds: object) -> None:
    entry = {"tool": f"{own}:Own", "timeout_seconds": seconds}
    with pytest.raises(ConfigError, match=r"tools\[0\].timeout_seconds=.* must be a number of seconds above 0"):
        check_tools(ToolsConfig(), RolloutConfig(multi_turn=MultiTurnConfig(tools=[entry])))
