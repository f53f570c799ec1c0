"""What an answer must be: JSON of a schema, or a tool call. From the request's fields to the engine's grammar.

A schema comes from outside and is compiled in the engine's process, where a large one takes minutes and hundreds of
megabytes. So it is measured first: its size, its depth, and the repetitions that it counts out, which cost the most.
Keywords that the grammar would silently drop are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_rollout.agent.tool_call_formats import CallShape
from sglang_rollout.engine.base import Grammar
from sglang_rollout.gateway import fields
from sglang_rollout.gateway.conversation import Constraint
from sglang_rollout.gateway.errors import invalid, unsupported
from sglang_rollout.gateway.rendering import REASONING_END

MOST_CHARACTERS = 1 << 15
"""The schemas of a request may have so many, written as JSON."""
MOST_DEPTH = 32
MOST_VALUES = 2000
MOST_PATTERN = 256
"""Characters of a regular expression."""
MOST_REPETITIONS = 4096
"""Of characters, in all schemas of a request: each takes milliseconds to compile. Those of a regular expression count
``PATTERN_WEIGHT`` times, for they take so much longer."""
PATTERN_WEIGHT = 8
MOST_ITEMS = 4096
_DROPPED = {
    "contains",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "if",
    "maxContains",
    "minContains",
    "multipleOf",
    "not",
    "then",
    "uniqueItems",
}
"""Keywords that xgrammar would not hold an answer to."""
_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties")
_NAME = re.compile(r"[\w.:/-]{1,128}")
_QUANTIFIER = re.compile(r"(\))?\{(\d*)(?:,(\d*))?\}")
Json = Mapping[str, Any]


def of_response_format(asked: Any, field: str) -> Constraint | None:
    """What Chat Completions' response_format, or Responses' text.format, asks for; None: nothing.

    Raises:
        ApiError: 400, naming the field.
    """
    if asked is None:
        return None
    if not isinstance(asked, dict):
        raise invalid(field, "expected an object")
    kind = asked.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint(field, {"type": "object"})
    if kind != "json_schema":
        raise invalid(f"{field}.type", f"expected text, json_object or json_schema, got {kind!r:.40}")
    # Chat Completions wraps the schema once more than Responses and Messages do.
    inner, path = asked, field
    if isinstance(asked.get("json_schema"), dict):
        inner, path = asked["json_schema"], f"{field}.json_schema"
    schema = inner.get("schema")
    if not isinstance(schema, dict):
        raise invalid(f"{path}.schema", "expected a JSON schema, which is an object")
    check_schemas({f"{path}.schema": schema})
    return Constraint(field, schema)


def of_tool_choice(choice: Any, tools: Sequence[Json] | None) -> Constraint | None:
    """What tool_choice asks for, in any API's form; None: nothing.

    Args:
        tools: those of the request, as chat templates take them.

    Raises:
        ApiError: 400: there is no such tool, or the choice is of a kind that is not served.
    """
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind in (None, "auto", "none"):
        return None
    if kind in ("required", "any"):
        name = None
    elif kind in ("function", "tool") and isinstance(choice, dict):
        named = choice["function"] if isinstance(choice.get("function"), dict) else choice
        name = fields.text(named, "name", "tool_choice.")
    else:
        raise unsupported("tool_choice", f"{kind!r:.40}: use auto, none, required (any), or the name of a function")
    offered = [tool["function"] for tool in tools or () if name in (None, tool["function"]["name"])]
    if not offered:
        raise invalid("tool_choice", "the request has no tools" if name is None else f"there is no tool {name!r:.60}")
    for function in offered:
        if not _NAME.fullmatch(function["name"]):
            raise invalid("tool_choice", f"a tool that is forced needs a name of letters: {function['name']!r:.60}")
    check_schemas({f"tools.{each['name']}.parameters": each.get("parameters") or {} for each in offered})
    return Constraint("tool_choice", name=name)


def check_schemas(schemas: Mapping[str, Json]) -> None:
    """Refuse schemas that would take an engine long, or that it would not hold an answer to.

    Args:
        schemas: by the fields that they came in.

    Raises:
        ApiError: 400, naming the field.
    """
    repetitions, size = 0, 0
    for field, schema in schemas.items():
        repetitions += _measured(schema, field)
        size += len(json.dumps(schema))
        if size > MOST_CHARACTERS:
            raise invalid(field, f"a request's schemas may have {MOST_CHARACTERS} characters")
        if repetitions > MOST_REPETITIONS:
            raise invalid(
                field,
                f"its lengths and patterns count out {repetitions} characters, and {MOST_REPETITIONS} are possible: "
                "lower maxLength, or the {m,n} of patterns",
            )


def _measured(schema: Json, field: str) -> int:
    """Repetitions in ``schema``, whose other bounds are checked."""
    repetitions, values = 0, 0
    waiting: list[tuple[Any, int, bool]] = [(schema, 1, True)]
    while waiting:
        value, depth, is_schema = waiting.pop()
        values += 1
        if depth > MOST_DEPTH:
            raise invalid(field, f"it is nested more than {MOST_DEPTH} deep")
        if values > MOST_VALUES:
            raise invalid(field, f"it has more than {MOST_VALUES} values")
        if isinstance(value, str) and "\0" in value:
            raise invalid(field, "it has a NUL character")
        if isinstance(value, list):
            waiting += [(each, depth + 1, is_schema) for each in value]
        if not isinstance(value, dict):
            continue
        for key, inner in value.items():
            if not is_schema:
                waiting.append((inner, depth + 1, False))
                continue
            if key in _DROPPED:
                raise invalid(field, f"{key!r} is not supported: an answer could not be held to it")
            if key == "$ref" and not str(inner).startswith("#"):
                raise invalid(field, "$ref: a schema refers only to itself (#/$defs/…)")
            if key in ("pattern", "patternProperties"):
                written = list(inner) if isinstance(inner, dict) else [inner]
                repetitions += sum(_pattern_repetitions(each, field) for each in written)
            if key in ("minLength", "maxLength") and isinstance(inner, (int, float)):
                repetitions += int(min(max(inner, 0), 2 * MOST_REPETITIONS))
            if key in _COUNTS and isinstance(inner, (int, float)) and inner > MOST_ITEMS:
                raise invalid(field, f"{key}={inner:g}: at most {MOST_ITEMS}")
            # Names of properties are no keywords, and values of constants no schemas.
            if key in ("properties", "$defs", "definitions", "patternProperties") and isinstance(inner, dict):
                waiting += [(each, depth + 2, True) for each in inner.values()]
                values += len(inner)
            else:
                waiting.append((inner, depth + 1, key not in ("const", "enum", "default", "examples", "required")))
    return repetitions


def _pattern_repetitions(pattern: Any, field: str) -> int:
    if not isinstance(pattern, str) or len(pattern) > MOST_PATTERN:
        raise invalid(field, f"a pattern is a string of at most {MOST_PATTERN} characters")
    inside, of_groups = 0, 1
    for group, low, high in _QUANTIFIER.findall(pattern):
        most = min(max(int(low[:9] or 0), int(high[:9] or 0), 1), 10 * MOST_REPETITIONS)
        if group:
            of_groups = min(of_groups * most, 10 * MOST_REPETITIONS)
        else:
            inside += most
    return PATTERN_WEIGHT * (max(inside, 1) * of_groups if of_groups > 1 else inside)


def grammar(
    constraint: Constraint, tools: Sequence[Json] | None, shape: CallShape | None, *, several: bool, reasons: bool
) -> Grammar:
    """``constraint`` as the engine takes it.

    Args:
        tools: those that the model is shown.
        shape: how it writes calls; None: in a way that has no grammar.
        several: an answer may have several calls.
        reasons: the answer begins in the middle of the model's reasoning, which ends with </think>.

    Raises:
        ApiError: 400: the way in which the model writes calls has no grammar.
    """
    form: dict[str, Any]
    offered = [tool["function"] for tool in tools or () if constraint.name in (None, tool["function"]["name"])]
    if constraint.schema is not None:
        # Where there are tools the model may call one instead.
        offered = [function for function in offered if _NAME.fullmatch(function["name"])]
        if not offered and not reasons:
            return Grammar("json_schema", json.dumps(constraint.schema))
        form = {"type": "json_schema", "json_schema": constraint.schema}
    if offered:
        if shape is None:
            raise unsupported(
                constraint.field, "calls of rollout.multi_turn.format have no grammar: leave it out, or the tools"
            )
        if constraint.schema is not None:
            check_schemas({f"tools.{each['name']}.parameters": each.get("parameters") or {} for each in offered})
        calls = shape.grammar(offered, several and constraint.name is None)
        form = calls if constraint.schema is None else {"type": "or", "elements": [form, calls]}
    if reasons:
        thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": REASONING_END}
        form = {"type": "sequence", "elements": [thought, {"type": "regex", "pattern": r"\n{0,2}"}, form]}
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": form}))
