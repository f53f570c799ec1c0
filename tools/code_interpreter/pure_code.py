"""Whether what a piece of Python prints depends on nothing but itself, as far as reading it tells."""

from __future__ import annotations

import ast

LONGEST = 20_000
"""Characters of code that are looked at; longer code counts as impure."""

_MODULES = {
    *("bisect", "cmath", "collections", "copy", "dataclasses", "decimal", "enum", "fractions", "functools", "heapq"),
    *("itertools", "json", "math", "numbers", "operator", "re", "statistics", "string", "textwrap", "typing"),
}
"""Those that neither read anything nor run texts as code, as all of sympy does, which takes texts for formulas."""

_NAMES = {
    # What reads the world, runs texts as code, or finds attributes by names that are texts; what depends on an address.
    *("breakpoint", "compile", "delattr", "eval", "exec", "getattr", "globals", "help", "id", "input", "locals"),
    *("open", "setattr", "vars", "attrgetter", "methodcaller", "Formatter", "get_type_hints"),
    # Modules that those above have imported, and what draws from one of them.
    *("builtins", "datetime", "gc", "inspect", "os", "random", "samples", "socket", "subprocess", "sys", "threading"),
    *("time", "types", "warnings"),
}
_DUNDERS = {"__init__", "__name__", "__doc__"}


def is_pure(code: str) -> bool:
    """Whether two runs of ``code``, each in a process of its own, do the same.

    Code that imports a module or uses a name that is not known to be harmless counts as impure. This is no barrier:
    code that wants to deceive it can.
    """
    if len(code) > LONGEST:
        return False
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return True  # which is what it prints
    except (ValueError, RecursionError, MemoryError):
        return False
    return all(_harmless(node) for node in ast.walk(tree))


def _harmless(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return all(alias.name in _MODULES for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return not node.level and node.module in _MODULES and all(_known(alias.name) for alias in node.names)
    if isinstance(node, ast.Name):
        return _known(node.id)
    return _known(node.attr) if isinstance(node, ast.Attribute) else True


def _known(name: str) -> bool:
    return name not in _NAMES and (not name.startswith("_") or name == "_" or name in _DUNDERS)
