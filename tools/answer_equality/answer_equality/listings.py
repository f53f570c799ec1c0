"""What lists, equations and \\pm state: their values, by name, in order or without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from answer_equality.expressions import (
    INFINITY,
    PI,
    Bracketed,
    Collection,
    E,
    Expression,
    FunctionCall,
    Listing,
    Number,
    Quantity,
    Relation,
    Structure,
    Symbol,
    is_expression,
    symbols_of,
)
from answer_equality.values import UndefinedError


def as_expression(structure: Structure) -> Expression:
    """``structure`` as an expression.

    Raises:
        UndefinedError: it is none.
    """
    if isinstance(structure, (Number, Symbol, FunctionCall)):
        return structure
    raise UndefinedError("no expression")


def simplified(structure: Structure) -> Structure:
    """With \\pm written out, and a single item in brackets as the item."""
    if isinstance(structure, (FunctionCall, Quantity, Relation)) and _has_sign_choice(structure):
        # x differs from both, or is one of the two.
        word = "and" if isinstance(structure, Relation) and "!=" in structure.operators else "or"
        return Listing((_with_sign(structure, 1), _with_sign(structure, -1)), word)
    if isinstance(structure, (Listing, Collection)) and any(_has_sign_choice(item) for item in structure.items):
        items: list[Structure] = []
        for item in structure.items:
            if _has_sign_choice(item):
                items += [_with_sign(item, 1), _with_sign(item, -1)]
            else:
                items.append(item)
        return replace(structure, items=tuple(items))
    if isinstance(structure, Bracketed) and len(structure.items) == 1 and is_expression(structure.items[0]):
        return structure.items[0]
    return structure


def _has_sign_choice(structure: Structure) -> bool:
    if isinstance(structure, FunctionCall):
        return structure.function in ("pm", "mp") or any(_has_sign_choice(each) for each in structure.arguments)
    if isinstance(structure, Quantity):
        return _has_sign_choice(structure.amount)
    return isinstance(structure, Relation) and any(_has_sign_choice(side) for side in structure.sides)


def _with_sign(structure: Structure, sign: int) -> Structure:
    if isinstance(structure, FunctionCall):
        function = structure.function
        if function in ("pm", "mp"):
            function = "add" if (function == "pm") == (sign > 0) else "sub"
        return FunctionCall(function, tuple(as_expression(_with_sign(each, sign)) for each in structure.arguments))
    if isinstance(structure, Quantity):
        return Quantity(as_expression(_with_sign(structure.amount, sign)), structure.unit)
    if isinstance(structure, Relation):
        return Relation(tuple(_with_sign(side, sign) for side in structure.sides), structure.operators)
    return structure


def is_name(side: Structure) -> bool:
    """Whether it only names what the other side of an equation says: x, f(x), (x, y)."""
    if isinstance(side, Symbol):
        return side not in (E, PI, INFINITY)
    if isinstance(side, FunctionCall):
        if side.function == "abs":
            return isinstance(side.arguments[0], Symbol) and len(side.arguments[0].name) > 1
        return side.function.startswith("unknown ")
    return isinstance(side, Bracketed) and all(isinstance(item, Symbol) for item in side.items)


def names_of(relation: Relation) -> list[Structure]:
    """The sides that name what the others state: x in x = 5, f(x) in f(x) = x."""
    names = [side for side in relation.sides if is_name(side)]
    return [side for side in names if isinstance(side, FunctionCall)] or names


def with_point_unnamed(structure: Structure, other: Structure) -> Structure:
    """P(2, 3) as the point (2, 3) where ``other`` is a point."""
    named = (
        isinstance(structure, FunctionCall)
        and structure.function.startswith("unknown ")
        and len(structure.arguments) > 1
    )
    if (
        isinstance(structure, FunctionCall)
        and named
        and structure.function[-1].isupper()
        and isinstance(other, Bracketed)
    ):
        return Bracketed("(", ")", structure.arguments)
    return structure


def is_asked_for(side: Structure) -> bool:
    """m + n or 100m + n: what a question asks for the value of. Not 2x or x - 1, which would have to be solved."""
    return is_expression(side) and len(symbols_of(as_expression(side))) > 1


def has_names(sides: Sequence[Structure]) -> bool:
    """Whether one of the sides has a symbol, or is no expression."""
    return any(not is_expression(side) or symbols_of(as_expression(side)) for side in sides)


def same_name(one: Structure, two: Structure) -> bool:
    """Whether both name the same thing; y and f(x) do."""
    if one == two:
        return True
    functions = [side for side in (one, two) if isinstance(side, FunctionCall)]
    return len(functions) == 1 and Symbol("y") in (one, two) and functions[0].function == "unknown f"


def has_relations(structure: Structure) -> bool:
    """Whether it is a list with an equation or inequality in it."""
    return isinstance(structure, Listing) and any(isinstance(item, Relation) for item in structure.items)


def assignment(structure: Structure) -> dict[str, Structure] | None:
    """{"x": 1, "y": 2} of x = 1, y = 2 and of (x, y) = (1, 2)."""
    result: dict[str, Structure] = {}
    if isinstance(structure, Relation) and structure.operators == ("=",):
        names, values = structure.sides
        if not (
            isinstance(names, Bracketed) and isinstance(values, Bracketed) and len(names.items) == len(values.items)
        ):
            return None
        for name, value in zip(names.items, values.items, strict=True):
            if not isinstance(name, Symbol):
                return None
            result[name.name] = value
        return result
    if not isinstance(structure, Listing) or structure.word == "or":
        return None
    for item in structure.items:
        if not (isinstance(item, Relation) and item.operators == ("=",) and isinstance(item.sides[0], Symbol)):
            return None
        result[item.sides[0].name] = item.sides[1]
    several = len({name.partition("_")[0] for name in result}) == len(result) == len(structure.items)
    return result if several else None


def items_of(structure: Structure) -> list[Structure] | None:
    """The items of what has no order: a listing, a set, a Python list against a listing."""
    if isinstance(structure, Listing):
        items: list[Structure] = []
        base: str | None = None
        for index, item in enumerate(structure.items):
            if isinstance(item, Relation) and set(item.operators) == {"="} and is_name(item.sides[0]):
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
    if isinstance(structure, Bracketed) and structure.opening + structure.closing == "[]":
        return list(structure.items)
    return None


def items_in_order(structure: Structure) -> Sequence[Structure] | None:
    """Items whose order counts: those of brackets, or of a list without "or"; None otherwise."""
    if isinstance(structure, Bracketed):
        return structure.items
    return structure.items if isinstance(structure, Listing) and structure.word != "or" else None


def with_less(relation: Relation) -> Relation:
    """The inequality turned so that it says "less"; an equation stays."""
    if relation.operators[0] in (">", ">="):
        flipped = {">": "<", ">=": "<="}[relation.operators[0]]
        return Relation((relation.sides[1], relation.sides[0]), (flipped,))
    return relation
