"""Answers of a form: what requests ask for, what is too large to be compiled, and what the grammars then allow."""

from __future__ import annotations

import random

import jsonschema
import numpy as np
import pytest
import xgrammar

from megatron_retool.config import MultiTurnConfig
from sglang_rollout.agent.chosen_format import make_format, parsed_calls
from sglang_rollout.agent.tool_call_formats import CallShape, HasCallShape, formats
from sglang_rollout.gateway import constraints
from sglang_rollout.gateway.conversation import Constraint
from sglang_rollout.gateway.errors import ApiError
from tests.kit.markov_policy import build_tokenizer
from tools.arguments import typed_arguments

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 3}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]
SHAPED = sorted(name for name in formats.names if hasattr(make_format(MultiTurnConfig(format=name)), "call_shape"))


@pytest.fixture(scope="module")
def info():
    return xgrammar.TokenizerInfo.from_huggingface(build_tokenizer())


def compiled(info, grammar):
    compiler = xgrammar.GrammarCompiler(info)
    compile_it = compiler.compile_json_schema if grammar.kind == "json_schema" else compiler.compile_structural_tag
    return compile_it(grammar.text)


def written(info, grammar, seed: int) -> str:
    """A text of the grammar, drawn letter by letter; after a while what closes something is preferred."""
    draw, matcher = random.Random(seed), xgrammar.GrammarMatcher(grammar)
    mask, text, vocabulary = xgrammar.allocate_token_bitmask(1, info.vocab_size), b"", info.decoded_vocab
    for step in range(1000):
        matcher.fill_next_token_bitmask(mask)
        allowed = np.flatnonzero(
            np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: info.vocab_size]
        ).tolist()
        if info.stop_token_ids[0] in allowed:
            return text.decode()
        pieces = {token: vocabulary[token] for token in allowed}
        closing = [token for token, piece in pieces.items() if piece.strip() and piece.strip() in b'"}]<0e1']
        token = draw.choice(
            closing if step > 15 and closing else [each for each in allowed if pieces[each].strip()] or allowed
        )
        text += pieces[token]
        assert matcher.accept_token(token)
    raise AssertionError(f"no end: {text[:400]!r}")


@pytest.mark.parametrize("name", SHAPED)
@pytest.mark.parametrize("forced", ["weather", None])
def test_forced_calls_are_read_as_such(info, name, forced):
    form = make_format(MultiTurnConfig(format=name))
    assert isinstance(form, HasCallShape)
    asked = Constraint("tool_choice", name=forced)
    grammar = compiled(info, constraints.grammar(asked, TOOLS, form.call_shape, several=True, reasons=False))
    # A text between tags may be of any length.
    held = (
        SCHEMA if form.call_shape.style == "json" else {**SCHEMA, "properties": {"days": SCHEMA["properties"]["days"]}}
    )
    held = {**held, "additionalProperties": {"type": "string"}}
    counts = set()
    for seed in range(4):
        text = written(info, grammar, seed)
        calls = parsed_calls(form, text, lambda: {"weather", "time"})
        counts.add(len(calls))
        assert calls and not any(call.error for call in calls), text
        for call in calls:
            assert call.name == forced or (forced is None and call.name in ("weather", "time")), text
            if call.name == "weather":
                jsonschema.validate(typed_arguments(call.arguments, SCHEMA), held)
    assert forced is None or counts == {1}


def allows(info, grammar, text: str) -> bool:
    """Whether ``text`` is a whole answer."""
    matcher = xgrammar.GrammarMatcher(compiled(info, grammar))
    return matcher.accept_string(text) and matcher.accept_token(info.stop_token_ids[0])


def test_json_follows_the_models_reasoning(info):
    asked, shape = Constraint("response_format", SCHEMA), CallShape("<call>NAME", "</call>")
    answer, wrong, call = '{"city": "x", "days": 3}', '{"city": "x"}', "<call>time{}</call>"
    for tools, reasons, texts in (
        (None, False, {answer: True, wrong: False, call: False}),
        (None, True, {f"hm {{</think>\n\n{answer}": True, answer: False, f"hm</think>{wrong}": False}),
        (TOOLS, False, {answer: True, call: True, call + call: False, wrong: False}),
        (TOOLS, True, {f"</think>{call}": True, f"hm</think>\n\n{answer}": True, call: False}),
    ):
        grammar = constraints.grammar(asked, tools, shape, several=False, reasons=reasons)
        assert {text: allows(info, grammar, text) for text in texts} == texts
    with pytest.raises(ApiError, match="have no grammar"):
        constraints.grammar(asked, TOOLS, None, several=False, reasons=False)


