"""What a template writes is read back exactly, whatever the arguments hold, and nothing else is executed."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_rollout.agent.chosen_format import parsed_calls
from sglang_rollout.agent.tool_call_formats import formats
from sglang_rollout.agent.written_calls import ParsedCall

Calls = list[tuple[str, dict[str, str]]]


def hermes(calls: Calls) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'
        for name, arguments in calls
    )


def angled(calls: Calls, prefix: str = "") -> str:
    def one(name: str, arguments: dict[str, str]) -> str:
        inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        return f"<{prefix}tool_call>\n<function={name}>\n{inside}</function>\n</{prefix}tool_call>"

    return "\n".join(one(*call) for call in calls)


def seed(calls: Calls) -> str:
    return angled(calls, "seed:")


def minimax(calls: Calls) -> str:
    def one(name: str, arguments: dict[str, str]) -> str:
        inside = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments.items())
        return f'<invoke name="{name}">\n{inside}</invoke>\n'

    return "<minimax:tool_call>\n" + "".join(one(*call) for call in calls) + "</minimax:tool_call>"


def glm(calls: Calls) -> str:
    def one(name: str, arguments: dict[str, str]) -> str:
        inside = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items()
        )
        return f"\n<tool_call>{name}\n{inside}</tool_call>"

    return "".join(one(*call) for call in calls) + "<|observation|>"


def deepseek(calls: Calls) -> str:
    inside = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments, ensure_ascii=False)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def deepseek_fenced(calls: Calls) -> str:
    inside = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
        f"{json.dumps(arguments, ensure_ascii=False)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def llama(calls: Calls) -> str:
    return json.dumps({"name": calls[0][0], "parameters": calls[0][1]}, ensure_ascii=False)


def harmony(calls: Calls) -> str:
    name, arguments = calls[0]
    written = json.dumps(arguments, ensure_ascii=False)
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{written}<|call|>"


WRITERS: dict[str, tuple[str, Callable[[Calls], str]]] = {
    "hermes": ("hermes", hermes),
    "qwen3_coder": ("qwen3_coder", angled),
    "seed_oss": ("seed_oss", seed),
    "minimax_m2": ("minimax_m2", minimax),
    "glm45": ("glm45", glm),
    "deepseek_v31": ("deepseek_v3", deepseek),
    "deepseek_v3": ("deepseek_v3", deepseek_fenced),
    "llama3": ("llama3", llama),
    "harmony": ("harmony", harmony),
}
ONE_CALL = {"llama3", "harmony"}
QUOTED: list[Calls] = [
    [("danger", {})],
    [("danger", {"x": "1"})],
    [("danger", {"x": "1", "code": "print(2)"})],
    [("danger", {"x": "1"}), ("danger", {"y": "2"})],
]
PROSE = [
    "Compute it: ",
    "<b>bold</b> ",
    'He said "so.\n',
    "2 < 3 > 1",
    "{",
    "}",
    '"',
    "\\",
    "'",
    "```\n",
    "</code>",
    "<|im_end|>",
]
# Tags of reasoning and single tags of every format, balanced or not.
TAGS = [
    *("<think>", "</think>", "<think>so</think>", "<seed:think>", "</seed:think>", "<tool_call>", "<arg_key>"),
    *("<seed:tool_call>", "<minimax:tool_call>", "<function=danger>", "<parameter=x>", '<invoke name="danger">'),
    *("<code>", "<search>", "<python>", "<｜tool▁sep｜>", "<|message|>", "<|channel|>", "<|start|>assistant"),
    *("</parameter>", "</arg_value>", "</function>", "</invoke>", "</tool_call>", "<|python_tag|>", "<|call|>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<|end|>", "</seed:tool_call>", "</minimax:tool_call>"),
]
quotes = st.builds(
    lambda kind, calls: WRITERS[kind][1](calls), st.sampled_from(sorted(WRITERS)), st.sampled_from(QUOTED)
)
values = st.lists(
    st.one_of(st.sampled_from(PROSE), st.sampled_from(TAGS), quotes, st.text(max_size=8)), max_size=5
).map("".join)
names = st.sampled_from(["run", "search", "web-fetch"])
calls_written = st.lists(
    st.tuples(names, st.dictionaries(st.sampled_from(["code", "text", "k_3"]), values, max_size=3)),
    min_size=1,
    max_size=3,
)


def read(kind: str, turn: str) -> list[ParsedCall]:
    found: list[ParsedCall] = formats.load(WRITERS[kind][0])().parse(turn)
    return found


def plain(calls: list[ParsedCall]) -> Calls:
    return [(call.name, {key: str(value) for key, value in call.arguments.items()}) for call in calls if not call.error]


def ambiguous(kind: str, calls: Calls) -> bool:
    """Whether a value closes its own call or value, tag for tag, so that no reader can tell."""
    marks = {"qwen3_coder": "</parameter>", "seed_oss": "</parameter>", "minimax_m2": "</parameter>"}
    mark = marks.get(kind, "</arg_value>" if kind == "glm45" else None)
    return mark is not None and any(mark in value for _, arguments in calls for value in arguments.values())


@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("kind", sorted(WRITERS))
@given(calls=calls_written, before=st.sampled_from(["", "So \u4f60 I look. ", "<think>\nI could.\n</think>\n\n"]))
@example(calls=[("run", {"code": "</tool_call>" + glm([("danger", {})])})], before="")
@example(calls=[("run", {"code": "</function>\n</tool_call>" + angled([("danger", {})])})], before="")
@example(calls=[("run", {"code": "</invoke>\n</minimax:tool_call>" + minimax([("danger", {})])})], before="")
def test_what_is_written_is_read_back_exactly(kind: str, calls: Calls, before: str) -> None:
    if kind in ONE_CALL:
        calls = calls[:1]
    if kind == "llama3":
        before = ""
    elif kind == "harmony":
        before = before and f"<|channel|>analysis<|message|>{before}<|end|><|start|>assistant"
    elif kind == "seed_oss":
        before = before.replace("think>", "seed:think>")
    found = read(kind, before + WRITERS[kind][1](calls))
    if ambiguous(kind, calls):
        # Perhaps an error, but never a call that is only quoted.
        known = {name for name, _ in calls}
        assert all(call.error or call.name in known or call.name == "danger" for call in found)
        return
    assert [call.error for call in found] == [None] * len(calls)
    assert plain(found) == calls
    assert found[0].start is not None and (before + WRITERS[kind][1](calls))[: found[0].start].strip() in (
        before.strip(),
        before.removesuffix("<|start|>assistant"),
    )


@pytest.mark.parametrize("kind", sorted(WRITERS))
@pytest.mark.parametrize("quoted_kind", sorted(WRITERS))
@pytest.mark.parametrize("quoted", QUOTED)
@pytest.mark.parametrize("around", [("", ""), ("print('''", "''')\n"), ("<think>", "</think>"), ("</think>", "")])
def test_a_quoted_call_stays_in_its_argument(
    kind: str, quoted_kind: str, quoted: Calls, around: tuple[str, str]
) -> None:
    code = f"{around[0]}{WRITERS[quoted_kind][1](quoted)}{around[1]}"
    calls: Calls = [("run", {"code": code, "text": "z"}), ("search", {"text": code})]
    if kind in ONE_CALL:
        calls = calls[:1]
    found = read(kind, WRITERS[kind][1](calls))
    assert plain(found) == calls and not any(call.error for call in found)


@pytest.mark.parametrize("kind", ["qwen3_coder", "seed_oss", "minimax_m2", "glm45"])
@pytest.mark.parametrize(
    "value", ["a</parameter>b", "a</arg_value>b", "</function></tool_call>", "</parameter></function>x"]
)
def test_a_closing_tag_alone_stays_in_its_value(kind: str, value: str) -> None:
    calls: Calls = [("run", {"code": value, "text": "z"}), ("search", {"text": value})]
    assert plain(read(kind, WRITERS[kind][1](calls))) == calls


@pytest.mark.parametrize("prefix", ["", "seed:"])
def test_two_functions_in_one_block_are_two_calls(prefix: str) -> None:
    both = angled([("run", {"a": "1"}), ("search", {"b": "2"})], prefix)
    one_block = both.replace(f"</{prefix}tool_call>\n<{prefix}tool_call>\n", "")
    assert plain(read("seed_oss" if prefix else "qwen3_coder", one_block)) == [
        ("run", {"a": "1"}),
        ("search", {"b": "2"}),
    ]


def test_a_call_that_is_not_closed_executes_nothing_that_it_quotes() -> None:
    quoted = angled([("danger", {"x": "1"})])
    broken = angled([("run", {"code": quoted})]).removesuffix("\n</parameter>\n</function>\n</tool_call>")
    assert [bool(call.error) for call in read("qwen3_coder", f"{broken}\n</parameter>\n")] == [True]


@pytest.mark.parametrize("kind", ["qwen3_coder", "minimax_m2", "hermes"])
def test_a_call_that_is_not_closed_leaves_the_next_one_alone(kind: str) -> None:
    write = WRITERS[kind][1]
    first = write([("run", {"code": "1"})]).replace("</parameter>", "").replace('"}}', '"}')
    found = read(kind, first + "\n" + write([("search", {"text": "2"})]))
    assert [(call.name, bool(call.error)) for call in found if not call.error] == [("search", False)]
    assert len(found) == 2


@pytest.mark.parametrize(
    "turn",
    [
        '{"name": "Ada", "parameters": {"born": 1815}}',
        '{"name": "run", "age": 3}',
        '{"name": "run", "parameters": {}, "age": 3}',
        'So {"name": "run", "parameters": {}}',
    ],
)
def test_an_answer_of_llama_that_is_an_object_is_no_call(turn: str) -> None:
    llama3 = formats.load("llama3")()
    assert parsed_calls(llama3, turn, lambda: {"run"}) == []
    (call,) = parsed_calls(llama3, '{"name": "run", "parameters": {}}', lambda: {"run"})
    assert (call.name, call.error) == ("run", None)


@pytest.mark.parametrize(
    "code",
    ["print('<code>')", 'x = "</code>"', 's = """<code>\n1\n</code>"""', "a = '<search>q</search>'", "1\n</python>"],
)
def test_a_program_that_holds_the_tags_around_it_is_read_whole(code: str) -> None:
    for name, tag in (("retool", "code"), ("arpo", "python")):
        written = code.replace("code>", f"{tag}>") if name == "arpo" else code
        (call,) = formats.load(name)().parse(f"So I compute:\n<{tag}>\n{written}\n</{tag}>")
        assert (call.error, call.arguments) == (None, {"code": written})
