"""Whatever a model or a tool writes: a call that cannot be read is told to the model, and nothing raises."""

from __future__ import annotations

import asyncio
import json
import re
import time
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from megatron_retool.trajectory import FinishReason, read_trajectories, write_trajectories
from sglang_rollout.agent.loop import run_call
from sglang_rollout.agent.paused_groups import PausedGroup, read_paused_groups, write_paused_groups
from sglang_rollout.agent.tool_call_formats import Glm45Format, HarmonyFormat, HermesFormat, Qwen3CoderFormat, formats
from sglang_rollout.agent.trajectory_state import TrajectoryState
from sglang_rollout.agent.turn_glue import TurnGlue
from sglang_rollout.agent.written_calls import tagged_blocks, without_fence, without_reasoning
from tests.kit.markov_policy import CONTROL, TAGS, build_tokenizer
from tests.kit.scripted import ScriptedTools
from tests.sglang_rollout.agent.test_loop import END, ScriptedEngine, make_loop, run
from tools.loading import named_tool
from tools.registry import ToolRegistry
from tools.tool import Tool, ToolResult, TrajectoryInfo, run_method

FORMATS = [formats.load(name)() for name in formats.names]
# Halves of surrogate pairs and control characters too.
anything = st.text(st.characters(exclude_categories=()), max_size=30)
pieces = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<code>", "</code>", "<search>", "</search>"),
        *("<python>", "</python>", "<result>", "```", "```python", "\n", " ", "<|im_end|>", "<|im_start|>"),
        *('"', "\\", "\\ud800", "\x00", "\ud83d", "\ude00", "{", "}", "[", "]", ":", ",", "NaN", "-Infinity", "1e999"),
        *("<function=", "</function>", "<parameter=", "</parameter>", ">", "<arg_key>", "</arg_key>", "<arg_value>"),
        *("</arg_value>", "<|observation|>", "<|start|>assistant", "<|message|>", "<|call|>", " to=functions."),
        *("<seed:tool_call>", "</seed:tool_call>", "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="x">'),
        *("</invoke>", '<parameter name="x">', "function", "<|python_tag|>"),
        *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        *('"name"', '"arguments"', '"code_interpreter"'),
    ]
)
bodies = st.one_of(
    anything.map(lambda text: json.dumps({"name": "code_interpreter", "arguments": {"code": text}})),
    st.integers(4200, 5000).map(lambda digits: '{"name":"x","arguments":{"a":' + "9" * digits + "}}"),
    st.integers(1, 3000).map(lambda depth: '{"name":"x","arguments":{"a":' + "[" * depth + "]" * depth + "}}"),
    st.integers(1, 3000).map(lambda depth: '{"name":"x","arguments":' + '{"a":' * depth + "1" + "}" * depth + "}"),
    st.integers(1, 2000).map(lambda depth: json.dumps({"name": "x", "arguments": "[" * depth + "9" * 4301})),
    anything,
)
turns = st.one_of(
    st.lists(pieces | anything, max_size=40).map("".join),
    st.lists(bodies.map(lambda body: f"<tool_call>\n{body}\n</tool_call>"), max_size=4).map("".join),
    st.lists(anything.map(lambda code: f"<code>\n```py\n{code}\n```\n</code>"), max_size=3).map("".join),
)


@settings(max_examples=100, deadline=None)
@given(turns, st.sampled_from(FORMATS))
def test_every_turn_is_read_answered_and_kept(tmp_path_factory, tokenizer, turn, call_format):
    calls = call_format.parse(turn)
    assert all(call.error is not None or call.name for call in calls)
    tools = ScriptedTools()
    answered = [asyncio.run(run_call(tools, call)) for call in calls[:3]]
    glue = TurnGlue(tokenizer, call_format, max_result_tokens=40)
    rendered = glue.render([text for _, text in answered] or [turn])
    assert all(tokens <= 40 for tokens in rendered.result_tokens)
    state = ended(rendered.ids)
    state.tool_calls = [record for record, _ in answered]
    state.pending_calls = calls
    directory = tmp_path_factory.mktemp("turn")
    write_paused_groups([PausedGroup(3, 1, 0, [state])], directory / "paused.parquet")
    (paused,) = read_paused_groups(directory / "paused.parquet")
    assert json.dumps([vars(call) for call in paused.states[0].pending_calls]) == json.dumps([vars(c) for c in calls])
    write_trajectories([state.to_trajectory()], directory / "step.parquet", texts=[(turn, turn)])
    (stored,) = read_trajectories(directory / "step.parquet")
    assert stored.tool_calls == state.tool_calls


