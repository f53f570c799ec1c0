"""Reading calls whose arguments stand unescaped between tags: ``<parameter=code>…</parameter>``. Pure text.

Such a value may hold the format's own tags: a program that prints them, a text that quotes a whole call. The turn is
read from left to right, and what lies in a value is data. A value ends at its first closing tag after which the rest of
the turn still reads as a whole turn: more parameters, the end of the call, more calls, with no tag left over. Among
those tags, one at which every call that the value quotes has ended goes first. So quoted calls, and single tags, stay
in the value that holds them.

Where no closing tag has that property the turn is broken. A value is then read only if no tag of the format stands in
it. Otherwise the call is an error, and so is what follows it up to the next call that cannot be part of the value.

A value that closes its own call and opens another one, tag for tag, cannot be told apart and is read as two calls.
"""

from __future__ import annotations

import bisect
import re
from dataclasses import dataclass
from typing import Any

from sglang_rollout.agent.written_calls import ParsedCall, malformed
from tools.arguments import WrittenText

_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class TagGrammar:
    """The tags of a format. Space between tags is free.

    Attributes:
        opening, closing: of a block of calls.
        function: what opens a call; its group is the name.
        function_end: what closes a call; may be empty.
        parameter_start: how a parameter begins.
        parameter: what opens a value; its group is the key.
        value_end: what closes a value.
        several: a block may hold more than one call.
        line_breaks: a value is written with a line break before and after it.
        tags: any tag of the format, or the beginning of one.
        wants_call, wants_parameter, wants_end: what the model reads where the call, a parameter or the end is missing.
    """

    opening: str
    closing: str
    function: re.Pattern[str]
    function_end: str
    parameter_start: str
    parameter: re.Pattern[str]
    value_end: str
    several: bool
    line_breaks: bool
    tags: re.Pattern[str]
    wants_call: str
    wants_parameter: str
    wants_end: str


