"""A place in a slice of tokens: looking, taking, and whether a unit lies ahead."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from answer_equality.tokens import Numeral, Token, UnreadableError
from answer_equality.units import is_unit_word, parse_unit, stands_alone
from answer_equality.words import BARE_FUNCTIONS

_MAX_DEPTH = 80


class TokenCursor:
    """What a reader of tokens does that has nothing to do with mathematics. Nesting is bounded."""

    def __init__(self, tokens: Sequence[Token], units: bool) -> None:
        """
        Args:
            tokens: all that is to be read.
            units: stop before a unit that ends the slice, instead of reading its letters as variables.
        """
        self.tokens = list(tokens)
        self.position = 0
        self.units = units
        self._depth = 0
        self._nesting = 0
        self.bars = 0
        self._unit_at: dict[int, bool] = {}

    @property
    def token(self) -> Token | None:
        """The token at the cursor; None at the end."""
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def sees(self, *signs: str) -> bool:
        """Is the next token one of these signs or commands?"""
        token = self.token
        return token is not None and token.kind in ("sign", "command") and token.text in signs

    def take(self, *signs: str) -> bool:
        """Pass over the next token if it is one of ``signs``."""
        if self.sees(*signs):
            self.position += 1
            return True
        return False

    def expect(self, *signs: str) -> str:
        """Pass over one of ``signs``, which must stand here."""
        token = self.token
        if not self.take(*signs) or token is None:
            raise UnreadableError(f"{signs} expected")
        return token.text

    def unit_text(self) -> str:
        """The rest of the slice, as far as it could be a unit; empty if it could not."""
        parts = []
        for token in self.tokens[self.position :]:
            if token.kind in ("word", "text", "number") or token.text in ("^", "/", "{", "}", "%", "\\%", "-", "*"):
                parts.append("%" if token.text == "\\%" else token.text)
            elif token.kind == "command" and token.text in ("\\circ", "\\cdot", "\\frac"):
                parts.append({"\\cdot": "*"}.get(token.text, token.text[1:]))
            else:
                return ""
            if len(parts) > 16:
                return ""
        return _plain_unit(" ".join(parts))

    def unit_ahead(self) -> bool:
        """Whether a unit begins here; never inside parentheses."""
        if not self.units or self._depth:
            return False
        if self.position not in self._unit_at:
            self._unit_at[self.position] = self._is_unit_ahead()
        return self._unit_at[self.position]

    def _is_unit_ahead(self) -> bool:
        token = self.token
        assert token is not None
        if token.kind == "word":
            first = token.text
            if not is_unit_word(first) or (stands_alone(first) and not token.spaced):
                return False
        elif token.kind == "command":
            if token.text != "\\frac":
                return False
        elif token.kind not in ("text",) and token.text not in ("^", "%", "\\%"):
            return False
        return parse_unit(self.unit_text()) is not None

    def argument_text(self) -> str:
        """The text of a LaTeX argument: one token, or all between braces.

        Raises:
            UnreadableError: a brace is not closed, or nothing follows.
        """
        if self.take("{"):
            parts = []
            while not self.take("}"):
                if self.token is None:
                    raise UnreadableError("an open brace")
                parts.append(self.token.text)
                self.position += 1
            return "".join(parts)
        token = self.token
        if token is None:
            raise UnreadableError("something is missing at the end")
        self.position += 1
        return token.text

    def first_letter_alone(self, digits: bool = False) -> None:
        """TeX takes one letter (and for a subscript one digit) where no braces stand."""
        token = self.token
        if token is None or len(token.text) < 2:
            return
        if token.kind == "word" and token.text not in BARE_FUNCTIONS and token.text not in ("pi", "oo"):
            self.tokens[self.position : self.position + 1] = [
                Token("word", token.text[0]),
                Token("word", token.text[1:]),
            ]
        elif digits and token.kind == "number" and token.text.isdigit():
            following = self.tokens[self.position + 1 : self.position + 2]
            if not following or following[0].text not in ("(", "{") and following[0].kind not in ("number", "word"):
                self.tokens[self.position : self.position + 1] = [digit(token.text[0]), *_numerals(token.text[1:])]

    def enter(self, levels: int, shields: bool = True) -> None:
        """Go ``levels`` of nesting deeper; with ``shields`` no unit is looked for there.

        Raises:
            UnreadableError: the text is nested too deeply.
        """
        self._depth += levels if shields else 0
        self._nesting += levels
        if self._nesting > _MAX_DEPTH:
            raise UnreadableError("nested too deeply")

    def leave(self, levels: int, shields: bool = True) -> None:
        """Undo ``enter``."""
        self._depth -= levels if shields else 0
        self._nesting -= levels


def digit(character: str) -> Token:
    """The token of one digit."""
    return Token("number", character, Numeral(Fraction(int(character))))


def _numerals(text: str) -> list[Token]:
    return [Token("number", text, Numeral(Fraction(int(text))))] if text else []


def _plain_unit(text: str) -> str:
    """frac { m } { s } as m/s, and ^ { circ } C as ^circ C."""
    if text.startswith("frac"):
        parts = text[4:].replace("}", "{").split("{")
        if len(parts) == 5 and not (parts[0] + parts[2] + parts[4]).strip():
            return f"{parts[1]} / {parts[3]}"
        return ""
    if text.startswith("^"):
        rest = text[1:].replace("{", " ").replace("}", " ").split()
        if rest[:1] == ["circ"]:
            return " ".join(rest[1:]) or "degree"
        return ""
    return text.replace("{", " ").replace("}", " ")
