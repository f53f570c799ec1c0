"""Are two answers equal? docs/grader.md has the rules with examples."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from answer_equality.expression_equality import ExpressionEquality
from answer_equality.expressions import (
    PI,
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
    parts_of,
)
from answer_equality.listings import (
    as_expression,
    assignment,
    has_names,
    has_relations,
    is_asked_for,
    is_name,
    items_in_order,
    items_of,
    names_of,
    same_name,
    simplified,
    with_less,
    with_point_unnamed,
)
from answer_equality.reading import as_matrix, reading
from answer_equality.sets import real_set, same_set
from answer_equality.spelling import spelled, without_spacing
from answer_equality.tokens import Numeral
from answer_equality.units import DEGREE, PERCENT, Unit
from answer_equality.values import (
    Effort,
    UndecidedError,
    UndefinedError,
    exact,
)
from answer_equality.words import calendar_date, clock_time, number_word, plain_words

MAX_CHARACTERS = 1000
_STEPS = 100_000
_VOTE_STEPS = 20_000
_MOST_LEVELS = 200
_VOTED_BITS = 4000


def equivalent(prediction: str, truth: str) -> bool:
    """Does ``prediction`` state what ``truth`` states? Takes milliseconds, and about a third of a second at most."""
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
    choice = _CHOICE.match(plain[1])
    if choice:
        return chosen(plain[0]) == choice[1]
    if _CHOICE.match(plain[0]) and _TRUTH_WITH_CONTENT.match(plain[1]):
        return chosen(plain[0]) == chosen(plain[1])
    comparison = _Comparison(Effort(_STEPS))
    try:
        for units in (True, False):
            if comparison.same_answer(reading(prediction, units), reading(truth, units)):
                return True
    except (ArithmeticError, RecursionError):
        # Out of reach. What a policy writes must not fail the reward, whatever it makes the arithmetic raise.
        pass
    return False


_CHOICE = re.compile(r"\(?([A-J])\)?\Z")
_CHOICE_ALONE = re.compile(r"[(\[]?([A-J])[)\].]?|\(?([a-j])\)")
_CHOICE_WITH_CONTENT = re.compile(r"(?:\(([A-J])\)|\[([A-J])\]|([A-J])(?:[):]|\.(?= )| -(?= )))\s*(\S.*)")
# Of a truth only the plainest forms: "J. Smith" is a name.
_TRUTH_WITH_CONTENT = re.compile(r"(?:\\text ?\{ ?)?(?:\([A-J]\)|[A-J][):]) ?\S")
# A letter of another choice, unless it is the article before a word of the choice's text.
_ANOTHER_LETTER = re.compile(
    r"(?<![A-Za-z\\])(?:[B-J]|A(?! (?!(?:is|are|was|also|or|and|but|nor|not)\b)[a-z]))(?![A-Za-z'])|\([a-j]\)"
)
_TAKEN_BACK = re.compile(r"(?:or|and|nor|is (?:not|wrong|incorrect|false)|not (?:the|correct)|wrong|incorrect)\b")


def chosen(text: str) -> str | None:
    """The letter that an answer to a multiple-choice question names: B, (B), (b), B: 12; None for two of them."""
    text = re.sub(r"\\text ?(?=\{)|[{}]", "", text).strip()
    text = re.sub(r"\A(?:option|choice)\b:? *", "", text, flags=re.IGNORECASE)
    alone = _CHOICE_ALONE.fullmatch(text.replace(" ", ""))
    if alone:
        return (alone[1] or alone[2]).upper()
    match = _CHOICE_WITH_CONTENT.fullmatch(text)
    if match is None or _TAKEN_BACK.match(match[4]) or _ANOTHER_LETTER.search(match[4]):
        return None
    return match[1] or match[2] or match[3]


def canonical(text: str) -> str:
    """One spelling for answers that are plainly equal (0.5, 1/2 and \\frac12; 5 and 5 cm), to count votes by."""
    if len(text) > MAX_CHARACTERS:
        return text
    with contextlib.suppress(ArithmeticError, RecursionError):
        answer = reading(text, units=True)
        amount = answer.amount if isinstance(answer, Quantity) else answer
        value = exact(amount, Effort(_VOTE_STEPS)) if isinstance(amount, (Number, Symbol, FunctionCall)) else None
        if value is not None and max(value.numerator.bit_length(), value.denominator.bit_length()) < _VOTED_BITS:
            return str(value)
    return without_spacing(spelled(text)).replace(" ", "")


def _without_half(one: tuple[int, str], two: tuple[int, str]) -> bool:
    return one[0] % 43200 == two[0] % 43200


class _Comparison:
    def __init__(self, effort: Effort) -> None:
        self._effort = effort
        self._expressions = ExpressionEquality(effort)

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
        if isinstance(left, Number) and isinstance(right, Number) and left.numeral.step is right.numeral.step is None:
            self._effort.spend(2)
            return left == right
        self._effort.spend(5 + 4 * (_size(left) + _size(right)))
        try:
            return self._equal(simplified(left), simplified(right))
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
        left, right = with_point_unnamed(left, right), with_point_unnamed(right, left)
        if isinstance(left, Bracketed) and isinstance(right, Bracketed):
            return self._same_group(left, right)
        if isinstance(left, Bracketed) or isinstance(right, Bracketed):
            return False
        return self._same_quantity(left, right)

    # Structures.

    def _same_residue(self, left: Structure, right: Structure) -> bool:
        if isinstance(left, Residue) and isinstance(right, Residue):
            parts = [exact(part, self._effort) for part in (left.value, left.modulus, right.value, right.modulus)]
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
        if all(isinstance(side, Number) for side in sides):
            return None  # 1 = 1 states nothing
        if relation.operators[-1] == "~" and len(sides) > 1 and "~" not in relation.operators[:-1]:
            approximation = sides.pop()
            if sides and not is_name(sides[-1]) and not self._expressions.near(sides[-1], approximation):
                return None
            if len(sides) == 1 and is_name(sides[0]):
                return [approximation]
        elif "~" in relation.operators:
            return None
        names = names_of(Relation(tuple(sides), relation.operators))
        if len(names) > 1:
            return None
        if not names and len(sides) > 1 and lenient and is_asked_for(sides[0]) and not has_names(sides[1:]):
            sides = sides[1:]
        return [side for side in sides if side not in names]

    def _same_equation(self, left: Relation, right: Relation) -> bool:
        names = [names_of(relation) for relation in (left, right)]
        if len(names[0]) == len(names[1]) == 1 and same_name(names[0][0], names[1][0]):
            sides = [
                [side for side in relation.sides if side not in given]
                for relation, given in zip((left, right), names, strict=True)
            ]
            return all(self.equal(one, two) for one in sides[0] for two in sides[1])
        if len(left.sides) != 2 or len(right.sides) != 2:
            return False
        assignments = [assignment(relation) for relation in (left, right)]
        if assignments[0] is not None and assignments[1] is not None:
            return self._same_assignment(assignments[0], assignments[1])
        return self._expressions.proportional(left, right, positive=False)

    def _same_inequality(self, left: Relation, right: Relation) -> bool:
        one, two = (with_less(relation) for relation in (left, right))
        return one.operators == two.operators and self._expressions.proportional(
            one, two, positive=one.operators[0] != "!="
        )

    def _same_listing(self, left: Structure, right: Structure) -> bool:
        if has_relations(left) or has_relations(right):
            by_name = [assignment(side) for side in (left, right)]
            if by_name[0] is not None and by_name[1] is not None:
                return self._same_assignment(by_name[0], by_name[1])
            for assigned, other, swapped in ((by_name[0], right, False), (by_name[1], left, True)):
                values = items_in_order(other)
                if assigned is not None and values is not None and not has_relations(other):
                    mine: Sequence[Structure] = [assigned[name] for name in sorted(assigned)]
                    return self._each(values, mine) if swapped else self._each(mine, values)
            if self._same_reals(left, right):
                return True
        if isinstance(right, Bracketed) and len(right.items) == 2 and right.opening + right.closing != "()":
            # An interval is stated by its brackets.
            return False
        items = [items_of(side) for side in (left, right)]
        if items[0] is None or items[1] is None:
            ordered = [items_in_order(side) for side in (left, right)]
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
        identical = Counter(left) & Counter(right)
        remaining = list((Counter(left) - identical).elements())
        for item in (Counter(right) - identical).elements():
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
                self.equal(
                    FunctionCall("mul", (as_expression(one), as_expression(right.terms[0]))),
                    FunctionCall("mul", (as_expression(two), as_expression(left.terms[0]))),
                )
                for one, two in zip(left.terms[1:], right.terms[1:], strict=True)
            )
        ratio, other = (left, right) if isinstance(left, Ratio) else (right, left)
        if not isinstance(ratio, Ratio) or len(ratio.terms) != 2 or not is_expression(other):
            return False
        return self.equal(FunctionCall("div", (as_expression(ratio.terms[0]), as_expression(ratio.terms[1]))), other)

    def _same_matrix(self, left: Structure, right: Structure) -> bool:
        rows = []
        for side, other in ((left, right), (right, left)):
            matrix = side if isinstance(side, Matrix) else as_matrix(side)
            if matrix is None and isinstance(side, Bracketed) and side.opening == "(" and side.closing == ")":
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
        sets = [real_set(side, self._effort) for side in (left, right)]
        return sets[0] is not None and sets[1] is not None and same_set(sets[0], sets[1], self.equal)

    def _same_collection(self, left: Structure, right: Structure) -> bool:
        items = []
        for side in (left, right):
            if isinstance(side, Collection):
                items.append(self._distinct(side.items))
            elif isinstance(side, Bracketed) and side.opening == "[" and not any(map(is_expression, side.items)):
                # A Python list of points; [1, 2] of numbers may be an interval.
                items.append(self._distinct(side.items))
            else:
                return False
        return self._same_multiset(items[0], items[1])

    def _distinct(self, items: Sequence[Structure]) -> list[Structure]:
        distinct: list[Structure] = []
        for item in dict.fromkeys(items):
            if not any(self.equal(item, other) for other in distinct):
                distinct.append(item)
        return distinct

    def _same_group(self, left: Bracketed, right: Bracketed) -> bool:
        same_brackets = (left.opening, left.closing) == (right.opening, right.closing)
        return (same_brackets or len(left.items) != 2) and self._each(left.items, right.items)

    # Quantities.

    def _same_quantity(self, left: Structure, right: Structure) -> bool:
        amounts = [side.amount if isinstance(side, Quantity) else as_expression(side) for side in (left, right)]
        units = [side.unit if isinstance(side, Quantity) else None for side in (left, right)]
        if units[0] is not None and units[1] is not None and units[0].dimensions and units[1].dimensions:
            if units[0].dimensions != units[1].dimensions:
                return _degrees_and_radians(units) and self._expressions.same(*map(_in_radians, amounts, units))
            return self._expressions.same(
                *(_scaled(a, unit.scale) for a, unit in zip(amounts, units, strict=True) if unit is not None)
            )
        one, two = (_scaled(a, _pure_scale(unit)) for a, unit in zip(amounts, units, strict=True))
        if self._expressions.same(one, two):
            return True
        # With the unit on one side only, a percentage may stand for its hundredth and degrees for radians.
        for position, unit in enumerate(units):
            factor = _alternative(unit)
            if factor is not None and units[1 - position] is None:
                changed = [one, two]
                changed[position] = FunctionCall("mul", (factor, changed[position]))
                return self._expressions.same(*changed)
        return False


REAL_LINE = Symbol("the real numbers")


def _size(structure: Structure) -> int:
    """How many parts there are to look at, all levels together.

    Raises:
        UndecidedError: more levels than a comparison may go down.
    """
    count, level, levels = 0, [structure], 0
    while level:
        count, levels = count + len(level), levels + 1
        if levels > _MOST_LEVELS:
            raise UndecidedError("too many levels")
        level = [part for each in level for part in parts_of(each)]
    return count


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


# Units.


def _scaled(amount: Expression, scale: Fraction) -> Expression:
    return amount if scale == 1 else FunctionCall("mul", (Number(Numeral(scale)), amount))


def _pure_scale(unit: Unit | None) -> Fraction:
    """5 thousand is 5000 with or without what is counted; 5 km is 5 where the other side has no unit."""
    return unit.scale if unit is not None and _is_count(unit) else Fraction(1)


def _is_count(unit: Unit) -> bool:
    return not unit.dimensions or (
        unit.scale >= 100
        and unit.scale % 100 == 0
        and len(unit.dimensions) == 1
        and unit.dimensions[0][0] not in _MEASURED
    )


_MEASURED = frozenset(("length", "mass", "time", "watt", "joule", "month", "area", "volume"))


def _alternative(unit: Unit | None) -> Expression | None:
    if unit is None or len(unit.dimensions) != 1 or unit.dimensions[0][1] != 1:
        return None
    if unit.dimensions[0][0] == PERCENT:
        return Number(Numeral(Fraction(1, 100)))
    return FunctionCall("div", (PI, integer(180))) if unit.dimensions[0][0] == DEGREE else None


def _degrees_and_radians(units: Sequence[Unit | None]) -> bool:
    names = {unit.dimensions for unit in units if unit is not None}
    return names == {((DEGREE, 1),), (("radian", 1),)}


def _in_radians(amount: Expression, unit: Unit | None) -> Expression:
    factor = _alternative(unit)
    return amount if factor is None else FunctionCall("mul", (factor, amount))