class TaggedTurn:
    """One turn of a format with tags.

    ``read`` takes time in proportion to what it reads, after one pass over the turn.
    """

    def __init__(self, text: str, grammar: TagGrammar) -> None:
        self._text = text
        self._grammar = grammar
        self._tags = _places_of(grammar.tags.pattern, text)
        self._openings = _places(grammar.opening, text)
        self._closings = _places(grammar.closing, text)
        self._ends = _places(grammar.value_end, text)
        self._whole_from = self._closings_of_whole_turns()
        end_of_call = grammar.function_end or grammar.closing
        head = rf"{grammar.function.pattern}\s*{re.escape(grammar.parameter_start)}"
        if not grammar.function_end:
            head = rf"{re.escape(grammar.opening)}\s*{head}"
        self._quoted_begin = _places_of(head, text)
        self._quoted_end = _places_of(rf"{re.escape(grammar.value_end)}\s*{re.escape(end_of_call)}", text)
        self._whole_at_depth: dict[int, list[int]] = {}
        for place, whole in enumerate(self._whole_from):
            if whole == place:
                self._whole_at_depth.setdefault(self._depth(self._ends[place]), []).append(place)
        self._boundary = re.compile(
            rf"{re.escape(grammar.closing)}\s*{re.escape(grammar.opening)}\s*(?={grammar.function.pattern})"
        )
        self._boundaries = [(result.start(), result.end()) for result in self._boundary.finditer(text)]

    def read(self, start: int) -> tuple[list[ParsedCall], int]:
        """The calls of the block that opens at ``start``, or an error in their place, and where it ends."""
        grammar, text = self._grammar, self._text
        inside = start + len(grammar.opening)
        calls: list[ParsedCall] = []
        position = self._after_space(inside)
        while True:
            result = grammar.function.match(text, position)
            if result is None:
                return self._broken(inside, position, grammar.wants_call)
            begun, name = position, result[1].strip()
            position = self._after_space(result.end())
            arguments: dict[str, Any] = {}
            while (parameter := grammar.parameter.match(text, position)) is not None:
                key, begun_value = parameter[1].strip(), parameter.end()
                end = self._value_end(begun_value)
                if end is None or self._boundary_between(begun_value, end):
                    return self._broken(inside, begun_value, grammar.wants_parameter, name, in_value=True)
                position = self._after_space(end + len(grammar.value_end))
                if not self._goes_on(position):
                    return self._broken(inside, begun_value, grammar.wants_end, name, in_value=True)
                if key in arguments:
                    return self._broken(inside, end, f"{key[:60]} is given twice", name)
                value = text[begun_value:end]
                if grammar.line_breaks:
                    value = value.removeprefix("\n").removesuffix("\n")
                arguments[key] = WrittenText(value)
            if not text.startswith(grammar.function_end, position):
                bad_parameter = text.startswith(grammar.parameter_start, position)
                return self._broken(
                    inside, position, grammar.wants_parameter if bad_parameter else grammar.wants_end, name
                )
            position += len(grammar.function_end)
            calls.append(ParsedCall(name, arguments, text[begun:position].strip(), start=start))
            position = self._after_space(position)
            if text.startswith(grammar.closing, position):
                return calls, position + len(grammar.closing)
            if not grammar.several:
                return self._broken(inside, position, grammar.wants_end, name)

    def _after_space(self, position: int) -> int:
        result = _SPACE.match(self._text, position)
        return position if result is None else result.end()

    def _next_tag(self, position: int) -> int | None:
        return _next(self._tags, position)

    def _depth(self, position: int) -> int:
        """Calls that begin before ``position`` and do not end before it."""
        return bisect.bisect_left(self._quoted_begin, position) - bisect.bisect_left(self._quoted_end, position)

    def _goes_on(self, position: int) -> bool:
        """Whether a parameter or the end of the call stands at ``position``."""
        ends = (self._grammar.function_end or self._grammar.closing, self._grammar.parameter_start)
        return self._text.startswith(ends, position)

    def _value_end(self, start: int) -> int | None:
        place = bisect.bisect_left(self._ends, start)
        if place == len(self._ends):
            return None
        whole = self._whole_from[place]
        if whole is not None:
            return self._ends[_next(self._whole_at_depth.get(self._depth(start), []), place) or whole]
        return self._ends[place] if self._next_tag(start) == self._ends[place] else None

    def _closings_of_whole_turns(self) -> list[int | None]:
        """For each closing tag of a value, the first from it on after which the turn reads as a whole."""
        first: list[int | None] = [None] * (len(self._ends) + 1)
        for place in range(len(self._ends) - 1, -1, -1):
            value = self._next_value(self._ends[place] + len(self._grammar.value_end))
            if value is not None and value != len(self._text) + 1:
                whole = first[bisect.bisect_left(self._ends, value)] is not None
            else:
                whole = value is not None
            first[place] = place if whole else first[place + 1]
        return first[:-1]

    def _next_value(self, position: int) -> int | None:
        """Where the next value begins; None where the turn breaks before; past its end where it ends well before."""
        grammar, text = self._grammar, self._text
        while True:
            position = self._after_space(position)
            parameter = grammar.parameter.match(text, position)
            if parameter is not None:
                return parameter.end()
            if not text.startswith(grammar.function_end, position):
                return None
            position = self._after_space(position + len(grammar.function_end))
            if text.startswith(grammar.closing, position):
                opening = self._next_tag(position + len(grammar.closing))
                if opening is None:
                    return len(text) + 1
                if not text.startswith(grammar.opening, opening):
                    return None
                position = self._after_space(opening + len(grammar.opening))
            elif not grammar.several:
                return None
            function = grammar.function.match(text, position)
            if function is None:
                return None
            position = function.end()

    def _boundary_between(self, start: int, end: int) -> bool:
        """Whether a value ends its call and begins another, and quotes no call before.

        If that other call opens no value, the closing tag at ``end`` is not its own: the value quotes it.
        """
        boundary = self._next_boundary(start)
        if boundary is None or boundary[1] > end:
            return False
        return self._grammar.parameter.search(self._text, boundary[1], end) is not None

    def _next_boundary(self, start: int) -> tuple[int, int] | None:
        """The next end of a call with another call after it, if no call opens before it."""
        place = bisect.bisect_left(self._boundaries, (start, 0))
        if place == len(self._boundaries):
            return None
        boundary, opening = self._boundaries[place], _next(self._openings, start)
        return boundary if opening is not None and opening > boundary[0] else None

    def _broken(
        self, inside: int, failed: int, reason: str, name: str = "", in_value: bool = False
    ) -> tuple[list[ParsedCall], int]:
        """An error in place of the block whose content begins at ``inside``, and where reading continues."""
        closing, opening = _next(self._closings, failed), _next(self._openings, failed)
        start, whole = inside - len(self._grammar.opening), len(self._text)
        if in_value and self._next_boundary(failed) is None:
            # Any call that follows may be part of the value.
            closing, opening = (self._closings[-1] if closing is not None else None), None
        if closing is None or (opening is not None and opening < closing):
            end = whole if opening is None else opening
            body, reason = self._text[inside:end], f"the tool call has no {self._grammar.closing}"
        else:
            end = whole if in_value and opening is None else closing + len(self._grammar.closing)
            body = self._text[inside:closing]
        return [malformed(body.strip(), reason, name, start=start)], end


def _places(tag: str, text: str) -> list[int]:
    return _places_of(re.escape(tag), text)


def _places_of(expression: str, text: str) -> list[int]:
    return [result.start() for result in re.finditer(expression, text)]


def _next(places: list[int], position: int) -> int | None:
    place = bisect.bisect_left(places, position)
    return places[place] if place < len(places) else None