def ended(ids: list[int]) -> TrajectoryState:
    state = TrajectoryState([1], group_id=3, index=0, finish_reason=FinishReason.STOP)
    state.append_unsampled(ids)
    return state


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ('{"a": ' + "9" * 4301 + "}", "a number has too many digits"),
        ('{"a": ' + "[" * 90 + "]" * 90 + "}", "nested too deeply"),
        ('{"a": ' * 50_000, "nested too deeply"),
    ],
)
def test_what_python_cannot_hold_is_a_malformed_call(tokenizer, arguments, reason):
    turn = f'<tool_call>{{"name": "x", "arguments": {arguments}}}</tool_call>'
    (call,) = HermesFormat().parse(turn)
    assert call.error == f"Error: invalid tool call: {reason}"
    state = run(make_loop(build_tokenizer(), max_response_length=10**6), ScriptedEngine(tokenizer, [turn + END, END]))
    assert [call.status for call in state.tool_calls] == ["parse_error"]
    assert state.finish_reason is FinishReason.STOP


def test_calls_as_deep_as_a_tool_may_need_are_read():
    arguments = {"a": json.loads("[" * 60 + "]" * 60)}
    (call,) = HermesFormat().parse("<tool_call>" + json.dumps({"name": "x", "arguments": arguments}) + "</tool_call>")
    assert call.arguments == arguments


def fence_by_expression(code: str) -> str:
    fenced = re.fullmatch(r"\s*```[a-zA-Z0-9_+-]*[ \t]*\n(.*?)\n?[ \t]*```\s*", code, flags=re.DOTALL)
    return fenced[1] if fenced else code.strip("\n")


def reasoning_by_expression(text: str) -> str:
    head, closing, tail = text.partition("</think>")
    if closing and "<think>" not in head:
        text = tail
    return re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL).partition("<think>")[0]


@given(st.lists(st.sampled_from(["```", "`", "\n", " ", "\t", "x", "py", "\r", "<think>", "</think>"]), max_size=12))
def test_fences_and_reasoning_are_found_as_expressions_would_find_them(parts):
    text = "".join(parts)
    assert without_fence(text) == fence_by_expression(text)
    assert without_reasoning(text) == reasoning_by_expression(text)


@pytest.mark.parametrize(
    ("read", "repeated"),
    [
        (without_reasoning, "<think>"),
        (without_reasoning, "<think></think>"),
        (without_reasoning, "</think>"),
        (lambda text: without_fence(f"```\n{text}x"), " " * 10),
        (lambda text: without_fence(f"```\n{text}x"), "```\n"),
        (HermesFormat().parse, "<tool_call>"),
        (HermesFormat().parse, "</tool_call>"),
        (lambda text: Qwen3CoderFormat().parse(f"<tool_call><function=f>{text}</function>"), "<parameter=x>"),
        (lambda text: Glm45Format().parse(f"<tool_call>f{text}<|observation|>"), "<arg_key>x</arg_key>"),
        (lambda text: HarmonyFormat().parse(f"{text}<|call|>"), "<|start|> to="),
        (lambda text: HarmonyFormat().parse(f"{text}<|message|><|call|>"), " to="),
        (lambda text: tagged_blocks(text, ("search", "python")), "<search></python>"),
        (lambda text: tagged_blocks(text, ("search", "python")), "<search>"),
    ],
)
def test_reading_takes_time_in_proportion_to_the_text(read: Callable[[str], Any], repeated: str):
    def cost(count: int) -> float:
        text, seconds = repeated * count, []
        for _ in range(3):
            began = time.process_time()
            read(text)
            seconds.append(time.process_time() - began)
        return min(seconds)

    # Sixteen times the text: 16 times the work where it is linear, 256 times where it is quadratic.
    assert cost(32_000) < 80 * cost(2_000) + 0.01