def nested(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def of(**inner) -> dict:
    return {"type": "object", "properties": {"a": inner}}


TOO_MUCH = [
    nested(constraints.MOST_DEPTH + 1),
    nested(5000),
    {"enum": [str(number) for number in range(constraints.MOST_VALUES + 1)]},
    {"const": "x" * constraints.MOST_CHARACTERS},
    {"const": "a\0b"},
    of(type="string", maxLength=10_000),
    of(type="string", minLength=10_000),
    of(type="string", maxLength=1e300),
    {"type": "object", "properties": {f"p{n}": {"type": "string", "maxLength": 999} for n in range(5)}},
    of(type="string", pattern="a{1,2000}"),
    of(type="string", pattern="(a{1,40}){1,40}"),
    of(type="string", pattern="((a{30}){30}){30}"),
    of(type="string", pattern="a{99999999999999999999}"),
    of(type="string", pattern="a" * 1000),
    {"type": "object", "patternProperties": {"a{1,2000}": {}}},
    of(pattern=3),
    of(type="array", maxItems=1_000_000),
    of(type="array", uniqueItems=True),
    {"allOf": [{"not": {"type": "string"}}]},
    of(**{"$ref": "https://example.com/schema.json"}),
    of(**{"$ref": "file:///etc/passwd"}),
]


@pytest.mark.parametrize("schema", TOO_MUCH, ids=range(len(TOO_MUCH)))
def test_schemas_are_measured_before_they_are_compiled(schema):
    for read in (
        lambda: constraints.of_response_format({"type": "json_schema", "json_schema": {"schema": schema}}, "form"),
        lambda: constraints.of_response_format({"type": "json_schema", "schema": schema}, "form"),
        lambda: constraints.of_tool_choice("any", [{"function": {"name": "f", "parameters": schema}}]),
    ):
        with pytest.raises(ApiError) as raised:
            read()
        assert raised.value.status == 400 and len(str(raised.value)) < 400


def test_common_schemas_are_taken():
    for schema in (
        SCHEMA,
        {},
        of(type="string", maxLength=2000, pattern="^[a-z]{1,20}$"),
        {
            "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
            "$ref": "#/$defs/node",
        },
        # Properties with names of keywords are properties.
        {"type": "object", "properties": {"if": {"type": "string"}, "pattern": {"type": "integer"}, "not": {}}},
        {"enum": [{"not": 1, "$ref": "x"}]},
    ):
        assert constraints.of_response_format({"type": "json_schema", "schema": schema}, "form").schema == schema


CHOICES = [
    (None, None),
    ("auto", None),
    ({"type": "none"}, None),
    ("required", Constraint("tool_choice")),
    ({"type": "any"}, Constraint("tool_choice")),
    ({"type": "function", "function": {"name": "time"}}, Constraint("tool_choice", name="time")),
    ({"type": "function", "name": "time"}, Constraint("tool_choice", name="time")),
    ({"type": "tool", "name": "time"}, Constraint("tool_choice", name="time")),
]


@pytest.mark.parametrize(("choice", "expected"), CHOICES, ids=range(len(CHOICES)))
def test_tool_choice_in_every_apis_form(choice, expected):
    assert constraints.of_tool_choice(choice, TOOLS) == expected


@pytest.mark.parametrize(
    ("choice", "tools"),
    [
        ("required", []),
        ("required", None),
        ({"type": "tool", "name": "no_such"}, TOOLS),
        ({"type": "function"}, TOOLS),
        ({"type": "allowed_tools", "mode": "required", "tools": []}, TOOLS),
        ("some", TOOLS),
        (3, TOOLS),
        ("any", [{"function": {"name": 'a"b<'}}]),
    ],
)
def test_a_choice_that_cannot_be_made(choice, tools):
    with pytest.raises(ApiError, match="tool_choice"):
        constraints.of_tool_choice(choice, tools)


@pytest.mark.parametrize(
    "asked", ["json", {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": 3}}]
)
def test_a_form_that_is_none(asked):
    with pytest.raises(ApiError, match=r"^form"):
        constraints.of_response_format(asked, "form")
