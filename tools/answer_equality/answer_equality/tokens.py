"""Cuts a spelled answer into tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction

from answer_equality.spelling import DOLLAR

MAX_TOKENS = 600
_MAX_EXPONENT = 4000


class UnreadableError(ValueError):
    """The text is no expression of the grammar; it can only be compared as text."""


@dataclass(frozen=True)
class Numeral:
    """A number as written.

    ``step`` is what one unit of its last written place is worth; None for an integer or a repeating decimal, which are
    exact.  ``digits`` counts its significant digits.
    """

    value: Fraction
    step: Fraction | None = field(default=None, compare=False)
    digits: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Token:
    """``kind``: number, word, command, text (upright words), currency, or sign (``text`` is the sign itself)."""

    kind: str
    text: str
    numeral: Numeral | None = None
    spaced: bool = False


_SEPARATED = r"[1-9]\d{0,2}(?:(?:%s)\d{3})+(?!\d)"
_SEPARATED_PLAINLY = re.compile(_SEPARATED % r"\{,\}|\\[,!; ]\s*|,\\!")
_SEPARATED_BY_BLANKS = re.compile(_SEPARATED % r"~|[ ]+(?:\\,[ ]*)?")
# A comma before a group that begins with 0 (1,050) can be nothing but a thousands separator.
_SEPARATED_BEFORE_ZEROS = re.compile(_SEPARATED % r",(?=0)")
# A further comma without a space (5,100,x) makes all of them commas of a list.
_SEPARATED_BY_COMMAS = re.compile(r"(?<!,)" + _SEPARATED % "," + r"(?!\{,\}|\\[,!]\d|,(?![\s~]|\\[,;:! ]|\Z))")
_DIGITS = re.compile(r"\d+")
_SEPARATIONS_IN_LISTS = (_SEPARATED_PLAINLY, _SEPARATED_BEFORE_ZEROS, _DIGITS)
_SEPARATIONS = (_SEPARATED_PLAINLY, _SEPARATED_BY_BLANKS, _SEPARATED_BY_COMMAS, _SEPARATED_BEFORE_ZEROS, _DIGITS)
_FRACTION_PART = re.compile(r"\.(\d*)")
_REPEATING = re.compile(r"(?:\\overline|\\bar|\\dot|\\overline\s)\s*(?:\{(\d+)\}|(\d))|\((\d+)\)")
_ELLIPSIS = re.compile(r"\.{3}|\\ldots")
_ORDINAL = re.compile(r"(?:st|nd|rd|th)(?![A-Za-z])")
_EXPONENT = re.compile(r"[eE]([+-]?\d{1,9})(?![\dA-Za-z^.])")
_TEXT = re.compile(r"\\text\s*\{((?:[^{}]|\\[{}]|\{[^{}]*\})*)\}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]+")
_SPACE = re.compile(r"(?:\s|~|\\[,;:!> ])+")
_OPENING, _CLOSING = ("(", "[", "{", "\\{", "\\langle"), (")", "]", "}", "\\}", "\\rangle")
_SIGNS = ("**", "<=", ">=", "!=", "==", "\\{", "\\}", "\\%", "\\|", "\\\\", "\\&", "\\_", "+/-")
_CURRENCY = {DOLLAR: "dollar", "€": "euro", "£": "pound sterling", "¥": "yen", "₹": "rupee", "₽": "ruble"}


def tokens(text: str, commas_in_brackets: bool) -> list[Token]:
    """The tokens of ``text``.

    Args:
        commas_in_brackets: read (1,234) as one number in brackets; else as two. Outside brackets 1,234 is one, and
            1,050 and 1{,}234 are one everywhere.

    Raises:
        UnreadableError: a sign that no answer is made of, a number beyond all use, or too many tokens.
    """
    result: list[Token] = []
    # Of each open bracket, whether commas in it separate items, as they do not in the braces of \\frac{1,000}{3}.
    separates: list[bool] = []
    position, spaced = 0, False
    while position < len(text):
        space = _SPACE.match(text, position)
        if space:
            position, spaced = space.end(), True
            continue
        whole = commas_in_brackets or not separates or not separates[-1]
        token, position = _next(text, position, whole, spaced)
        if token.text in _OPENING:
            separates.append(not (result and _opens_argument(token, result[-1])))
        elif token.text in _CLOSING and separates:
            separates.pop()
        result.append(token)
        spaced = False
        if len(result) > MAX_TOKENS:
            raise UnreadableError("too long")
    return result


def _opens_argument(bracket: Token, before: Token) -> bool:
    if bracket.text == "[":
        return before.text == "\\sqrt"
    of_command = before.kind == "command" and before.text not in ("\\cup", "\\cap", "\\setminus", "\\in", "\\langle")
    return bracket.text == "{" and (of_command or before.text in ("^", "_", "}", "]"))


def _next(text: str, position: int, commas: bool, spaced: bool) -> tuple[Token, int]:
    sign = text[position]
    if sign.isdigit() or (sign == "." and text[position + 1 : position + 2].isdigit()):
        numeral, end = _numeral(text, position, commas)
        return Token("number", text[position:end], numeral, spaced), end
    upright = _TEXT.match(text, position)
    if upright:
        return Token("text", _SPACE.sub(" ", upright[1]).strip(), None, spaced or upright[1][:1] == " "), upright.end()
    for kind, pattern in (("command", _COMMAND), ("word", _WORD)):
        match = pattern.match(text, position)
        if match:
            return Token(kind, match[0], None, spaced), match.end()
    for long_sign in _SIGNS:
        if text.startswith(long_sign, position):
            return Token("sign", long_sign, None, spaced), position + len(long_sign)
    if sign in _CURRENCY:
        return Token("currency", _CURRENCY[sign], None, spaced), position + 1
    if sign in "+-*/^_()[]{}|,;:=<>!'%&":
        return Token("sign", sign, None, spaced), position + 1
    raise UnreadableError(f"{sign!r} in {text:.80}")


def _numeral(text: str, start: int, commas: bool) -> tuple[Numeral, int]:
    patterns = _SEPARATIONS if commas else _SEPARATIONS_IN_LISTS
    match = next((match for match in (pattern.match(text, start) for pattern in patterns) if match), None)
    whole, position = ("".join(c for c in match[0] if c.isdigit()), match.end()) if match else ("", start)
    part = _FRACTION_PART.match(text, position)
    value, places, digits = Fraction(int(whole or "0")), None, whole
    if part:
        position = part.end()
        repeating = _REPEATING.match(text, position)
        value += Fraction(int(part[1] or "0"), 10 ** len(part[1]))
        if repeating:
            block = repeating[1] or repeating[2] or repeating[3]
            value += Fraction(int(block), (10 ** len(block) - 1) * 10 ** len(part[1]))
            return Numeral(value), repeating.end()
        ellipsis = _ELLIPSIS.match(text, position)
        if ellipsis:
            return Numeral(value + _continued(part[1])), ellipsis.end()
        digits, places = digits + part[1], len(part[1]) or None
    exponent = _EXPONENT.match(text, position)
    if exponent:
        power = int(exponent[1])
        if abs(power) > _MAX_EXPONENT:
            raise UnreadableError("an exponent beyond all use")
        value *= Fraction(10) ** power
        places = (places or 0) - power
        position = exponent.end()
    elif places is None and _ORDINAL.match(text, position):
        position += 2
    written = digits.lstrip("0")
    exact = places is None or (exponent is not None and places <= 0 and len(written) < 6)
    return Numeral(value, None if exact else Fraction(10) ** -(places or 0), len(written)), position


def _continued(places: str) -> Fraction:
    """What ... adds to decimal places that end in a block written at least twice (three times if it is one digit)."""
    for length in range(1, len(places) // 2 + 1):
        times = 3 if length == 1 else 2
        block = places[-length:]
        if len(places) >= times * length and places.endswith(block * times):
            return Fraction(int(block), (10**length - 1) * 10 ** len(places))
    raise UnreadableError("an ellipsis behind digits that do not repeat")