# ---- results of tools


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(pieces | anything, max_size=12).map("".join), min_size=1, max_size=3))
def test_no_result_raises_or_holds_a_control_token(tokenizer, results):
    glue = TurnGlue(tokenizer, HermesFormat(), max_result_tokens=50)
    control = {tokenizer.convert_tokens_to_ids(token) for token in (*CONTROL, *TAGS)}
    honest = [token for token in glue.render(["x"] * len(results)).ids if token in control]
    assert [token for token in glue.render(results).ids if token in control] == honest


def test_what_becomes_a_control_token_by_normalisation_is_taken_out():
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_tokens(["<stop>"])  # not a special one: it is looked for in the normalised text
    wide = "\uff1cstop\uff1e"
    assert unicodedata.normalize("NFKC", wide) == "<stop>"
    stop = tokenizer.convert_tokens_to_ids("<stop>")
    assert stop in tokenizer.encode(wide, add_special_tokens=False)
    ids = TurnGlue(tokenizer, HermesFormat(), 50).render([f"a{wide}b<stop>"]).ids
    assert stop not in ids and "a\ufffdb" in tokenizer.decode(ids)


def test_an_enormous_result_is_cut_before_it_is_tokenised(tokenizer):
    lengths = []

    class Counting(TurnGlue):
        def _encode(self, text):
            lengths.append(len(text))
            return super()._encode(text)

    glue = Counting(tokenizer, HermesFormat(), max_result_tokens=60)
    lengths.clear()
    appended = glue.render(["begin " + "a" * 5_000_000 + " end"])
    text = tokenizer.decode(appended.ids)
    assert max(lengths) < 10_000 and appended.truncated == [True] and appended.result_tokens[0] <= 60
    left_out = int(re.search(r"\[\.\.\. (\d+) characters left out \.\.\.\]", text)[1])
    assert "begin" in text and " end" in text
    assert left_out + text.partition("<tool_response>\n")[2].partition("\n</tool_response>")[0].count("a") >= 5_000_000


# ---- tools of one's own that break their contract


class Wrong(Tool):
    name = "wrong"
    schema = {"type": "function", "function": {"name": "wrong", "parameters": {"type": "object"}}}

    def __init__(self, call: Callable[[], Any]) -> None:
        self.made = call

    def call(self, arguments):
        return self.made()


def leave() -> None:
    raise SystemExit(3)


@pytest.mark.parametrize(
    "call",
    [
        lambda: next(iter(())),
        leave,
        lambda: ToolResult("ok", None),
        lambda: ToolResult("ok", b"\xff"),
        lambda: ToolResult("ok", "1", metrics={"x": "much"}),
        lambda: None,
    ],
)
def test_a_tool_that_breaks_its_contract_answers_with_an_error(call):
    async def answer() -> ToolResult:
        tools = await ToolRegistry([named_tool(Wrong(call))]).open(TrajectoryInfo(0, 0))
        return await asyncio.wait_for(tools.call("wrong", {}), 5)

    result = asyncio.run(answer())
    assert result.status == "error" and result.text.startswith("Error: the tool failed: ")


def test_a_tool_that_is_cancelled_from_inside_is_an_error_of_the_tool(tokenizer):
    class Inside(ScriptedTools):
        async def call(self, name, arguments):
            task = asyncio.ensure_future(asyncio.sleep(9))
            asyncio.get_running_loop().call_soon(task.cancel)
            await task

    turn = '<tool_call>{"name": "a", "arguments": {}}</tool_call>' + END
    state = run(make_loop(tokenizer, Inside()), ScriptedEngine(tokenizer, [turn, END]))
    assert [call.status for call in state.tool_calls] == ["error"] and state.finish_reason is FinishReason.STOP


def test_a_coroutine_cannot_end_the_program():
    async def call():
        leave()

    with pytest.raises(RuntimeError, match="SystemExit"):
        asyncio.run(run_method(call))


def test_a_format_of_ones_own_that_raises_tells_the_model(tokenizer):
    loop = make_loop(tokenizer)

    class Fragile(HermesFormat):
        def parse(self, text):
            raise KeyError("x")

    loop.format = Fragile()
    state = run(loop, ScriptedEngine(tokenizer, ["word" + END] * 9))
    assert {call.status for call in state.tool_calls} == {"parse_error"}
    assert "reading it failed: KeyError" in tokenizer.decode(state.response_ids)
