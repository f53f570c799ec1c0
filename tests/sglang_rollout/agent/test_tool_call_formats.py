from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_retool.config import Config, MultiTurnConfig, RolloutConfig
from megatron_retool.registry import ExtensionError
from sglang_rollout.agent.chosen_format import check_format, make_format
from sglang_rollout.agent.tool_call_formats import ArpoFormat, HermesFormat, ReToolFormat
from sglang_rollout.agent.written_calls import tagged_blocks, without_fence, without_reasoning

HERMES, RETOOL, ARPO = HermesFormat(), ReToolFormat(), ArpoFormat()


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def test_hermes_reads_several_calls_of_a_turn_in_order():
    text = "First " + call('{"name": "a", "arguments": {"x": 1}}') + "\n" + call('{"name": "b", "arguments": {}}')
    assert [(c.name, c.arguments, c.error) for c in HERMES.parse(text)] == [("a", {"x": 1}, None), ("b", {}, None)]


@pytest.mark.parametrize(
    "text",
    [
        "<think>maybe " + call('{"name": "a", "arguments": {}}') + "</think>The answer is 4.",
        "still thinking " + call('{"name": "a", "arguments": {}}') + "</think>The answer is 4.",
        "<think>never closed " + call('{"name": "a", "arguments": {}}'),
    ],
)
def test_a_call_inside_reasoning_is_not_a_call(text):
    assert HERMES.parse(text) == []


def test_calls_after_reasoning_count():
    text = "<think>x " + call('{"name": "no", "arguments": {}}') + "</think>" + call('{"name": "yes", "arguments": {}}')
    assert [c.name for c in HERMES.parse(text)] == ["yes"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"name": "a", "arguments": {"code": "\\d"}}', "Invalid \\escape"),
        ('{"name": "a", "arguments": {}} and more', "Extra data"),
        ('{"name": "a", "arguments": {}', "Expecting ',' delimiter"),
        ("", "Expecting value"),
        ("[1, 2]", "expected an object"),
        ('{"arguments": {}}', '"name" is missing'),
        ('{"name": 3, "arguments": {}}', '"name" is missing'),
        ('{"name": "a", "arguments": [1]}', '"arguments" is not an object'),
        ('{"name": "a", "arguments": "not json"}', '"arguments" is not an object'),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_malformed_call_becomes_a_message_for_the_model(body, reason):
    (parsed,) = HERMES.parse(call(body))
    assert parsed.error is not None and reason in parsed.error
    assert parsed.raw == body
    assert len(parsed.error) < 100


def test_an_unclosed_call_is_an_error_and_does_not_swallow_the_others():
    first, second = HERMES.parse('<tool_call>{"name": "a"' + call('{"name": "b", "arguments": {}}'))
    assert first.error is not None and "</tool_call>" in first.error
    assert second.name == "b" and second.error is None


def test_arguments_may_be_a_json_string_and_code_may_hold_raw_newlines():
    (as_string,) = HERMES.parse(call('{"name": "a", "arguments": "{\\"x\\": 2}"}'))
    assert as_string.arguments == {"x": 2}
    (raw,) = HERMES.parse(call('{"name": "a", "arguments": {"code": "x = 1\n\ty"}}'))
    assert raw.arguments == {"code": "x = 1\n\ty"}


@given(st.text(), st.dictionaries(st.text(), st.text(), max_size=3))
def test_hermes_reads_back_what_json_writes(name, arguments):
    body = json.dumps({"name": name, "arguments": arguments}).replace("<", "\\u003c")
    (parsed,) = HERMES.parse(call(body))
    if name:
        assert (parsed.name, parsed.arguments, parsed.error) == (name, arguments, None)
    else:
        assert parsed.error is not None


@given(st.text(alphabet='<>/thinktool_call{}":,\\ code\n', max_size=200), st.sampled_from([HERMES, RETOOL, ARPO]))
def test_parsing_never_raises(text, call_format):
    for parsed in call_format.parse(text):
        assert parsed.error is not None or parsed.name


def test_retool_code_with_and_without_a_fence():
    (fenced,) = RETOOL.parse("Let me see\n<code>\n```python\nprint(1)\n```\n</code>")
    assert (fenced.name, fenced.arguments) == ("code_interpreter", {"code": "print(1)"})
    (bare,) = RETOOL.parse("<code>\nif x:\n    print(1)\n</code>")
    assert bare.arguments == {"code": "if x:\n    print(1)"}
    assert RETOOL.render_results(["1"]) == "\n<interpreter>\n1\n</interpreter>\n"


