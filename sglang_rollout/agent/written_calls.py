"""Reading tool calls in what a model writes: blocks between tags, JSON, reasoning that is no call. Pure text.

A call that cannot be understood is a ``ParsedCall`` with ``error`` set. Nothing here raises.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_retool.untrusted import load_json


@dataclass(frozen=True)
class ParsedCall:
    """One tool call. ``arguments`` is what the tool gets; ``raw`` is what the model wrote; ``error`` excludes both."""

    name: str
    arguments: dict[str, Any]
    raw: str
    error: str | None = None


def malformed(body: str, reason: str, name: str = "") -> ParsedCall:
    """A call that cannot be understood, with what the model is told of it."""
    # Short on purpose: it is part of the response and of its length limit.
    return ParsedCall(name, {}, body, error=f"Error: invalid tool call: {reason}")


def json_call(body: str) -> ParsedCall:
    """A call from an object with its name and its arguments (or parameters, as Llama has it)."""
    try:
        # Newlines and tabs inside strings are what a program is made of; refusing them would only cost turns.
        call = load_json(body, strict=False)
    except ValueError as error:
        return malformed(body, str(error))
    if not isinstance(call, dict):
        return malformed(body, 'expected an object with "name" and "arguments"')
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return malformed(body, '"name" is missing')
    if isinstance(arguments, str):
        return call_of_json(name, arguments, body)
    if not isinstance(arguments, dict):
        return malformed(body, '"arguments" is not an object', name)
    return ParsedCall(name, arguments, body)


def call_of_json(name: str, written: str, raw: str) -> ParsedCall:
    """A call whose arguments are ``written`` as JSON."""
    try:
        arguments = load_json(written, strict=False)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        return malformed(raw, '"arguments" is not an object', name)
    return ParsedCall(name, arguments, raw)


def without_reasoning(text: str, tag: str = "think") -> str:
    """``text`` without <think> blocks: a call that the model only considers is not a call.

    A closing tag without an opening one ends reasoning that began in the prompt (Qwen3 opens it there); an opening tag
    without a closing one means that all that follows is reasoning.
    """
    opens, closes = f"<{tag}>", f"</{tag}>"
    head, closing, tail = text.partition(closes)
    if closing and opens not in head:
        text = tail
    spoken: list[str] = []
    position = 0
    while True:
        opening = text.find(opens, position)
        if opening < 0:
            return "".join([*spoken, text[position:]])
        spoken.append(text[position:opening])
        # Found by find and not by an expression, which looks for each opening tag's end anew.
        end = text.find(closes, opening)
        if end < 0:
            return "".join(spoken)
        position = end + len(closes)


def tagged_blocks(text: str, tags: Sequence[str]) -> list[tuple[str, str | None]]:
    """(tag, content) of every ``<tag>…</tag>`` in order. A block begins at the last opening tag before its end.

    The content is None where there is no opening tag.
    """
    blocks: list[tuple[str, str | None]] = []
    start = 0
    for closing in re.finditer("|".join(f"</({tag})>" for tag in tags), text):
        tag = next(group for group in closing.groups() if group)
        opening = text.rfind(f"<{tag}>", start, closing.start())
        blocks.append((tag, text[opening + len(tag) + 2 : closing.start()] if opening >= 0 else None))
        start = closing.end()
    return blocks


def opened_blocks(text: str, opening: str, closing: str) -> list[tuple[str, bool]]:
    """What follows every ``opening`` up to the next ``closing`` or ``opening``, and whether it is closed."""
    pieces = (piece.partition(closing) for piece in text.split(opening)[1:])
    return [(body, bool(closed)) for body, closed, _ in pieces]


_FENCE = re.compile(r"```[a-zA-Z0-9_+-]*[ \t]*")


def without_fence(code: str) -> str:
    """Code without the Markdown fence that may surround it."""
    opening, newline, rest = code.strip().partition("\n")
    if not newline or not rest.endswith("```") or _FENCE.fullmatch(opening) is None:
        return code.strip("\n")
    return rest.removesuffix("```").rstrip(" \t").removesuffix("\n")
