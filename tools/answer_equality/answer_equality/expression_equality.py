"""Are two expressions equal? Exactly where both are fractions, else to as many digits as the terms need.

A decimal may stand for a value that no decimal states exactly; docs/grader.md says with how many digits.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import mpmath

from answer_equality.expressions import (
    INFINITY,
    Expression,
    FunctionCall,
    I,
    Number,
    Relation,
    Structure,
    Symbol,
    integer,
    symbols_of,
)
from answer_equality.tokens import Numeral
from answer_equality.values import (
    Effort,
    Evaluator,
    UndecidedError,
    UndefinedError,
    digits_for,
    exact,
    same_value,
    sample_point,
    whole_point,
)

_TRIALS = 5
_ROUNDED_DIGITS = 6
# 3.14159 and 1.41421 are what is written where an irrational value is approximated.
_ROUNDED_DIGITS_OF_IRRATIONALS = 8
_LONG_DIGITS = 10
_FLOAT_DIGITS = 15
_MOST_PLACES = 4000
_FLOAT_ERROR = Fraction(1, 10**15)


class ExpressionEquality:
    """Comparisons of expressions with one effort; all raise UndefinedError and UndecidedError as ``exact``."""

    def __init__(self, effort: Effort) -> None:
        self._effort = effort

    def same(self, left: Expression, right: Expression) -> bool:
        """Whether two expressions are equal for every value of their names."""
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

    def near(self, exactly: Structure, approximation: Structure) -> bool:
        """Whether the second is within 2 % of the first; False where one has no value."""
        try:
            one, two = (self._number(side) for side in (exactly, approximation))
        except (UndefinedError, TypeError):
            return False
        return bool(abs(one - two) <= abs(one) / 50)

    def proportional(self, left: Relation, right: Relation, positive: bool) -> bool:
        """Is one side's difference the other's times a constant?"""
        differences = []
        for relation in (left, right):
            one, two = relation.sides
            if not (
                isinstance(one, (Number, Symbol, FunctionCall)) and isinstance(two, (Number, Symbol, FunctionCall))
            ):
                return False
            differences.append(FunctionCall("sub", (one, two)))
        if not symbols_of(differences[1]) or symbols_of(differences[0]) != symbols_of(differences[1]):
            return False
        point = sample_point(symbols_of(differences[1]), 0)
        scales = [self._at(difference, point)[0] for difference in differences]
        if min(abs(scale) for scale in scales) < 1e-20:
            return False
        ratio = FunctionCall("div", (_substituted(differences[0], point), _substituted(differences[1], point)))
        if positive:
            value = self._number(ratio)
            if not (mpmath.im(value) == 0 and mpmath.re(value) > 0):
                return False
        return self.same(differences[0], FunctionCall("mul", (ratio, differences[1])))

    def _require_value(self, expression: Expression) -> None:
        exact(expression, self._effort)

    def _same_constant(self, left: Expression, right: Expression) -> bool:
        values = [exact(side, self._effort) for side in (left, right)]
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
            if decimal.digits < _ROUNDED_DIGITS_OF_IRRATIONALS:
                return False
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

    def _number(self, side: Structure) -> Any:
        if not isinstance(side, (Number, Symbol, FunctionCall)):
            raise TypeError("no expression")
        return Evaluator(40, {}, self._effort).value(side)

    def _at(self, expression: Expression, point: dict[str, Fraction], digits: int = 50) -> tuple[Any, int]:
        with mpmath.workdps(digits):
            values = {name: mpmath.mpf(value.numerator) / value.denominator for name, value in point.items()}
            evaluator = Evaluator(digits, values, self._effort)
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
                if self._effort.is_spent:
                    raise
                continue
            if verdict is False:
                return False
            agreed += verdict is True
            if agreed >= _TRIALS:
                return True
        return agreed >= 3


def _complex(one: Any, two: Any, left: Expression, right: Expression) -> bool:
    return bool(mpmath.im(one) != 0 or mpmath.im(two) != 0) and not (_has(left, I) or _has(right, I))


def _is_infinite(expression: Expression) -> bool:
    if isinstance(expression, FunctionCall):
        return any(_is_infinite(argument) for argument in expression.arguments)
    return expression == INFINITY


def _alternates(expression: Expression) -> bool:
    """Does it have a power like (-1)^n, which means something only for whole n?"""
    if not isinstance(expression, FunctionCall):
        return False
    if expression.function == "pow" and symbols_of(expression.arguments[1]) and not symbols_of(expression.arguments[0]):
        base = expression.arguments[0]
        if isinstance(base, FunctionCall) and base.function == "neg":
            return True
    return any(_alternates(argument) for argument in expression.arguments)


def _has(expression: Expression, symbol: Symbol) -> bool:
    if isinstance(expression, FunctionCall):
        return any(_has(argument, symbol) for argument in expression.arguments)
    return expression == symbol


def _substituted(expression: Expression, point: dict[str, Fraction]) -> Expression:
    if isinstance(expression, Symbol) and expression.name in point:
        return Number(Numeral(point[expression.name]))
    if isinstance(expression, FunctionCall):
        return FunctionCall(expression.function, tuple(_substituted(each, point) for each in expression.arguments))
    return expression


def _literal(expression: Expression) -> Numeral | None:
    """The decimal that the expression is (with sign, power of ten or scale), None if it is none."""
    if isinstance(expression, Number):
        return expression.numeral if expression.numeral.step is not None else None
    if not isinstance(expression, FunctionCall):
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
    if isinstance(expression, FunctionCall) and expression.function == "pow" and expression.arguments[0] == integer(10):
        exponent = expression.arguments[1]
        sign = -1 if isinstance(exponent, FunctionCall) and exponent.function == "neg" else 1
        inner = exponent.arguments[0] if isinstance(exponent, FunctionCall) and sign < 0 else exponent
        if isinstance(inner, Number) and inner.numeral.value.denominator == 1 and inner.numeral.value < 400:
            return Fraction(10) ** (sign * int(inner.numeral.value))
    return None


def _terminates(value: Fraction) -> bool:
    below = value.denominator
    if below.bit_length() > _MOST_PLACES:
        return True  # beyond what a decimal of this length can be rounded from: it must be stated exactly
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
    return (
        decimal.digits <= 17 and max(abs(value), abs(decimal.value)) < 10**300 and float(decimal.value) != float(value)
    )


def _same_decimals(one: Numeral, two: Numeral) -> bool:
    """Is it the same number, or does one of at least ten digits round to the other of at least six?"""
    if one.value == two.value:
        return True
    short, long = (one, two) if one.digits < two.digits else (two, one)
    if long.digits >= _LONG_DIGITS > short.digits >= _ROUNDED_DIGITS or long.digits >= _FLOAT_DIGITS:
        return _is_rounded(short, long.value) or _is_float_noise(long, short.value)
    return False
