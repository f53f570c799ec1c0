"""Reading tool calls in what a model writes: blocks between tags, JSON, reasoning that is no call. Pure text.

A call that cannot be understood is a ``ParsedCall`` with ``error`` set. Nothing here raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from untrusted import load_json


@dataclass(frozen=True)
class ParsedCall:
    """One tool call. ``arguments`` is what the tool gets; ``raw`` is what the model wrote; ``error`` excludes both.

    Attributes:
        start: characters of the turn before the call and the tags that open it; None: not known.
        certain: False: it may as well be an answer, and is a call only if it names a tool that is offered.
    """

    name: str
    arguments: dict[str, Any]
    raw: str
    error: str | None = None
    start: int | None = field(default=None, compare=False)
    certain: bool = field(default=True, compare=False)


def malformed(body: str, reason: str, name: str = "", start: int | None = None) -> ParsedCall:
    """A call that cannot be understood, with what the model reads about it."""
    # Short on purpose: it is part of the response and of its length limit.
    return ParsedCall(name, {}, body, error=f"Error: invalid tool call: {reason}", start=start)


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


Read = Callable[[int], tuple[list[ParsedCall], int]]
"""Where a call opens -> the calls that begin there, or an error in their place, and where what follows begins."""


def calls_in(text: str, opening: str, read: Read, *, tag: str = "think", wrapper: str = "") -> list[ParsedCall]:
    """The calls of a turn, read once from left to right, without those that stand in reasoning.

    Reasoning in <think> at the beginning of the turn ends at the first </think>. Elsewhere the two tags count only
    outside calls. </think> without <think> ends reasoning that began in the prompt, as Qwen3's does. <think> later in a
    turn and without </think> is prose.

    Args:
        opening: what opens a call.
        read: reads the call that opens at a place.
        tag: of reasoning.
        wrapper: what may stand before ``opening`` and belongs to the calls.
    """
    opens, closes = f"<{tag}>", f"</{tag}>"
    calls: list[ParsedCall] = []
    position = 0
    before_reasoning: int | None = 0  # calls before reasoning that may have begun
    if text.lstrip().startswith(opens):
        position = text.find(closes)
        if position < 0:
            return []
        position, before_reasoning = position + len(closes), None
    events = re.compile("|".join(map(re.escape, (opening, opens, closes))))
    while (event := events.search(text, position)) is not None:
        position = event.end()
        if event[0] == opens:
            before_reasoning = len(calls)
        elif event[0] == closes:
            if before_reasoning is not None:
                del calls[before_reasoning:]
            before_reasoning = None
        else:
            result, end = read(event.start())
            if before_reasoning is not None and any(call.error for call in result):
                reasoned = text.find(closes, position, end)
                if reasoned >= 0:
                    # What the model only considered need not be well formed.
                    del calls[before_reasoning:]
                    position, before_reasoning = reasoned + len(closes), None
                    continue
            calls += result
            position = end
    if calls and wrapper and calls[0].start is not None:
        spoken = text[: calls[0].start].rstrip()
        if spoken.endswith(wrapper):
            calls[0] = replace(calls[0], start=len(spoken) - len(wrapper))
    return calls


class StringAware:
    """Finds tags that stand outside the strings of JSON: those within one are data."""

    def __init__(self, *tags: str) -> None:
        # A string that never ends reaches to the end of the text.
        string = r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)'
        self._pieces = re.compile(f"{string}|({'|'.join(map(re.escape, tags))})", re.DOTALL)

    def find(self, text: str, position: int) -> tuple[int, str]:
        """Where the next of the tags begins, and which; the end of the text and "" where there is none."""
        for piece in self._pieces.finditer(text, position):
            if piece[1] is not None:
                return piece.start(), piece[1]
        return len(text), ""


def calls_of_json(
    text: str, opening: str, closing: str, read: Callable[[str], ParsedCall], *, wrapper: str = ""
) -> list[ParsedCall]:
    """The calls of a turn, with JSON between ``opening`` and ``closing``; see ``calls_in``.

    A string that never ends takes all that follows into its call, which is an error.
    """
    tags = StringAware(opening, closing)

    def read_at(start: int) -> tuple[list[ParsedCall], int]:
        begun = start + len(opening)
        end, tag = tags.find(text, begun)
        body = text[begun:end].strip()
        if tag == closing:
            return [replace(read(body), start=start)], end + len(closing)
        if not tag and closing in body:
            body = body[: body.rindex(closing)].strip()
            return [malformed(body, "a string in it does not end", start=start)], end
        return [malformed(body, f"the tool call has no {closing}", start=start)], end

    return calls_in(text, opening, read_at, wrapper=wrapper)


def without_reasoning(text: str, tag: str = "think") -> str:
    """``text`` without <think> blocks, for formats of one's own whose calls hold no such tags; see ``calls_in``.

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
        # Found by find and not by an expression, which looks for each opening tag's end again.
        end = text.find(closes, opening)
        if end < 0:
            return "".join(spoken)
        position = end + len(closes)


def tagged_blocks(text: str, tags: Sequence[str]) -> list[tuple[str, str | None]]:
    """(tag, content) of every ``<tag>…</tag>`` in order, read from left to right: tags within a block are data.

    A block begins at an opening tag with a line break after it, as programs are written, else at the last of several
    opening tags. It ends at its first closing tag after which the rest still reads as blocks, with no closing tag left
    over; if there is none, at its first closing tag. The content is None where there is no opening tag.
    """
    result = list(re.finditer("|".join(f"</?{tag}>" for tag in tags), text))
    names = [each[0].strip("</>") for each in result]
    closes = [each[0].startswith("</") for each in result]
    end_of, nested = _block_ends(names, closes)
    blocks: list[tuple[str, str | None]] = []
    place = 0
    while place < len(result):
        end = end_of[place]
        if closes[place]:
            blocks.append((names[place], None))
        elif end is not None and (not nested[place] or text.startswith("\n", result[place].end())):
            blocks.append((names[place], text[result[place].end() : result[end].start()]))
            place = end
        place += 1
    return blocks


def _block_ends(names: Sequence[str], closes: Sequence[bool]) -> tuple[list[int | None], list[bool]]:
    """For each opening tag the closing tag of its block, and whether the same tag opens again before the next closing
    one."""
    ends: list[int | None] = [None] * len(names)
    nested = [False] * len(names)
    nearest: dict[str, int] = {}
    nearest_whole: dict[str, int] = {}
    opens_again: dict[str, bool] = {}
    whole = True  # whether what follows reads as blocks
    for place in range(len(names) - 1, -1, -1):
        name = names[place]
        if closes[place]:
            nearest[name], opens_again[name] = place, False
            if whole:
                nearest_whole[name] = place
            whole = False
        else:
            ends[place] = nearest_whole.get(name, nearest.get(name))
            nested[place] = opens_again.get(name, False)
            opens_again[name] = True
            whole = name in nearest_whole or (name not in nearest and whole)
    return ends, nested


_FENCE = re.compile(r"```[a-zA-Z0-9_+-]*[ \t]*")


def without_fence(code: str) -> str:
    """Code without the Markdown fence that may surround it."""
    opening, newline, rest = code.strip().partition("\n")
    if not newline or not rest.endswith("```") or _FENCE.fullmatch(opening) is None:
        return code.strip("\n")
    return rest.removesuffix("```").rstrip(" \t").removesuffix("\n")
