"""Reads a whole answer: lists, relations, sets, intervals, matrices, ratios, residues, quantities, or plain words."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from fractions import Fraction

from answer_equality.expressions import (
    REALS,
    Bracketed,
    Collection,
    Combination,
    Expression,
    FunctionCall,
    Listing,
    Matrix,
    Number,
    Quantity,
    Ratio,
    Relation,
    Residue,
    Structure,
    Symbol,
    Text,
    integer,
    is_expression,
    symbols_of,
)
from answer_equality.grammar import AnswerGrammar
from answer_equality.spelling import spelled, without_spacing
from answer_equality.tokens import Numeral, Token, UnreadableError, tokens
from answer_equality.units import is_letter_unit, parse_unit, single
from answer_equality.words import is_plain_language, plain_words

_RELATIONS = {
    **{"=": "=", "==": "=", "<": "<", ">": ">", "<=": "<=", ">=": ">=", "!=": "!=", "\\le": "<=", "\\ge": ">="},
    **{"\\ne": "!=", "\\approx": "~", "\\equiv": "=", "\\in": "in"},
}
_OPENING, _CLOSING = ("(", "[", "\\{", "{", "\\langle"), (")", "]", "\\}", "}", "\\rangle")
_MATRIX = re.compile(
    r"[(\[]?\s*\\begin\{(p|b|B|small|)(?:matrix|array)\}(?:\{[clr|]*\})?(.*)\\end\{(p|b|B|small|)(?:matrix|array)\}\s*[)\]]?\Z",
    re.DOTALL,
)
_NAMED_MATRIX = re.compile(r"(?:[A-Za-z]|\\(?:text|vec) ?\{ ?[A-Za-z] ?\}|\\vec [A-Za-z])\s*=\s*(?=[^=]*\\begin\{)")
_EVERY_REAL = re.compile(r"(?:the set of )?(?:all )?(?:the )?real(?: numbers|s)\Z")
_NOTHING = re.compile(r"(?:there (?:is|are) )?no (?:real )?solutions?\Z|empty set\Z")
_TO_RATIO = re.compile(r"(\d+) to (\d+)\Z")
_COMPOUND = re.compile(r"(\d+(?:\.\d+)?) ([a-z]+) (?:and )?(\d+(?:\.\d+)?) ([a-z]+)\Z")
_CONSTRUCTORS = re.compile(
    r"(FiniteSet|Interval(?:\.\w+)?|Union|Eq|Matrix|EmptySet|Set|Tuple|array|tensor|set|Reals)\b"
)
# Unlike the brackets of 2(1,234 + 5), those of (1,234) m could hold a list or a point: that stays text.
_BRACKETED_NUMBERS = re.compile(r"[(\[][\d\s,.-]*\d[\s,]+\d[\d\s,.-]*[)\]]")
_MAX_ITEMS = 100
_SET_OPERATORS = ("\\cup", "\\cap", "\\setminus")
_MAX_SETS = 12


def reading(text: str, units: bool) -> Structure:
    """What ``text`` means; plain words where no grammar fits.

    Args:
        units: read what may be a unit behind a number as a unit; else as variables (m, s) or a factor (%).
    """
    text = spelled(text)
    with contextlib.suppress(UnreadableError):
        return _answer(text, False, units)
    if not _BRACKETED_NUMBERS.search(text):
        with contextlib.suppress(UnreadableError):
            return _answer(text, True, units)
    return Text(plain_words(without_spacing(text)))


def _answer(text: str, commas: bool, units: bool) -> Structure:
    words = plain_words(without_spacing(text))
    if _EVERY_REAL.match(words):
        return REALS
    if _NOTHING.match(words):
        return Collection(())
    compound = _compound_quantity(words) if units else None
    if compound is not None:
        return compound
    text = _TO_RATIO.sub(r"\1:\2", words) if _TO_RATIO.match(words) else text
    matrix = _MATRIX.match(text)
    if matrix:
        return _matrix(matrix[2], commas)
    named = _NAMED_MATRIX.match(text)
    if named:
        return _answer(text[named.end() :], commas, units)
    start = text.find("\\begin{")
    scaled = _MATRIX.match(text, start) if start > 0 else None
    if scaled:
        return _scaled_matrix(text[:start], _matrix(scaled[2], commas), commas)
    constructor = _CONSTRUCTORS.match(text)
    if constructor:
        return _constructed(constructor[1], text[constructor.end() :].strip(), commas)
    return Reader(commas, units).listing(tokens(text, commas))


def _matrix(body: str, commas: bool) -> Matrix:
    lines = re.split(r"(?:\\\\)+(?:\[[^\]]*\])?|\\cr\b", body)
    if lines and not lines[-1].strip():
        lines.pop()
    if len(lines) > _MAX_ITEMS:
        raise UnreadableError("too many rows")
    reader = Reader(commas, units=False)
    rows = tuple(tuple(reader.statement(tokens(cell, commas)) for cell in line.split("&")) for line in lines)
    if not rows or len({len(row) for row in rows}) != 1 or sum(map(len, rows)) > 4 * _MAX_ITEMS:
        raise UnreadableError("rows of different lengths")
    return Matrix(rows)


def _scaled_matrix(factor: str, matrix: Matrix, commas: bool) -> Matrix:
    """A matrix with a number or an expression in front, which multiplies each element."""
    factor = re.sub(r"(?:\\cdot|\\times|\*)\s*\Z", "", factor.strip()).strip()
    expression = integer(-1) if factor == "-" else Reader(commas, units=False).statement(tokens(factor, commas))
    return Matrix(
        tuple(
            tuple(FunctionCall("mul", (_required(expression), _required(item))) for item in row) for row in matrix.rows
        )
    )


def _constructed(name: str, rest: str, commas: bool) -> Structure:
    """What sympy and numpy print of a set or matrix."""
    if name in ("EmptySet", "Reals"):
        if rest:
            raise UnreadableError(rest)
        return Collection(()) if name == "EmptySet" else REALS
    if not (rest.startswith("(") and rest.endswith(")")):
        raise UnreadableError(rest)
    parts = [part.strip() for part in split_outside(rest[1:-1], ",")] if rest[1:-1].strip() else []
    if name == "Eq" and len(parts) == 2:
        return Relation(tuple(_answer(part, commas, False) for part in parts), ("=",))
    items = tuple(_answer(part, commas, False) for part in parts)
    if name == "Union" and items:
        whole = items[0]
        for item in items[1:]:
            whole = Combination("cup", whole, item)
        return whole
    if name.startswith("Interval") and len(items) in (2, 4):
        kind = name.partition(".")[2]
        left = kind in ("open", "Lopen") or (len(items) == 4 and items[2] == Symbol("True"))
        right = kind in ("open", "Ropen") or (len(items) == 4 and items[3] == Symbol("True"))
        return Bracketed("(" if left else "[", ")" if right else "]", items[:2])
    if name in ("Matrix", "array", "tensor") and len(items) == 1:
        matrix = as_matrix(items[0])
        return matrix if matrix is not None else items[0]
    if name == "FiniteSet":
        return Collection(items)
    if name == "Tuple":
        return Bracketed("(", ")", items)
    if name in ("Set", "set") and len(items) == 1 and isinstance(items[0], (Bracketed, Collection)):
        return Collection(items[0].items)
    raise UnreadableError(name)


def _compound_quantity(words: str) -> Quantity | None:
    """3 hours and 20 minutes, 5 feet 6 inches: two units of one dimension, the larger first."""
    match = _COMPOUND.match(words)
    units = [parse_unit(match[2]), parse_unit(match[4])] if match else []
    if not match or len(units) != 2 or units[0] is None or units[1] is None:
        return None
    if units[0].dimensions != units[1].dimensions or len(units[0].dimensions) != 1 or units[0].scale <= units[1].scale:
        return None
    amount = Fraction(match[1]) * units[0].scale / units[1].scale + Fraction(match[3])
    return Quantity(Number(Numeral(amount)), units[1])


def as_matrix(structure: Structure) -> Matrix | None:
    """[[1, 2], [3, 4]] as a matrix."""
    if not (isinstance(structure, Bracketed) and structure.opening == "["):
        return None
    rows = [row.items for row in structure.items if isinstance(row, Bracketed) and row.opening == "["]
    if len(rows) != len(structure.items) or len({len(row) for row in rows}) != 1:
        return None
    return Matrix(tuple(rows))


def split_outside(text: str, separator: str) -> list[str]:
    """Split at the separators that stand in no brackets."""
    parts, depth, start = [], 0, 0
    for position, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if sign == separator and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]]


class Reader:
    """Reads slices of tokens, from lists down to expressions."""

    def __init__(self, commas: bool, units: bool) -> None:
        self._commas, self._units = commas, units

    def listing(self, slice_: Sequence[Token]) -> Structure:
        """Answers with , ; "and" or "or" between them; a single one as itself."""
        parts: list[Sequence[Token]] = []
        words: set[str] = set()
        depth, start, position = 0, 0, 0
        while position < len(slice_):
            token = slice_[position]
            depth += _depth_step(token)
            separator = _separator(token) if depth == 0 else None
            if separator:
                if position > start:
                    parts.append(slice_[start:position])
                elif separator == "," or not parts:
                    raise UnreadableError("nothing between two separators")
                words.add(separator)
                start = position + 1
            position += 1
        if start < len(slice_):
            parts.append(slice_[start:])
        elif parts:
            raise UnreadableError("nothing behind a separator")
        if not parts or len(parts) > _MAX_ITEMS:
            raise UnreadableError("no answer" if not parts else "too many answers")
        items = [self._item(part, alone=len(parts) == 1) for part in parts]
        if len(items) == 1:
            return items[0]
        return Listing(tuple(items), "or" if "or" in words else "and" if "and" in words else ",")

    def _item(self, part: Sequence[Token], alone: bool) -> Structure:
        try:
            return self.statement(part)
        except UnreadableError:
            if alone or not all(token.kind in ("word", "text") for token in part):
                raise
            return Text(plain_words(" ".join(token.text for token in part)))

    def statement(self, slice_: Sequence[Token]) -> Structure:
        """A chain of relations, or a single side."""
        slice_ = list(slice_)
        if slice_ and slice_[0].text in ("=", "\\approx") and len(slice_) > 1:
            slice_ = slice_[1:]
        sides, operators, depth, start, bars = [], [], 0, 0, False
        for position, token in enumerate(slice_):
            depth += _depth_step(token)
            bars ^= token.text == "|" and token.kind == "sign"
            if depth == 0 and token.kind in ("sign", "command") and token.text in _RELATIONS:
                operators.append(_RELATIONS[token.text])
                sides.append(slice_[start:position])
                start = position + 1
        sides.append(slice_[start:])
        if len(sides) == 1:
            return self.side(slice_)
        read = [self.side(side) for side in sides]
        if operators == ["in"] and isinstance(read[0], Symbol):
            return read[1]
        if "in" in operators:
            raise UnreadableError("membership in a chain")
        last = read[-1]
        if isinstance(last, Residue) and len(read) == 2:
            return Residue(last.value, last.modulus)
        return Relation(tuple(read), tuple(operators))

    def side(self, slice_: Sequence[Token]) -> Structure:
        """Sets with \\cup \\cap \\setminus between them, a ratio, a residue or a quantity."""
        if not slice_ or sum(token.text in _SET_OPERATORS for token in slice_) > _MAX_SETS:
            raise UnreadableError("an empty side, or too many sets")
        for names, operator in (((("\\setminus"),), "setminus"), (("\\cup",), "cup"), (("\\cap",), "cap")):
            position = _last_outside(slice_, names)
            if position > 0:
                left, right = self.side(slice_[:position]), self.side(slice_[position + 1 :])
                return Combination(operator, left, right)
        colons = _outside(slice_, (":",))
        if colons and colons[-1] > 0:
            ends = zip([-1, *colons], [*colons, len(slice_)], strict=True)
            return Ratio(tuple(self._plain(slice_[start + 1 : end]) for start, end in ends))
        return self._braced_set(slice_) or self._quantity(slice_)

    def _braced_set(self, slice_: Sequence[Token]) -> Structure | None:
        """{x | x > 3}, and a set or group whose items are more than plain expressions."""
        if len(slice_) < 2 or slice_[0].text not in _OPENING or _matching(slice_) != len(slice_) - 1:
            return None
        inner = slice_[1:-1]
        opening, closing = slice_[0].text, slice_[-1].text
        if opening in ("\\{", "{") and len(inner) > 2 and inner[0].kind in ("word", "command"):
            for position, token in enumerate(inner):
                if token.text in ("|", ":"):
                    condition = self.listing(inner[position + 1 :])
                    return condition if isinstance(condition, (Relation, Listing)) else None
        if _last_outside(inner, (",", ";")) <= 0:
            if opening == "\\{" and inner:
                return Collection((self.statement(inner),))
            if opening in ("(", "[") and inner and inner[0].text in _OPENING and _matching(inner) == len(inner) - 1:
                structure = self.statement(inner)
                return Bracketed(opening, closing, (structure,)) if not is_expression(structure) else None
            return None
        read = self._without_units().listing(inner)
        if not isinstance(read, Listing) or read.word != ",":
            raise UnreadableError("words in brackets")
        if opening in ("\\{", "{"):
            return Collection(read.items)
        if opening == "\\langle":
            return Bracketed("(", ")", read.items)
        return Bracketed(opening, closing, read.items)

    def _without_units(self) -> Reader:
        return Reader(self._commas, units=False)

    def _plain(self, slice_: Sequence[Token]) -> Expression:
        grammar = AnswerGrammar(slice_, units=False)
        expression = grammar.sum()
        if grammar.token is not None or not isinstance(expression, (Number, Symbol, FunctionCall)):
            raise UnreadableError("no expression")
        return expression

    def _quantity(self, slice_: Sequence[Token]) -> Structure:
        currency = None
        negative = len(slice_) > 2 and slice_[0].text == "-" and _currency(slice_[1])
        if negative or (len(slice_) > 1 and _currency(slice_[0])):
            currency = _currency(slice_[1 if negative else 0])
            slice_ = [*slice_[:1], *slice_[2:]] if negative else slice_[1:]
        grammar = AnswerGrammar(slice_, self._units)
        read = grammar.sum()
        if grammar.token is not None and grammar.sees("\\pmod", "\\bmod", "\\mod"):
            return Residue(_required(read), self._modulus(grammar.tokens[grammar.position + 1 :]))
        token = grammar.token
        if token is not None and token.text == "mod":
            return Residue(_required(read), self._modulus(grammar.tokens[grammar.position + 1 :]))
        unit = None
        if token is not None:
            unit = parse_unit(grammar.unit_text()) if self._units else None
            if unit is None:
                raise UnreadableError(f"unexpected {token.text}")
            if not _is_surely_unit(read, grammar.tokens[grammar.position :]):
                return self._without_units()._quantity(slice_) if currency is None else _no_unit(token)
        if currency is not None:
            money = single(currency)
            if unit is None:
                unit = money
            elif not unit.dimensions:
                unit = type(unit)(unit.scale, money.dimensions)
            elif unit.dimensions != money.dimensions:
                raise UnreadableError("two units")
        return read if unit is None else Quantity(_required(read), unit)

    def _modulus(self, slice_: Sequence[Token]) -> Expression:
        return self._plain(slice_)


def _no_unit(token: Token) -> Structure:
    raise UnreadableError(f"{token.text} may be a variable")


def _is_surely_unit(amount: Structure, unit: Sequence[Token]) -> bool:
    """Can these tokens behind ``amount`` be nothing but a unit?

    Words in \\text can. Plain letters could be variables: behind a plain number the usual ones are a unit, behind an
    expression with variables only words of plain language are, and behind any other value (25 \\pi) longer ones too.
    """
    letters = [token.text for token in unit if token.kind == "word"]
    if any(len(word) == 1 for word in letters) and not any(token.text == "\\circ" for token in unit):
        longer = any(len(word) > 1 for word in letters)
        return _is_plain_number(amount) and (longer or is_letter_unit(" ".join(token.text for token in unit)))
    if not is_expression(amount) or symbols_of(_required(amount)):
        return all(map(is_plain_language, letters))
    return True


def _is_plain_number(structure: Structure) -> bool:
    """A number, a fraction or a mixed number of numbers, or one times a power of ten."""
    if isinstance(structure, Number):
        return True
    if not isinstance(structure, FunctionCall):
        return False
    arguments = structure.arguments
    if structure.function == "neg":
        return _is_plain_number(arguments[0])
    if structure.function == "div":
        return all(isinstance(argument, Number) for argument in arguments)
    if structure.function == "add":  # as a mixed number is read; 3 + 2 m is a sum
        whole, part = arguments
        return (
            isinstance(whole, Number)
            and isinstance(part, FunctionCall)
            and part.function == "div"
            and _is_plain_number(part)
        )
    power = arguments[-1]
    is_power = isinstance(power, FunctionCall) and power.function == "pow" and power.arguments[0] == integer(10)
    return structure.function == "mul" and isinstance(arguments[0], Number) and is_power


def _required(structure: Structure) -> Expression:
    if isinstance(structure, (Number, Symbol, FunctionCall)):
        return structure
    raise UnreadableError("no expression")


def _currency(token: Token) -> str | None:
    if token.kind == "currency":
        return token.text
    return {"USD": "dollar", "Rs": "rupee", "EUR": "euro"}.get(token.text) if token.kind == "word" else None


def _depth_step(token: Token) -> int:
    if token.kind not in ("sign", "command"):
        return 0
    return (token.text in _OPENING) - (token.text in _CLOSING)


def _separator(token: Token) -> str | None:
    if token.kind == "sign" and token.text in (",", ";"):
        return ","
    if token.kind in ("word", "text") and token.text.lower().strip(" ,") in ("and", "or"):
        return token.text.lower().strip(" ,")
    if token.kind == "command":
        return {"\\land": "and", "\\lor": "or"}.get(token.text)
    return None


def _last_outside(slice_: Sequence[Token], signs: tuple[str, ...]) -> int:
    """Where the last of ``signs`` stands that is in no brackets; -1 if none does."""
    return (_outside(slice_, signs) or [-1])[-1]


def _outside(slice_: Sequence[Token], signs: tuple[str, ...]) -> list[int]:
    """Where ``signs`` stand that are in no brackets."""
    depth, result = 0, []
    for position, token in enumerate(slice_):
        depth += _depth_step(token)
        if depth == 0 and token.kind in ("sign", "command") and token.text in signs:
            result.append(position)
    return result


def _matching(slice_: Sequence[Token]) -> int:
    """Where the bracket that opens ``slice_`` closes; -1 if nowhere."""
    depth = 0
    for position, token in enumerate(slice_):
        depth += _depth_step(token)
        if depth == 0:
            return position
    return -1
