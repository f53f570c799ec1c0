"""Values of expressions: exact fractions where there are any, else numbers to as many digits as a decision needs.

Every operation is checked before it is done (bits of a power, size of a factorial's argument, magnitude of an
exponential) and its cost is estimated and counted, so that no expression takes long. Nothing looks at a clock: a
verdict is the same on a busy machine.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import mpmath

from answer_equality.expressions import INFINITY, PI, E, Expression, FunctionCall, I, Number, Symbol

_MAX_BITS = 50_000
_MAX_COUNT = 3000
_MAX_DIGITS = 1500
_BASE_DIGITS = 40
_GUARD = 12


class UndefinedError(ArithmeticError):
    """The expression has no value: a division by zero, an infinity in a sum, an unknown function."""


class UndecidedError(ArithmeticError):
    """The value is out of reach: too large to compute, or the comparison has done all the work that it may."""


class Effort:
    """The work that one comparison may do, in steps of about a microsecond each."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def spend(self, steps: int) -> None:
        """Count ``steps`` before they are taken.

        Raises:
            UndecidedError: that is more than is left.
        """
        self._left -= steps
        if self._left < 0:
            raise UndecidedError("too much work")

    @property
    def is_spent(self) -> bool:
        """Whether no work is left."""
        return self._left < 0


def exact(expression: Expression, effort: Effort, at: Mapping[str, Fraction] | None = None) -> Fraction | None:
    """The value as a fraction, None where it is none (or may be none); ``at`` gives values of symbols.

    Raises:
        UndefinedError: a division by zero.
        UndecidedError: the fraction is too large to compute.
    """
    if isinstance(expression, Number):
        return expression.numeral.value
    if isinstance(expression, Symbol):
        return (at or {}).get(expression.name)
    arguments = [exact(argument, effort, at) for argument in expression.arguments]
    if any(argument is None for argument in arguments):
        return None
    return _exact_call(expression.function, [argument for argument in arguments if argument is not None], effort)


def _exact_cost(arguments: list[Fraction]) -> int:
    """Products, quotients and greatest common divisors of long numbers take time that grows with their square."""
    above = sum(argument.numerator.bit_length() for argument in arguments)
    below = sum(argument.denominator.bit_length() for argument in arguments)
    return 5 + above * above // 1_000_000 + above * (below - len(arguments)) // 100_000


