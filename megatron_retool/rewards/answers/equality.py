"""Are two answers equal? docs/grader.md has the rules with examples."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import mpmath

from megatron_retool.rewards.answers.expressions import (
    INFINITY,
    Call,
    Collection,
    Combination,
    E,
    Expression,
    Group,
    Listing,
    Matrix,
    Number,
    PI,
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
from megatron_retool.rewards.answers.reading import as_matrix, readings
from megatron_retool.rewards.answers.sets import real_set, same_set
from megatron_retool.rewards.answers.spelling import spelled, without_spacing
from megatron_retool.rewards.answers.tokens import Numeral
from megatron_retool.rewards.answers.units import DEGREE, PERCENT, Unit
from megatron_retool.rewards.answers.values import (
    Deadline,
    Evaluator,
    UndecidedError,
    UndefinedError,
    digits_for,
    exact,
    same_value,
    sample_point,
    whole_point,
)
from megatron_retool.rewards.answers.words import calendar_date, clock_time, number_word, plain_words

MAX_CHARACTERS = 1000
_SECONDS = 0.3
_VOTED_BITS = 4000
_TRIALS = 5
_ROUNDED_DIGITS = 6
_LONG_DIGITS = 10
_FLOAT_DIGITS = 15
_FLOAT_ERROR = Fraction(1, 10**15)


def equivalent(prediction: str, truth: str) -> bool:
    """Does ``prediction`` state what ``truth`` states? Takes milliseconds, and under a second for any input."""
    if len(prediction) > MAX_CHARACTERS or len(truth) > 4 * MAX_CHARACTERS:
        return prediction.strip() == truth.strip()
    if not re.search(r"\w|\\emptyset|\\infty|∞|∅|\{\s*\\?\}", prediction):
        return False
    plain = [without_spacing(spelled(text)) for text in (prediction, truth)]
    if plain[0] == plain[1]:
        return bool(plain[0])
    times = [clock_time(plain_words(text)) for text in plain]
    if times[0] and times[1]:
        return times[0] == times[1] or (_without_half(times[0], times[1]) and "" in (times[0][1], times[1][1]))
    dates = [calendar_date(plain_words(text).replace(" ,", ",")) for text in plain]
    if dates[0] and dates[1]:
        return dates[0] == dates[1]
    if _is_choice(plain[1]):
        return _chosen(plain[0]) == plain[1].strip("()")
    comparison = _Comparison(Deadline(_SECONDS))
    try:
        for units in (True, False):
            predicted = readings(prediction, units)
            if any(comparison.same_answer(left, right) for right in readings(truth, units) for left in predicted):
                return True
    except (UndecidedError, RecursionError):
        # A sum of hundreds of terms is read, but may be too deep to compare.
        pass
    return False


_CHOICE = re.compile(r"\(?([A-J])\)?\Z")
_CHOICE_WITH_CONTENT = re.compile(r"(?:\\text ?\{ ?)?\(?([A-J])[):](?: ?\})? ?(?!.*(?:\b(?:or|and|not)\b|\b[A-J]\b)).+\Z")


def _is_choice(text: str) -> bool:
    return _CHOICE.match(text) is not None


def _chosen(text: str) -> str | None:
    """The letter that an answer to a multiple-choice question names: B, (B), (b), \\text{B}, B: 12; None for two of them."""
    letter = re.sub(r"\\text|[{} ]", "", text)
    if re.fullmatch(r"\(?[A-J]\)?|\([a-j]\)", letter):
        return letter.strip("()").upper()
    match = _CHOICE_WITH_CONTENT.match(text)
    return match[1] if match else None


def canonical(text: str) -> str:
    """One spelling for answers that are plainly equal (0.5, 1/2 and \\frac12; 5 and 5 cm), to count votes by."""
    if len(text) > MAX_CHARACTERS:
        return text
    with contextlib.suppress(UndefinedError, UndecidedError, RecursionError):
        answer = readings(text, units=True)[0]
        amount = answer.amount if isinstance(answer, Quantity) else answer
        value = exact(amount, Deadline(_SECONDS)) if isinstance(amount, (Number, Symbol, Call)) else None
        if value is not None and max(value.numerator.bit_length(), value.denominator.bit_length()) < _VOTED_BITS:
            return str(value)
    return without_spacing(spelled(text)).replace(" ", "")


def _without_half(one: tuple[int, str], two: tuple[int, str]) -> bool:
    return one[0] % 43200 == two[0] % 43200


class _Comparison:
    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline

    def same_answer(self, left: Structure, right: Structure) -> bool:
        """``left`` is the prediction, ``right`` the truth: here a set of one stands for its element."""
        if isinstance(left, Collection) != isinstance(right, Collection):
            left, right = (
                side.items[0] if isinstance(side, Collection) and len(side.items) == 1 else side
                for side in (left, right)
            )
        return self.equal(left, right)

    def equal(self, left: Structure, right: Structure) -> bool:
        """Do both state the same, as an answer or as a part of one?"""
        self._deadline.check()
        try:
            return self._equal(_simplified(left), _simplified(right))
        except UndefinedError:
            return False

    def _equal(self, left: Structure, right: Structure) -> bool:
        if left == right:
            return True
        if isinstance(left, Text) or isinstance(right, Text):
            return _same_words(left, right)
        if isinstance(left, Residue) or isinstance(right, Residue):
            return self._same_residue(left, right)
        if isinstance(left, Relation) or isinstance(right, Relation):
            return self._same_relation(left, right)
        if isinstance(left, Listing) or isinstance(right, Listing):
            return self._same_listing(left, right)
        if isinstance(left, Ratio) or isinstance(right, Ratio):
            return self._same_ratio(left, right)
        if isinstance(left, Matrix) or isinstance(right, Matrix):
            return self._same_matrix(left, right)
        if isinstance(left, Combination) or isinstance(right, Combination) or REAL_LINE in (left, right):
            return self._same_reals(left, right)
        if isinstance(left, Collection) or isinstance(right, Collection):
            return self._same_collection(left, right)
        if isinstance(left, Group) and isinstance(right, Group):
            return self._same_group(left, right)
        if isinstance(left, Group) or isinstance(right, Group):
            return False
        return self._same_quantity(left, right)

    # Structures.

    def _same_residue(self, left: Structure, right: Structure) -> bool:
        if isinstance(left, Residue) and isinstance(right, Residue):
            parts = [exact(part, self._deadline) for part in (left.value, left.modulus, right.value, right.modulus)]
            if any(part is None for part in parts):
                return self.equal(left.value, right.value) and self.equal(left.modulus, right.modulus)
            value, modulus, true_value, true_modulus = (part for part in parts if part is not None)
            return modulus == true_modulus != 0 and (value - true_value) % modulus == 0
        return isinstance(right, Residue) and self.equal(left, right.value)

    def _same_relation(self, left: Structure, right: Structure) -> bool:
        if not (isinstance(left, Relation) and isinstance(right, Relation)):
            value, claimed, other = (left, right, True) if isinstance(right, Relation) else (right, left, False)
            if isinstance(claimed, Relation) and set(claimed.operators) <= {"=", "~"}:
                sides = self._stated(claimed, lenient=not other)
                if sides is None or isinstance(value, Relation):
                    return False
                pairs = [(value, side) if other else (side, value) for side in sides]
                return bool(pairs) and all(self.equal(one, two) for one, two in pairs)
            return self._same_reals(left, right)
        if set(left.operators) == set(right.operators) == {"="}:
            return self._same_equation(left, right)
        if {"~"} & {*left.operators, *right.operators}:
            return False
        if self._same_reals(left, right):
            return True
        return len(left.operators) == len(right.operators) == 1 and self._same_inequality(left, right)

    def _stated(self, relation: Relation, lenient: bool) -> list[Structure] | None:
        """The sides of a chain of equations that are not its name; None where it states no value.

        Args:
            lenient: also take m + n = 73 for a statement of 73.
        """
        sides = list(relation.sides)
        if relation.operators[-1] == "~" and len(sides) > 1 and "~" not in relation.operators[:-1]:
            approximation = sides.pop()
            if sides and not _is_name(sides[-1]) and not self._near(sides[-1], approximation):
                return None
            if len(sides) == 1 and _is_name(sides[0]):
                return [approximation]
        elif "~" in relation.operators:
            return None
        names = [side for side in sides if _is_name(side)]
        if len(names) > 1:
            return None
        if not names and len(sides) > 1 and lenient and _is_asked_for(sides[0]) and not _names(sides[1:]):
            sides = sides[1:]
        return [side for side in sides if not _is_name(side)]

    def _near(self, exactly: Structure, approximation: Structure) -> bool:
        try:
            one, two = (self._number(side) for side in (exactly, approximation))
        except (UndefinedError, TypeError):
            return False
        return bool(abs(one - two) <= abs(one) / 50)

    def _number(self, side: Structure) -> Any:
        if not isinstance(side, (Number, Symbol, Call)):
            raise TypeError("no expression")
        return Evaluator(40, {}, self._deadline).value(side)

    def _same_equation(self, left: Relation, right: Relation) -> bool:
        names = [[side for side in relation.sides if _is_name(side)] for relation in (left, right)]
        if len(names[0]) == len(names[1]) == 1 and _same_name(names[0][0], names[1][0]):
            sides = [[side for side in relation.sides if not _is_name(side)] for relation in (left, right)]
            return all(self.equal(one, two) for one in sides[0] for two in sides[1])
        if len(left.sides) != 2 or len(right.sides) != 2:
            return False
        assignments = [_assignment(relation) for relation in (left, right)]
        if assignments[0] is not None and assignments[1] is not None:
            return self._same_assignment(assignments[0], assignments[1])
        return self._proportional(left, right, positive=False)

    def _same_inequality(self, left: Relation, right: Relation) -> bool:
        one, two = (_with_less(relation) for relation in (left, right))
        return one.operators == two.operators and self._proportional(one, two, positive=one.operators[0] != "!=")

    def _proportional(self, left: Relation, right: Relation, positive: bool) -> bool:
        """Is one side's difference the other's times a constant?"""
        differences = []
        for relation in (left, right):
            one, two = relation.sides
            if not (isinstance(one, (Number, Symbol, Call)) and isinstance(two, (Number, Symbol, Call))):
                return False
            differences.append(Call("sub", (one, two)))
        if not symbols_of(differences[1]) or symbols_of(differences[0]) != symbols_of(differences[1]):
            return False
        point = sample_point(symbols_of(differences[1]), 0)
        scales = [self._at(difference, point)[0] for difference in differences]
        if min(abs(scale) for scale in scales) < 1e-20:
            return False
        ratio = Call("div", (_substituted(differences[0], point), _substituted(differences[1], point)))
        if positive:
            value = self._number(ratio)
            if not (mpmath.im(value) == 0 and mpmath.re(value) > 0):
                return False
        return self._same_expression(differences[0], Call("mul", (ratio, differences[1])))

    def _same_listing(self, left: Structure, right: Structure) -> bool:
        if _has_relations(left) or _has_relations(right):
            by_name = [_assignment(side) for side in (left, right)]
            if by_name[0] is not None and by_name[1] is not None:
                return self._same_assignment(by_name[0], by_name[1])
            for assigned, other, swapped in ((by_name[0], right, False), (by_name[1], left, True)):
                values = _items_in_order(other)
                if assigned is not None and values is not None and not _has_relations(other):
                    mine: Sequence[Structure] = [assigned[name] for name in sorted(assigned)]
                    return self._each(values, mine) if swapped else self._each(mine, values)
            if self._same_reals(left, right):
                return True
        if isinstance(right, Group) and len(right.items) == 2 and right.opening + right.closing != "()":
            # An interval is stated by its brackets.
            return False
        items = [_items(side) for side in (left, right)]
        if items[0] is None or items[1] is None:
            ordered = [_items_in_order(side) for side in (left, right)]
            if ordered[0] is None or ordered[1] is None:
                return False
            return self._each(ordered[0], ordered[1])
        return self._same_multiset(items[0], items[1])

    def _same_assignment(self, left: dict[str, Structure], right: dict[str, Structure]) -> bool:
        return left.keys() == right.keys() and all(self.equal(left[name], right[name]) for name in left)

    def _each(self, left: Sequence[Structure], right: Sequence[Structure]) -> bool:
        return len(left) == len(right) and all(self.equal(one, two) for one, two in zip(left, right, strict=True))

    def _same_multiset(self, left: Sequence[Structure], right: Sequence[Structure]) -> bool:
        if len(left) != len(right):
            return False
        remaining = list(left)
        for item in right:
            position = next((i for i, other in enumerate(remaining) if self.equal(other, item)), None)
            if position is None:
                return False
            del remaining[position]
        return True

    def _same_ratio(self, left: Structure, right: Structure) -> bool:
        if isinstance(left, Ratio) and isinstance(right, Ratio):
            if len(left.terms) != len(right.terms):
                return False
            return all(
                self.equal(Call("mul", (_ex(one), _ex(right.terms[0]))), Call("mul", (_ex(two), _ex(left.terms[0]))))
                for one, two in zip(left.terms[1:], right.terms[1:], strict=True)
            )
        ratio, other = (left, right) if isinstance(left, Ratio) else (right, left)
        if not isinstance(ratio, Ratio) or len(ratio.terms) != 2 or not is_expression(other):
            return False
        return self.equal(Call("div", (_ex(ratio.terms[0]), _ex(ratio.terms[1]))), other)

    def _same_matrix(self, left: Structure, right: Structure) -> bool:
        rows = []
        for side, other in ((left, right), (right, left)):
            matrix = side if isinstance(side, Matrix) else as_matrix(side)
            if matrix is None and isinstance(side, Group) and side.opening == "(" and side.closing == ")":
                # A point of the plane is a column of its coordinates.
                column = isinstance(other, Matrix) and len(other.rows[0]) == 1
                matrix = Matrix(tuple((item,) for item in side.items)) if column else None
            if matrix is None:
                return False
            rows.append(matrix.rows)
        return len(rows[0]) == len(rows[1]) and all(
            self._each(one, two) for one, two in zip(rows[0], rows[1], strict=True)
        )

    def _same_reals(self, left: Structure, right: Structure) -> bool:
        sets = [real_set(side, self._deadline) for side in (left, right)]
        return sets[0] is not None and sets[1] is not None and same_set(sets[0], sets[1], self.equal)

    def _same_collection(self, left: Structure, right: Structure) -> bool:
        items = []
        for side in (left, right):
            if isinstance(side, Collection):
                items.append(self._distinct(side.items))
            elif isinstance(side, Group) and side.opening == "[" and not any(map(is_expression, side.items)):
                # A Python list of points; [1, 2] of numbers may be an interval.
                items.append(self._distinct(side.items))
            else:
                return False
        return self._same_multiset(items[0], items[1])

    def _distinct(self, items: Sequence[Structure]) -> list[Structure]:
        distinct: list[Structure] = []
        for item in items:
            if not any(self.equal(item, other) for other in distinct):
                distinct.append(item)
        return distinct

    def _same_group(self, left: Group, right: Group) -> bool:
        same_brackets = (left.opening, left.closing) == (right.opening, right.closing)
        return (same_brackets or len(left.items) != 2) and self._each(left.items, right.items)

    # Numbers and expressions.

    def _same_quantity(self, left: Structure, right: Structure) -> bool:
        amounts = [side.amount if isinstance(side, Quantity) else _ex(side) for side in (left, right)]
        units = [side.unit if isinstance(side, Quantity) else None for side in (left, right)]
        if units[0] is not None and units[1] is not None and units[0].dimensions and units[1].dimensions:
            if units[0].dimensions != units[1].dimensions:
                return _degrees_and_radians(units) and self._same_expression(*map(_in_radians, amounts, units))
            return self._same_expression(*(_scaled(a, unit.scale) for a, unit in zip(amounts, units, strict=True)
                                           if unit is not None))
        one, two = (_scaled(a, _pure_scale(unit)) for a, unit in zip(amounts, units, strict=True))
        if self._same_expression(one, two):
            return True
        # With the unit on one side alone, a percentage may stand for its hundredth and degrees for radians.
        for position, unit in enumerate(units):
            factor = _alternative(unit)
            if factor is not None and units[1 - position] is None:
                changed = [one, two]
                changed[position] = Call("mul", (factor, changed[position]))
                return self._same_expression(*changed)
        return False

    def _same_expression(self, left: Expression, right: Expression) -> bool:
        if left == right:
            self._require_value(right)
            return True
        if _is_infinite(left) or _is_infinite(right):
            return False
        names = symbols_of(left) | symbols_of(right)
        if not names:
            return self._same_constant(left, right)
        if len(names) > 12:
            return False
        return self._same_function(left, right, names)

    def _require_value(self, expression: Expression) -> None:
        exact(expression, self._deadline)

    def _same_constant(self, left: Expression, right: Expression) -> bool:
        values = [exact(side, self._deadline) for side in (left, right)]
        literals = [_literal(side) for side in (left, right)]
        if literals[0] is not None or literals[1] is not None:
            return self._same_with_decimals(left, right, literals, values)
        if values[0] is not None and values[1] is not None:
            return values[0] == values[1]
        return self._same_at(left, right, {}) is True

    def _same_with_decimals(
        self,
        left: Expression,
        right: Expression,
        literals: list[Numeral | None],
        values: list[Fraction | None],
    ) -> bool:
        if values[0] is not None and values[0] == values[1]:
            return True
        if literals[0] is not None and literals[1] is not None:
            return _same_decimals(literals[0], literals[1])
        decimal, other, value = (
            (literals[0], right, values[1]) if literals[0] is not None else (literals[1], left, values[0])
        )
        assert decimal is not None
        if value is None:
            if self._same_at(left, right, {}):
                return True
            number, _ = self._at(other, {})
            if abs(mpmath.im(number)) > 1e-25:
                return False
            real = mpmath.re(number)
            # 40 digits of an irrational number serve as the number itself: a decimal has far fewer.
            value = Fraction(int(mpmath.floor(real * mpmath.mpf(10) ** 45)), 10**45) if abs(real) < 1e30 else None
            if value is None or abs(value) < Fraction(1, 10**20):
                return False
        elif _terminates(value):
            return _is_float_noise(decimal, value)
        return _is_rounded(decimal, value)

    def _at(self, expression: Expression, point: dict[str, Fraction], digits: int = 50) -> tuple[Any, int]:
        with mpmath.workdps(digits):
            values = {name: mpmath.mpf(value.numerator) / value.denominator for name, value in point.items()}
            evaluator = Evaluator(digits, values, self._deadline)
            return evaluator.value(expression), evaluator.reach

    def _same_at(self, left: Expression, right: Expression, point: dict[str, Fraction]) -> bool | None:
        """None where the two have no real value there."""
        digits = digits_for(0)
        for _ in range(4):
            (one, reach), (two, other_reach) = (self._at(side, point, digits) for side in (left, right))
            reach = max(reach, other_reach)
            if not same_value(one, two, digits, min(reach, digits // 4)):
                return None if point and _complex(one, two, left, right) else False
            needed = digits_for(reach)
            if digits >= needed:
                return None if point and _complex(one, two, left, right) else True
            digits = needed
        return False

    def _same_function(self, left: Expression, right: Expression, names: frozenset[str]) -> bool:
        agreed = 0
        whole = _alternates(left) or _alternates(right)
        for trial in range(3 * _TRIALS):
            try:
                point = whole_point(names, trial) if whole else sample_point(names, trial)
                verdict = self._same_at(left, right, point)
            except (UndefinedError, UndecidedError):
                self._deadline.check()
                continue
            if verdict is False:
                return False
            agreed += verdict is True
            if agreed >= _TRIALS:
                return True
        return agreed >= 3


REAL_LINE = Symbol("the real numbers")


def _complex(one: Any, two: Any, left: Expression, right: Expression) -> bool:
    return bool(mpmath.im(one) != 0 or mpmath.im(two) != 0) and not (_has_i(left) or _has_i(right))


def _is_infinite(expression: Expression) -> bool:
    if isinstance(expression, Call):
        return any(_is_infinite(argument) for argument in expression.arguments)
    return expression == INFINITY


def _alternates(expression: Expression) -> bool:
    """Has it a power like (-1)^n, which means something for whole n alone?"""
    if not isinstance(expression, Call):
        return False
    if expression.function == "pow" and symbols_of(expression.arguments[1]) and not symbols_of(expression.arguments[0]):
        base = expression.arguments[0]
        if isinstance(base, Call) and base.function == "neg":
            return True
    return any(_alternates(argument) for argument in expression.arguments)


def _has_i(expression: Expression) -> bool:
    if isinstance(expression, Call):
        return any(_has_i(argument) for argument in expression.arguments)
    return expression == Symbol("i")


def _simplified(structure: Structure) -> Structure:
    """With \\pm written out, and a single item in brackets as the item."""
    if isinstance(structure, (Call, Quantity, Relation)) and _has_sign_choice(structure):
        return Listing((_with_sign(structure, 1), _with_sign(structure, -1)), "or")
    if isinstance(structure, (Listing, Collection)) and any(_has_sign_choice(item) for item in structure.items):
        items: list[Structure] = []
        for item in structure.items:
            if _has_sign_choice(item):
                items += [_with_sign(item, 1), _with_sign(item, -1)]
            else:
                items.append(item)
        return replace(structure, items=tuple(items))
    if isinstance(structure, Group) and len(structure.items) == 1 and is_expression(structure.items[0]):
        return structure.items[0]
    return structure


def _has_sign_choice(structure: Structure) -> bool:
    if isinstance(structure, Call):
        return structure.function in ("pm", "mp") or any(_has_sign_choice(each) for each in structure.arguments)
    if isinstance(structure, Quantity):
        return _has_sign_choice(structure.amount)
    return isinstance(structure, Relation) and any(_has_sign_choice(side) for side in structure.sides)


def _with_sign(structure: Structure, sign: int) -> Structure:
    if isinstance(structure, Call):
        function = structure.function
        if function in ("pm", "mp"):
            function = "add" if (function == "pm") == (sign > 0) else "sub"
        return Call(function, tuple(_ex(_with_sign(each, sign)) for each in structure.arguments))
    if isinstance(structure, Quantity):
        return Quantity(_ex(_with_sign(structure.amount, sign)), structure.unit)
    if isinstance(structure, Relation):
        return Relation(tuple(_with_sign(side, sign) for side in structure.sides), structure.operators)
    return structure


def _ex(structure: Structure) -> Expression:
    if isinstance(structure, (Number, Symbol, Call)):
        return structure
    raise UndefinedError("no expression")


def _same_words(left: Structure, right: Structure) -> bool:
    texts = []
    for side, other in ((left, right), (right, left)):
        if isinstance(side, Text):
            number = number_word(side.words)
            if number is not None and isinstance(other, Number):
                return other.numeral.value == number
            texts.append(side.words)
        elif isinstance(side, Symbol):
            texts.append(plain_words(side.name))
        else:
            return False
    return texts[0] == texts[1] and any(character.isalnum() for character in texts[0])


# Names: what may stand on one side of an equation without being part of the answer.


def _is_name(side: Structure) -> bool:
    if isinstance(side, Symbol):
        return side not in (E, PI, INFINITY)
    if isinstance(side, Call):
        if side.function == "abs":
            return isinstance(side.arguments[0], Symbol) and len(side.arguments[0].name) > 1
        return side.function.startswith("unknown ")
    return isinstance(side, Group) and all(isinstance(item, Symbol) for item in side.items)


def _is_asked_for(side: Structure) -> bool:
    """m + n or 100m + n: what a question asks for the value of. Not 2x or x - 1, which would have to be solved."""
    return is_expression(side) and len(symbols_of(_ex(side))) > 1


def _names(sides: Sequence[Structure]) -> bool:
    return any(not is_expression(side) or symbols_of(_ex(side)) for side in sides)


def _same_name(one: Structure, two: Structure) -> bool:
    if one == two:
        return True
    functions = [side for side in (one, two) if isinstance(side, Call)]
    return len(functions) == 1 and Symbol("y") in (one, two) and functions[0].function == "unknown f"


def _has_relations(structure: Structure) -> bool:
    return isinstance(structure, Listing) and any(isinstance(item, Relation) for item in structure.items)


def _assignment(structure: Structure) -> dict[str, Structure] | None:
    """{"x": 1, "y": 2} of x = 1, y = 2 and of (x, y) = (1, 2)."""
    found: dict[str, Structure] = {}
    if isinstance(structure, Relation) and structure.operators == ("=",):
        names, values = structure.sides
        if not (isinstance(names, Group) and isinstance(values, Group) and len(names.items) == len(values.items)):
            return None
        for name, value in zip(names.items, values.items, strict=True):
            if not isinstance(name, Symbol):
                return None
            found[name.name] = value
        return found
    if not isinstance(structure, Listing) or structure.word == "or":
        return None
    for item in structure.items:
        if not (isinstance(item, Relation) and item.operators == ("=",) and isinstance(item.sides[0], Symbol)):
            return None
        found[item.sides[0].name] = item.sides[1]
    several = len({name.partition("_")[0] for name in found}) == len(found) == len(structure.items)
    return found if several else None


def _items(structure: Structure) -> list[Structure] | None:
    """The items of what has no order: a listing, a set, a Python list against a listing."""
    if isinstance(structure, Listing):
        items: list[Structure] = []
        base: str | None = None
        for index, item in enumerate(structure.items):
            if isinstance(item, Relation) and set(item.operators) == {"="} and _is_name(item.sides[0]):
                name = item.sides[0].name.partition("_")[0] if isinstance(item.sides[0], Symbol) else "()"
                if len(item.sides) != 2 or (index and name != base):
                    return None
                base = name
                items.append(item.sides[1])
            elif isinstance(item, Relation):
                return None
            else:
                items.append(item)
        return items
    if isinstance(structure, Collection):
        return list(structure.items)
    if isinstance(structure, Group) and structure.opening + structure.closing == "[]":
        return list(structure.items)
    return None


def _items_in_order(structure: Structure) -> Sequence[Structure] | None:
    if isinstance(structure, Group):
        return structure.items
    return structure.items if isinstance(structure, Listing) and structure.word != "or" else None


def _with_less(relation: Relation) -> Relation:
    if relation.operators[0] in (">", ">="):
        flipped = {">": "<", ">=": "<="}[relation.operators[0]]
        return Relation((relation.sides[1], relation.sides[0]), (flipped,))
    return relation


def _substituted(expression: Expression, point: dict[str, Fraction]) -> Expression:
    if isinstance(expression, Symbol) and expression.name in point:
        return Number(Numeral(point[expression.name]))
    if isinstance(expression, Call):
        return Call(expression.function, tuple(_substituted(each, point) for each in expression.arguments))
    return expression


# Units.


def _scaled(amount: Expression, scale: Fraction) -> Expression:
    return amount if scale == 1 else Call("mul", (Number(Numeral(scale)), amount))


def _pure_scale(unit: Unit | None) -> Fraction:
    """5 thousand is 5000 with or without what is counted; 5 km is 5 where the other side has no unit."""
    return unit.scale if unit is not None and _is_count(unit) else Fraction(1)


def _is_count(unit: Unit) -> bool:
    return not unit.dimensions or (unit.scale >= 100 and unit.scale % 100 == 0 and len(unit.dimensions) == 1
                                   and unit.dimensions[0][0] not in _MEASURED)


_MEASURED = frozenset(("length", "mass", "time", "watt", "joule", "month", "area", "volume"))


def _alternative(unit: Unit | None) -> Expression | None:
    if unit is None or len(unit.dimensions) != 1 or unit.dimensions[0][1] != 1:
        return None
    if unit.dimensions[0][0] == PERCENT:
        return Number(Numeral(Fraction(1, 100)))
    return Call("div", (PI, integer(180))) if unit.dimensions[0][0] == DEGREE else None


def _degrees_and_radians(units: Sequence[Unit | None]) -> bool:
    names = {unit.dimensions for unit in units if unit is not None}
    return names == {((DEGREE, 1),), (("radian", 1),)}


def _in_radians(amount: Expression, unit: Unit | None) -> Expression:
    factor = _alternative(unit)
    return amount if factor is None else Call("mul", (factor, amount))


# Decimals.


def _literal(expression: Expression) -> Numeral | None:
    """The decimal that the expression is (with sign, power of ten or scale), None if it is none."""
    if isinstance(expression, Number):
        return expression.numeral if expression.numeral.step is not None else None
    if not isinstance(expression, Call):
        return None
    if expression.function == "neg":
        inner = _literal(expression.arguments[0])
        return None if inner is None else Numeral(-inner.value, inner.step, inner.digits)
    if expression.function == "mul":
        for one, two in (expression.arguments, expression.arguments[::-1]):
            inner, scale = _literal(one), _scale(two)
            if inner is not None and inner.step is not None and scale:
                return Numeral(inner.value * scale, inner.step * abs(scale), inner.digits)
    return None


def _scale(expression: Expression) -> Fraction | None:
    """An exact factor: a fraction of a unit, or a power of ten."""
    if isinstance(expression, Number):
        return expression.numeral.value if expression.numeral.step is None else None
    if isinstance(expression, Call) and expression.function == "pow" and expression.arguments[0] == integer(10):
        exponent = expression.arguments[1]
        sign = -1 if isinstance(exponent, Call) and exponent.function == "neg" else 1
        inner = exponent.arguments[0] if isinstance(exponent, Call) and sign < 0 else exponent
        if isinstance(inner, Number) and inner.numeral.value.denominator == 1 and inner.numeral.value < 400:
            return Fraction(10) ** (sign * int(inner.numeral.value))
    return None


def _terminates(value: Fraction) -> bool:
    below = value.denominator
    for prime in (2, 5):
        while below % prime == 0:
            below //= prime
    return below == 1


def _is_rounded(decimal: Numeral, value: Fraction) -> bool:
    """Does ``decimal`` state ``value``, rounded or cut off, to at least six significant digits?"""
    assert decimal.step is not None
    if decimal.digits < _ROUNDED_DIGITS:
        return False
    error = abs(decimal.value) - abs(value)
    if decimal.value * value <= 0:
        return False
    return abs(error) <= decimal.step / 2 or -decimal.step < error < 0 or _is_float_noise(decimal, value)


def _is_float_noise(decimal: Numeral, value: Fraction) -> bool:
    """Is ``decimal`` what double precision makes of ``value``? 2.9999999999999996 is how a float writes 3."""
    if decimal.digits < _FLOAT_DIGITS or abs(decimal.value - value) > _FLOAT_ERROR * abs(value):
        return False
    return decimal.digits <= 17 and float(decimal.value) != float(value)


def _same_decimals(one: Numeral, two: Numeral) -> bool:
    """Two decimals: the same number, or a long one of at least ten digits that rounds to a shorter one of at least six."""
    if one.value == two.value:
        return True
    short, long = (one, two) if one.digits < two.digits else (two, one)
    if long.digits >= _LONG_DIGITS > short.digits >= _ROUNDED_DIGITS or long.digits >= _FLOAT_DIGITS:
        return _is_rounded(short, long.value) or _is_float_noise(long, short.value)
    return False


