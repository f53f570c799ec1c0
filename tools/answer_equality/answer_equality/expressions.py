"""What an answer is read into: expressions (numbers, symbols, calls) and the structures that are made of them."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from answer_equality.tokens import Numeral
from answer_equality.units import Unit


@dataclass(frozen=True)
class Number:
    """A number as written."""

    numeral: Numeral


@dataclass(frozen=True)
class Symbol:
    """A variable or a name, subscript included; \\pi, e, i and \\infty are symbols too."""

    name: str


@dataclass(frozen=True)
class FunctionCall:
    """An operation (add, mul, div, neg, pow, ...) or function with its arguments."""

    function: str
    arguments: tuple[Expression, ...]


Expression = Number | Symbol | FunctionCall


@dataclass(frozen=True)
class Quantity:
    """An expression with a unit."""

    amount: Expression
    unit: Unit


@dataclass(frozen=True)
class Bracketed:
    """What stands in brackets, in order: a tuple, a point, an interval or a Python list."""

    opening: str
    closing: str
    items: tuple[Structure, ...]


@dataclass(frozen=True)
class Collection:
    """A set in braces."""

    items: tuple[Structure, ...]


@dataclass(frozen=True)
class Listing:
    """Several answers side by side; ``word`` is "and" or "or" where one such word stood between them, else ","."""

    items: tuple[Structure, ...]
    word: str = ","


@dataclass(frozen=True)
class Matrix:
    """Rows of expressions."""

    rows: tuple[tuple[Structure, ...], ...]


@dataclass(frozen=True)
class Combination:
    """A union, intersection or difference of two sets; ``operator`` is cup, cap or setminus."""

    operator: str
    left: Structure
    right: Structure


@dataclass(frozen=True)
class Relation:
    """A chain of sides with a relation between each two: = != < <= > >= ~ (approximately)."""

    sides: tuple[Structure, ...]
    operators: tuple[str, ...]


@dataclass(frozen=True)
class Ratio:
    """a : b : c."""

    terms: tuple[Structure, ...]


@dataclass(frozen=True)
class Residue:
    """A value modulo another."""

    value: Expression
    modulus: Expression


@dataclass(frozen=True)
class Text:
    """Words, or anything that is no expression."""

    words: str


Structure = (
    Number
    | Symbol
    | FunctionCall
    | Quantity
    | Bracketed
    | Collection
    | Listing
    | Matrix
    | Combination
    | Relation
    | Ratio
    | Residue
    | Text
)

INFINITY = Symbol("infinity")
PI, E, I = Symbol("pi"), Symbol("e"), Symbol("i")
CONSTANTS = frozenset((INFINITY, PI, E, I))
REALS = Symbol("the real numbers")


def integer(value: int) -> Number:
    """The exact number ``value``."""
    return Number(Numeral(Fraction(value)))


def is_expression(structure: Structure) -> bool:
    """Is it a number, symbol or call (and nothing that is made of several)?"""
    return isinstance(structure, (Number, Symbol, FunctionCall))


def parts_of(structure: Structure) -> tuple[Structure, ...]:
    """What ``structure`` is directly made of."""
    if isinstance(structure, FunctionCall):
        return structure.arguments
    if isinstance(structure, (Bracketed, Collection, Listing)):
        return structure.items
    if isinstance(structure, Quantity):
        return (structure.amount,)
    if isinstance(structure, Relation):
        return structure.sides
    if isinstance(structure, Ratio):
        return structure.terms
    if isinstance(structure, Matrix):
        return tuple(item for row in structure.rows for item in row)
    if isinstance(structure, Combination):
        return (structure.left, structure.right)
    return (structure.value, structure.modulus) if isinstance(structure, Residue) else ()


def symbols_of(expression: Expression) -> frozenset[str]:
    """The names of the variables in it."""
    if isinstance(expression, Symbol):
        return frozenset() if expression in CONSTANTS else frozenset((expression.name,))
    if isinstance(expression, FunctionCall):
        own = frozenset((expression.function,)) if expression.function.startswith("unknown ") else frozenset()
        return own.union(*(symbols_of(argument) for argument in expression.arguments))
    return frozenset()
