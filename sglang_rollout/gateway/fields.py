"""Reading the fields of a request's JSON: what is wrong is an ``ApiError`` of status 400 with the field's name."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from sglang_rollout.gateway.conversation import Message
from sglang_rollout.gateway.errors import invalid, unsupported

Json = Mapping[str, Any]
logger = logging.getLogger(__name__)

_RANGES = {"temperature": (0, 2), "top_p": (0, 1)}
_STEERED: dict[str, tuple[float, float, tuple[float, ...]]] = {
    "frequency_penalty": (-2, 2, (0,)),
    "presence_penalty": (-2, 2, (0,)),
    "repetition_penalty": (0.01, 2, (1,)),
    "top_k": (-1, 1 << 30, (0, -1)),
    "min_p": (0, 1, (0,)),
}
"""Lowest and highest value, and those that ask for nothing."""


def items(body: Json, name: str, path: str = "") -> list[Json]:
    """The list of objects in ``name``; empty where it is missing."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid(path + name, f"expected an array, got {_kind(value)}")
    for place, item in enumerate(value):
        if not isinstance(item, dict):
            raise invalid(f"{path}{name}[{place}]", f"expected an object, got {_kind(item)}")
    return value


def text(body: Json, name: str, path: str = "", default: str | None = None) -> str:
    """The text in ``name``; without one ``default``, where there is a default."""
    value = body.get(name, default)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise invalid(path + name, f"expected a string, got {_kind(value)}")
    return value


def integer(body: Json, name: str, low: int, path: str = "") -> int | None:
    """The whole number in ``name``; None where it is missing."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise invalid(path + name, f"expected an integer, got {_kind(value)}")
    if value < low or value >= 1 << 63:
        raise invalid(path + name, f"expected an integer of at least {low}, got {value}")
    return value


def flag(body: Json, name: str, path: str = "") -> bool:
    """The truth value in ``name``; false where it is missing."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid(path + name, f"expected a boolean, got {_kind(value)}")
    return bool(value)


def texts(body: Json, name: str) -> tuple[str, ...]:
    """One text or a list of at most four, none empty."""
    value = body.get(name)
    if value is None:
        return ()
    result = [value] if isinstance(value, str) else value
    if not isinstance(result, list) or not all(isinstance(each, str) and each for each in result) or len(result) > 4:
        raise invalid(name, "expected a string or an array of at most 4 strings, none of them empty")
    return tuple(result)


def sampling(body: Json) -> dict[str, float]:
    """temperature and top_p, where the call asks for them."""
    result = {name: _number(body, name, low, high) for name, (low, high) in _RANGES.items()}
    return {name: value for name, value in result.items() if value is not None}


def steered(body: Json) -> dict[str, float]:
    """Penalties, top_k and min_p, where the call asks for any effect of them."""
    result = {}
    for name, (low, high, nothing) in _STEERED.items():
        value = _number(body, name, low, high)
        if value is not None and value not in nothing:
            result[name] = value
    if isinstance(result.get("top_k"), float):
        raise invalid("top_k", f"expected an integer, got {result['top_k']}")
    return result


def _number(body: Json, name: str, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise invalid(name, f"expected a number, got {_kind(value)}")
    if not low <= value <= high:
        raise invalid(name, f"expected a number from {low} to {high}, got {value}")
    return value


def mapping(body: Json, name: str) -> Json:
    """The object in ``name``; empty where it is missing."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise invalid(name, f"expected an object, got {_kind(value)}")
    return value or {}


def optional_flag(body: Json, name: str, path: str = "") -> bool | None:
    """The truth value in ``name``; None where it is missing."""
    return None if body.get(name) is None else flag(body, name, path)


def content_text(value: Any, path: str, kinds: tuple[str, ...]) -> str:
    """A message's content: a text, or parts of these ``kinds`` with a text each. None is an empty one."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid(path, f"expected a string or an array, got {_kind(value)}")
    result = []
    for place, part in enumerate(value):
        where = f"{path}[{place}]"
        if not isinstance(part, dict):
            raise invalid(where, f"expected an object, got {_kind(part)}")
        if part.get("type") not in kinds:
            raise unsupported(f"{where}.type", f"{part.get('type')!r:.40}; the model reads only text")
        result.append(text(part, "refusal" if part["type"] == "refusal" else "text", f"{where}."))
    return "".join(result)


def tools(body: Json, schema: Callable[[Json, str], dict[str, Any] | None]) -> list[dict[str, Any]] | None:
    """The tools of a request; none where its tool_choice says so, None where it says nothing of them.

    What else tool_choice may say is read by ``constraints.of_tool_choice``.

    Args:
        schema: (tool, path of its fields) -> the tool as chat templates take it, or None for one that a model which
            was not made for it cannot be offered: it is left out.
    """
    choice = body.get("tool_choice")
    choice = choice.get("type") if isinstance(choice, dict) else choice
    schemas = []
    for place, tool in enumerate(items(body, "tools")):
        offered = schema(tool, f"tools[{place}].")
        if offered is None:
            _say_left_out(f"{tool.get('type')!s:.40}", f"{tool.get('name')!s:.60}")
        else:
            schemas.append(offered)
    if choice == "none":
        return []
    return schemas if body.get("tools") is not None else None


def function_schema(function: Json, path: str, parameters: str = "parameters") -> dict[str, Any]:
    """A tool as chat templates take it, from an object with its name, description and JSON schema."""
    schema: dict[str, Any] = {"name": text(function, "name", path)}
    if not schema["name"]:
        raise invalid(f"{path}name", "it is empty")
    for name, kind in (("description", str), (parameters, dict)):
        value = function.get(name)
        if value is None:
            continue
        if not isinstance(value, kind):
            raise invalid(path + name, f"expected {'a string' if kind is str else 'an object'}, got {_kind(value)}")
        schema["parameters" if name == parameters else name] = value
    return {"type": "function", "function": schema}


def tool_call(identifier: str, name: str, arguments: Any) -> dict[str, Any]:
    """An assistant's call, whose arguments are an object, or text where they are none."""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": written}}


def check_history(messages: list[Message], path: str) -> None:
    """Refuse a history in which only the assistant has spoken."""
    if not any(message["role"] != "assistant" for message in messages):
        raise invalid(path, "expected at least one message of a user, system or tool")


@functools.lru_cache(256)
def _say_left_out(kind: str, name: str) -> None:
    logger.warning(
        "gateway: a client's tool %s of type %s is left out: the model can be offered functions only", name, kind
    )


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
