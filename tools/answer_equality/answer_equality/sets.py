"""Inequalities, intervals and their unions as sets of real numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from answer_equality.expressions import (
    INFINITY,
    REALS,
    Bracketed,
    Collection,
    Combination,
    Expression,
    FunctionCall,
    Listing,
    Number,
    Relation,
    Structure,
    Symbol,
    symbols_of,
)
from answer_equality.tokens import Numeral
from answer_equality.values import Effort, Evaluator, UndefinedError, exact

_MINUS_INFINITY = FunctionCall("neg", (INFINITY,))
_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "!=": "!=", "=": "="}


@dataclass(frozen=True)
class SetPiece:
    """One interval; a point has two closed ends that are equal."""

    low: Expression
    low_closed: bool
    high: Expression
    high_closed: bool


@dataclass(frozen=True)
class RealSet:
    """Intervals in ascending order, none touching the next; ``variable`` where an inequality named one."""

    pieces: tuple[SetPiece, ...]
    variable: str | None = None


def real_set(structure: Structure, effort: Effort) -> RealSet | None:
    """The set of reals that ``structure`` describes, None where it describes none (a point (1, 2) may).

    Raises:
        UndefinedError, UndecidedError: an end has no value, or none within reach.
    """
    if structure == REALS:
        return RealSet((SetPiece(_MINUS_INFINITY, False, INFINITY, False),))
    if isinstance(structure, Bracketed):
        return _interval(structure, effort)
    if isinstance(structure, Collection):
        points = [item for item in structure.items if isinstance(item, (Number, Symbol, FunctionCall))]
        if len(points) < len(structure.items):
            return None
        return _merged([SetPiece(point, True, point, True) for point in points], None, effort)
    if isinstance(structure, Relation):
        return _solved(structure, effort)
    if isinstance(structure, Listing):
        parts = [real_set(item, effort) for item in structure.items]
        if any(part is None or part.variable is None for part in parts):
            return None
        known = [part for part in parts if part is not None]
        common = _folded(known, False, effort)
        # A comma is an "and", unless that leaves nothing.
        either = structure.word == "or" or (structure.word == "," and common is not None and not common.pieces)
        return _folded(known, True, effort) if either else common
    if isinstance(structure, Combination):
        left, right = real_set(structure.left, effort), real_set(structure.right, effort)
        if left is None or right is None:
            return None
        if structure.operator == "setminus":
            right = _complement(right)
        return _folded([left, right], structure.operator == "cup", effort)
    return None


def _interval(group: Bracketed, effort: Effort) -> RealSet | None:
    if len(group.items) != 2 or not all(isinstance(item, (Number, Symbol, FunctionCall)) for item in group.items):
        return None
    low, high = group.items
    assert isinstance(low, (Number, Symbol, FunctionCall)) and isinstance(high, (Number, Symbol, FunctionCall))
    low_closed, high_closed = group.opening == "[", group.closing == "]"
    order = _compare(low, high, effort)
    if order > 0 or (order == 0 and not (low_closed and high_closed)):
        return None
    return RealSet((SetPiece(low, low_closed and low != _MINUS_INFINITY, high, high_closed and high != INFINITY),))


def _solved(relation: Relation, effort: Effort) -> RealSet | None:
    """The solutions of a chain of inequalities in one variable that is linear in every link."""
    if "~" in relation.operators:
        return None
    sets = []
    for left, operator, right in zip(relation.sides, relation.operators, relation.sides[1:], strict=False):
        if not (isinstance(left, (Number, Symbol, FunctionCall)) and isinstance(right, (Number, Symbol, FunctionCall))):
            return None
        link = _link(left, operator, right, effort)
        if link is None:
            return None
        sets.append(link)
    return _folded(sets, False, effort)


def _link(left: Expression, operator: str, right: Expression, effort: Effort) -> RealSet | None:
    names = symbols_of(left) | symbols_of(right)
    if len(names) != 1:
        return None
    if isinstance(left, FunctionCall) and left.function == "abs" and not symbols_of(right):
        return _absolute(left.arguments[0], operator, right, effort)
    (name,) = names
    if left == Symbol(name) and not symbols_of(right):
        bound = right
    elif right == Symbol(name) and not symbols_of(left):
        bound, operator = left, _FLIPPED[operator]
    else:
        difference = FunctionCall("sub", (left, right))
        values = [exact(difference, effort, {name: Fraction(at)}) for at in (0, 1, 3)]
        if values[0] is None or values[1] is None or values[2] is None:
            return None
        slope = values[1] - values[0]
        if slope == 0 or values[2] - values[0] != 3 * slope:
            return None
        bound = Number(Numeral(-values[0] / slope))
        operator = _FLIPPED[operator] if slope < 0 else operator
    below = SetPiece(_MINUS_INFINITY, False, bound, operator == "<=")
    above = SetPiece(bound, operator == ">=", INFINITY, False)
    pieces = {
        **{"<": (below,), "<=": (below,), ">": (above,), ">=": (above,), "!=": (below, above)},
        "=": (SetPiece(bound, True, bound, True),),
    }[operator]
    return RealSet(pieces, name)


def _absolute(inner: Expression, operator: str, bound: Expression, effort: Effort) -> RealSet | None:
    """|a| < b is -b < a < b, and |a| > b is a < -b or a > b."""
    value = exact(bound, effort)
    if operator not in ("<", "<=", ">", ">=") or value is None or value < 0:
        return None
    upper = _link(inner, operator, bound, effort)
    lower = _link(inner, _FLIPPED[operator], FunctionCall("neg", (bound,)), effort)
    if upper is None or lower is None:
        return None
    return _folded([lower, upper], operator in (">", ">="), effort)


def _folded(sets: list[RealSet], union: bool, effort: Effort) -> RealSet | None:
    variables = {part.variable for part in sets if part.variable is not None}
    if len(variables) > 1:
        return None
    variable = next(iter(variables), None)
    if union:
        return _merged([piece for part in sets for piece in part.pieces], variable, effort)
    whole = sets[0]
    for part in sets[1:]:
        common = [_common(one, two, effort) for one in whole.pieces for two in part.pieces]
        whole = _merged([piece for piece in common if piece is not None], variable, effort)
    return RealSet(whole.pieces, variable)


def _common(one: SetPiece, two: SetPiece, effort: Effort) -> SetPiece | None:
    order = _compare(one.low, two.low, effort)
    low, low_closed = (one.low, one.low_closed) if order > 0 else (two.low, two.low_closed)
    if order == 0:
        low_closed = one.low_closed and two.low_closed
    order = _compare(one.high, two.high, effort)
    high, high_closed = (one.high, one.high_closed) if order < 0 else (two.high, two.high_closed)
    if order == 0:
        high_closed = one.high_closed and two.high_closed
    order = _compare(low, high, effort)
    if order > 0 or (order == 0 and not (low_closed and high_closed)):
        return None
    return SetPiece(low, low_closed, high, high_closed)


def _complement(whole: RealSet) -> RealSet:
    low, closed = _MINUS_INFINITY, False
    pieces = []
    for piece in whole.pieces:
        if piece.low != _MINUS_INFINITY:
            pieces.append(SetPiece(low, closed, piece.low, not piece.low_closed))
        low, closed = piece.high, not piece.high_closed  # type: ignore[assignment]
    if low != INFINITY:  # type: ignore[comparison-overlap]
        pieces.append(SetPiece(low, closed, INFINITY, False))
    return RealSet(tuple(pieces), whole.variable)


def _merged(pieces: list[SetPiece], variable: str | None, effort: Effort) -> RealSet:
    """In ascending order, with pieces joined that overlap or touch."""
    ordered: list[SetPiece] = []
    for piece in pieces:
        position = 0
        while position < len(ordered) and _starts_before(ordered[position], piece, effort):
            position += 1
        ordered.insert(position, piece)
    joined: list[SetPiece] = []
    for piece in ordered:
        last = joined[-1] if joined else None
        order = -1 if last is None else _compare(last.high, piece.low, effort)
        if last is None or order < 0 or (order == 0 and not (last.high_closed or piece.low_closed)):
            joined.append(piece)
            continue
        further = _compare(piece.high, last.high, effort)
        high, closed = (piece.high, piece.high_closed) if further > 0 else (last.high, last.high_closed)
        if further == 0:
            closed = piece.high_closed or last.high_closed
        joined[-1] = SetPiece(last.low, last.low_closed, high, closed)
    return RealSet(tuple(joined), variable)


def _starts_before(one: SetPiece, two: SetPiece, effort: Effort) -> bool:
    order = _compare(one.low, two.low, effort)
    return order < 0 or (order == 0 and one.low_closed)


def _compare(left: Expression, right: Expression, effort: Effort) -> int:
    """-1, 0 or 1 as ``left`` is below, at or above ``right``."""
    effort.spend(5)
    if left == right:
        return 0
    if left == _MINUS_INFINITY or right == INFINITY:
        return -1
    if left == INFINITY or right == _MINUS_INFINITY:
        return 1
    one, two = exact(left, effort), exact(right, effort)
    if one is not None and two is not None:
        return (one > two) - (one < two)
    evaluator = Evaluator(60, {}, effort)
    difference = evaluator.value(FunctionCall("sub", (left, right)))
    if abs(difference.imag) > 1e-30:
        raise UndefinedError("no real number")
    return 0 if abs(difference) < 1e-40 else 1 if difference.real > 0 else -1


def same_set(left: RealSet, right: RealSet, equal: Callable[[Any, Any], bool]) -> bool:
    """Do both consist of the same intervals, in the same variable where both name one?"""
    if left.variable and right.variable and left.variable != right.variable:
        return False
    return len(left.pieces) == len(right.pieces) and all(
        one.low_closed == two.low_closed
        and one.high_closed == two.high_closed
        and equal(one.low, two.low)
        and equal(one.high, two.high)
        for one, two in zip(left.pieces, right.pieces, strict=True)
    )