def _exact_call(function: str, arguments: list[Fraction], effort: Effort) -> Fraction | None:
    effort.spend(_exact_cost(arguments))
    left, right = arguments[0], arguments[-1]
    if function in ("add", "pm"):
        result = left + right
    elif function in ("sub", "mp"):
        result = left - right
    elif function == "neg":
        result = -left
    elif function == "mul":
        result = left * right
    elif function == "div":
        if right == 0:
            raise UndefinedError("division by zero")
        result = left / right
    elif function == "pow":
        power = _exact_power(left, right, effort)
        if power is None:
            return None
        result = power
    elif function == "root":
        if right.denominator != 1 or not 0 < abs(right) <= _MAX_COUNT:
            raise UndecidedError("root")
        root = _exact_root(left, int(right), effort)
        if root is None:
            return None
        result = root
    elif function == "abs":
        result = abs(left)
    elif function == "factorial":
        count = _count(left)
        effort.spend(count)
        result = Fraction(math.factorial(count))
    elif function == "binomial":
        if left.denominator != 1 or right.denominator != 1 or left < 0:
            return None
        effort.spend(_count(left))
        result = Fraction(math.comb(_count(left), _count(right)) if right >= 0 else 0)
    elif function in ("floor", "ceil"):
        result = Fraction(math.floor(left) if function == "floor" else math.ceil(left))
    elif function in ("gcd", "lcm"):
        if any(argument.denominator != 1 for argument in arguments):
            raise UndefinedError(function)
        # The least common multiple of many long numbers grows with each of them.
        effort.spend(sum(argument.numerator.bit_length() for argument in arguments) ** 2 // 100_000)
        result = Fraction((math.gcd if function == "gcd" else math.lcm)(*(int(argument) for argument in arguments)))
    elif function in ("max", "min"):
        result = (max if function == "max" else min)(arguments)
    elif function == "log" and len(arguments) == 1 and left == 1:
        result = Fraction(0)
    elif function == "exp" and left == 0:
        result = Fraction(1)
    else:
        return None
    if max(result.numerator.bit_length(), result.denominator.bit_length()) > _MAX_BITS:
        raise UndecidedError("too many digits")
    return result


def _count(value: Fraction) -> int:
    if value.denominator != 1 or value < 0:
        raise UndefinedError("no natural number")
    if value > _MAX_COUNT:
        raise UndecidedError("too large a count")
    return int(value)


def _exact_power(base: Fraction, exponent: Fraction, effort: Effort) -> Fraction | None:
    if base == 0:
        if exponent <= 0:
            raise UndefinedError("0 to the power 0 or less")
        return base
    if abs(base) == 1 and exponent.denominator == 1:
        return base if exponent.numerator % 2 else Fraction(1)
    if abs(exponent) > _MAX_BITS:
        raise UndecidedError("too large an exponent")
    if exponent.denominator != 1:
        if base < 0 or exponent.denominator > _MAX_COUNT:
            return None
        root = _exact_root(base, exponent.denominator, effort)
        return None if root is None else _exact_power(root, Fraction(exponent.numerator), effort)
    bits = math.log2(max(abs(base.numerator), base.denominator))
    if bits * abs(exponent) > _MAX_BITS:
        raise UndecidedError("too large a power")
    effort.spend(int(bits * abs(exponent)) ** 2 // 1_000_000)
    return base ** int(exponent)


def _exact_root(value: Fraction, degree: int, effort: Effort) -> Fraction | None:
    """The real root where it is a fraction; of a negative number only for odd degrees."""
    if value < 0:
        root = _exact_root(-value, degree, effort) if degree % 2 else None
        return None if root is None else -root
    if degree < 0:
        if value == 0:
            raise UndefinedError("division by zero")
        return _exact_root(1 / value, -degree, effort)
    above, below = (_integer_root(part, degree, effort) for part in (value.numerator, value.denominator))
    return None if above is None or below is None else Fraction(above, below)


def _integer_root(value: int, degree: int, effort: Effort) -> int | None:
    if value <= 1 or degree == 1:
        return value
    effort.spend(value.bit_length() ** 2 // 500_000)
    if degree == 2:
        root = math.isqrt(value)
    elif value.bit_length() > 4000:
        return None
    else:
        root = 1 << -(-value.bit_length() // degree)
        while True:
            effort.spend(5 + value.bit_length() // 100)
            following = ((degree - 1) * root + value // root ** (degree - 1)) // degree
            if following >= root:
                break
            root = following
    return root if root**degree == value else None


class Evaluator:
    """Numeric values at one point, to a number of digits; remembers the largest and smallest magnitudes met."""

    def __init__(self, digits: int, point: Mapping[str, Any], effort: Effort) -> None:
        self._point, self._effort = point, effort
        self._digits = digits
        self.reach = 0

    def value(self, expression: Expression) -> Any:
        """The value as an mpmath number.

        Raises:
            UndefinedError, UndecidedError: as of ``exact``.
        """
        with mpmath.workdps(self._digits):
            try:
                return self._value(expression)
            except (ZeroDivisionError, ValueError, TypeError) as error:
                raise UndefinedError(str(error)) from None
            except (OverflowError, mpmath.libmp.NoConvergence) as error:
                raise UndecidedError(str(error)) from None

    def _value(self, expression: Expression) -> Any:
        if isinstance(expression, Number):
            return self._noted(self._converted(expression.numeral.value))
        if isinstance(expression, Symbol):
            if expression in (PI, E, I):
                return {PI: mpmath.pi, E: mpmath.e, I: mpmath.mpc(0, 1)}[expression] * 1
            if expression == INFINITY or expression.name not in self._point:
                raise UndefinedError(expression.name)
            return self._point[expression.name]
        known = exact(expression, self._effort) if _is_small(expression) else None
        if known is not None:
            return self._noted(self._converted(known))
        value = self._call(expression.function, [self._value(each) for each in expression.arguments])
        # A sum that cancels to (almost) nothing says nothing of the magnitudes that went into it.
        return self._noted(value) if expression.function in _OF_THEIR_OWN_SIZE else value

    def _converted(self, value: Fraction) -> Any:
        self._effort.spend(2 + (value.numerator.bit_length() + value.denominator.bit_length()) // 10)
        return mpmath.mpf(value.numerator) / value.denominator

    def _noted(self, value: Any) -> Any:
        size = abs(value)
        if size:
            if not mpmath.isfinite(size):
                raise UndefinedError("infinite")
            self.reach = max(self.reach, abs(int(mpmath.mag(size) * 0.302)))
            if self.reach > _MAX_DIGITS:
                raise UndecidedError("too large or too small")
        return value

    def _call(self, function: str, arguments: list[Any]) -> Any:
        left, right = arguments[0], arguments[-1]
        simple = _OPERATIONS.get(function)
        self._effort.spend(self._cost(function, arguments))
        if simple is not None:
            return simple(left, right)
        if function == "div":
            if abs(right) == 0:
                raise UndefinedError("division by zero")
            return left / right
        if function in ("pow", "root"):
            return self._power(left, right if function == "pow" else 1 / right, is_root=function == "root")
        if function in ("exp", "sinh", "cosh", "tanh"):
            self._check_exponent(2 * left if function == "tanh" else left)
        if function in ("factorial", "binomial") and max(abs(left), abs(right)) > 1000:
            raise UndecidedError("too large a count")
        if function == "log":
            if left == 0 or (len(arguments) == 2 and right in (0, 1)):
                raise UndefinedError("logarithm")
            return mpmath.log(left) if len(arguments) == 1 else mpmath.log(left) / mpmath.log(right)
        if function in ("floor", "ceil"):
            nearest = mpmath.nint(mpmath.re(left))
            if abs(left - nearest) < mpmath.mpf(10) ** (_GUARD - self._digits):
                return nearest
        evaluate = _FUNCTIONS.get(function)
        if evaluate is None or len(arguments) != (2 if function == "binomial" else 1):
            raise UndefinedError(function)
        return evaluate(*arguments)

    def _cost(self, function: str, arguments: list[Any]) -> int:
        if function in _OPERATIONS or function == "div":
            return 10 + self._digits // 20
        # A sine of 10^1000 needs a thousand digits more of pi.
        magnitudes = [abs(int(mpmath.mag(abs(argument)) * 0.302)) for argument in arguments if argument != 0]
        digits = self._digits + max(magnitudes, default=0)
        if function in ("factorial", "binomial"):
            return 200 + digits**3 // 250
        return 50 + digits**2 // 100

    def _check_exponent(self, exponent: Any) -> None:
        size = abs(mpmath.re(exponent)) * 0.4343
        if size > _MAX_DIGITS:
            raise UndecidedError("too large an exponential")
        self.reach = max(self.reach, int(size))

    def _power(self, base: Any, exponent: Any, is_root: bool) -> Any:
        if abs(base) == 0:
            if mpmath.re(exponent) <= 0:
                raise UndefinedError("0 to the power 0 or less")
            return base
        self._check_exponent(exponent * mpmath.log(abs(base)))
        real = mpmath.im(base) == 0 and mpmath.re(base) < 0
        if is_root and real and mpmath.nint(1 / exponent) % 2 == 1 and mpmath.im(exponent) == 0:
            return -(mpmath.power(-mpmath.re(base), exponent))
        return mpmath.power(base, exponent)


_OPERATIONS: Mapping[str, Any] = {
    "add": lambda left, right: left + right,
    "pm": lambda left, right: left + right,
    "sub": lambda left, right: left - right,
    "mp": lambda left, right: left - right,
    "mul": lambda left, right: left * right,
    "neg": lambda left, _: -left,
    "abs": lambda left, _: abs(left),
}
_FUNCTIONS: Mapping[str, Any] = {
    **{
        name: getattr(mpmath, name)
        for name in ("sin", "cos", "tan", "sec", "csc", "cot", "exp", "sinh", "cosh", "tanh")
    },
    **{"arcsin": mpmath.asin, "arccos": mpmath.acos, "arctan": mpmath.atan},
    **{name: getattr(mpmath, name) for name in ("asinh", "acosh", "atanh", "factorial", "binomial", "floor", "ceil")},
}


_OF_THEIR_OWN_SIZE = frozenset(("pow", "root", "exp", "sinh", "cosh", "factorial", "binomial"))


def _is_small(expression: FunctionCall) -> bool:
    """May the expression be worth an exact look before it is evaluated numerically?"""
    return expression.function in ("pow", "factorial", "binomial", "floor", "ceil", "gcd", "lcm", "max", "min", "root")


def digits_for(reach: int) -> int:
    """How many digits tell two values apart whose terms reach over ``reach`` decimal magnitudes."""
    digits = _BASE_DIGITS + 3 * reach
    if digits > _MAX_DIGITS:
        raise UndecidedError("too many digits needed")
    return digits


def same_value(left: Any, right: Any, digits: int, reach: int) -> bool:
    """Do two values of ``digits`` digits, made of terms of up to 10^``reach``, agree but for rounding?"""
    with mpmath.workdps(digits):
        size = max(abs(left), abs(right), mpmath.mpf(10) ** reach)
        return bool(abs(left - right) <= size * mpmath.mpf(10) ** (_GUARD - digits))


_TRIAL_SCALES = (Fraction(1), Fraction(3), Fraction(7), Fraction(1, 9), Fraction(110), Fraction(17), Fraction(1, 31))


def sample_point(names: frozenset[str], trial: int) -> dict[str, Fraction]:
    """A value for each symbol: unrelated fractions of several sizes, positive in even trials, negative in odd ones."""
    scale = _TRIAL_SCALES[trial % len(_TRIAL_SCALES)]
    point = {}
    for name in names:
        seed = int.from_bytes(hashlib.sha256(f"{trial} {name}".encode()).digest()[:4], "big")
        size = Fraction(seed % 9973 + 4000, 4999) * scale
        point[name] = -size if trial % 2 and (trial == 1 or seed & 1) else size
    return point


def whole_point(names: frozenset[str], trial: int) -> dict[str, Fraction]:
    """A natural number for each symbol."""
    return {name: Fraction(1 + trial + 3 * index) for index, name in enumerate(sorted(names))}