def test_retool_closing_tag_without_an_opening_one_is_reported():
    (parsed,) = RETOOL.parse("print(1)</code>")
    assert parsed.error is not None and "<code>" in parsed.error


def test_arpo_knows_two_tools():
    search, python = ARPO.parse("<search> capital of Peru </search> then <python>\nprint(2)\n</python>")
    assert (search.name, search.arguments) == ("search", {"query": "capital of Peru"})
    assert (python.name, python.arguments) == ("code_interpreter", {"code": "print(2)"})
    assert ARPO.render_results(["Lima"]) == " <result>\nLima\n</result>"


def test_a_block_begins_at_the_last_opening_tag():
    assert tagged_blocks("<code>a <code>b</code>", ("code",)) == [("code", "b")]
    assert tagged_blocks("<search>a</python>", ("search", "python")) == [("python", None)]


def test_fence_and_reasoning_edges():
    assert without_fence("```\nx\n```") == "x"
    assert without_fence("print('```')") == "print('```')"
    assert without_reasoning("a<think>b</think>c<think>d") == "ac"


# ---- formats of one's own

OWN = """
from sglang_rollout.agent.written_calls import ParsedCall, tagged_blocks

class Ask:
    uses_chat_template = False
    closing_tags = ("</ask>",)
    def __init__(self, *, tool: str = "search"): self.tool = tool
    def parse(self, text):
        return [ParsedCall(self.tool, {"query": body or ""}, text) for _, body in tagged_blocks(text, ("ask",))]
    def render_results(self, results): return "".join(f"<told>{result}</told>" for result in results)

class NoParse:
    uses_chat_template, closing_tags = True, ()
    def render_results(self, results): ...
class NoTags(Ask): closing_tags = ()
class ListTags(Ask): closing_tags = ["</ask>"]
class Fragile(Ask):
    def parse(self, text): return [ParsedCall("x", {}, text[text.index("<ask>"):])]
class Dicts(Ask):
    def parse(self, text): return [{"name": "x"}]
class Silent(Ask):
    def render_results(self, results): return None
class Named(Ask):
    def render_named_results(self, names, results): return names[2]
class Raises(Ask):
    def __init__(self): raise KeyError("model")
"""


def test_a_format_of_ones_own_and_settings_of_a_built_in(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    own = make_format(MultiTurnConfig(format=f"{tmp_path}/own.py:Ask", format_kwargs={"tool": "wiki"}))
    (parsed,) = own.parse("<ask>who</ask>")
    assert (parsed.name, parsed.arguments, own.render_results(["me"])) == ("wiki", {"query": "who"}, "<told>me</told>")
    arpo = make_format(MultiTurnConfig(format="arpo", format_kwargs={"search_tool": "wiki", "code_tool": "sandbox"}))
    assert [call.name for call in arpo.parse("<search>x</search><python>1</python>")] == ["wiki", "sandbox"]


@pytest.mark.parametrize(
    ("target", "kwargs", "said"),
    [
        ("hermse", {}, "format='hermse' is not one of hermes, .*retool, arpo, .* the nearest is hermes"),
        ("hermes", {"tool": "x"}, "format_kwargs.tool: HermesFormat has no parameter of that name"),
        ("NoParse", {}, "NoParse has no method parse"),
        ("NoTags", {}, r"NoTags.closing_tags=\(\) must be \(\) where uses_chat_template is True, and otherwise"),
        ("ListTags", {}, "ListTags.closing_tags must be a tuple"),
        ("Fragile", {}, r"parse\(''\) raised ValueError: substring not found. What is malformed must come back"),
        ("Dicts", {}, r"parse\(''\) returned \[\{'name': 'x'\}\], which is no list of ParsedCall"),
        ("Silent", {}, "returned None, which is no text"),
        ("Named", {}, r"render_named_results\(.*\) raised IndexError"),
        ("Raises", {}, "making it failed: KeyError: 'model'"),
    ],
)
def test_a_wrong_format_is_one_message(tmp_path, target, kwargs, said):
    (tmp_path / "own.py").write_text(OWN)
    name = target if target[0].islower() else f"{tmp_path}/own.py:{target}"
    config = Config(rollout=RolloutConfig(multi_turn=MultiTurnConfig(format=name, format_kwargs=kwargs)))
    with pytest.raises(ExtensionError, match=said) as caught:
        check_format(config.rollout)
    assert "rollout.multi_turn.format" in str(caught.value)
