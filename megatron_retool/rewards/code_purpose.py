"""What a program that a model wrote is for, told by a fixed rule on its syntax tree. Nothing of it is ever run.

The first of these that holds:

* unparsed: it is no Python, or has no statement.
* plot: it imports a plotting library, or calls plot, plot3d, plot_implicit, plot_parametric or savefig.
* verification: it asserts; it calls isclose, allclose, assert_allclose, array_equal or checksol; it prints a truth
  value or ends in one; or, outside loops, it has a condition and its else that both print only fixed texts.
* search: it chooses within a loop (if, a conditional expression, break) or in a comprehension (if), calls filter, or
  enumerates with product, permutations, combinations or combinations_with_replacement of itertools.
* calculation: everything else.

A truth value is a comparison; not, and, or of truth values; a call of all, any, bool, isinstance or of a check named
above; or a name that was given one. The rule is coarse: of a program that searches, and then checks what it found, it
sees the check.
"""

from __future__ import annotations

import ast
import warnings
from enum import StrEnum
from functools import lru_cache

_PLOTTING = frozenset(("matplotlib", "mpl_toolkits", "pylab", "seaborn", "plotly", "bokeh", "altair", "turtle"))
_PLOTS = frozenset(("plot", "plot3d", "plot_implicit", "plot_parametric", "savefig"))
_CHECKS = frozenset(("isclose", "allclose", "assert_allclose", "array_equal", "checksol"))
_TRUTH_CALLS = _CHECKS | {"all", "any", "bool", "isinstance"}
_ENUMERATIONS = frozenset(("product", "permutations", "combinations", "combinations_with_replacement"))
_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_CHOICES = (ast.If, ast.IfExp, ast.Break)
_BRANCHES = (ast.expr, ast.stmt, ast.comprehension, ast.keyword, ast.ExceptHandler, ast.withitem, ast.match_case)
"""Nodes that may hold a program's parts; operators, names' contexts and the like hold none."""


class Purpose(StrEnum):
    """What a piece of code is for."""

    CALCULATION = "calculation"
    VERIFICATION = "verification"
    SEARCH = "search"
    PLOT = "plot"
    UNPARSED = "unparsed"


@lru_cache(maxsize=4096)
def purpose_of(code: str) -> Purpose:
    """The purpose of a program, by the rule above. Takes any text and never raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's, of escapes that it does not know
            tree = ast.parse(code)
        return _Findings(tree).purpose if tree.body else Purpose.UNPARSED
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return Purpose.UNPARSED


class _Findings:
    """What a program has of each purpose. Names are compared at the end: the tree is not read in the program's order.

    Attributes:
        shown, truths: names that are printed; that were given a truth value.
        enumerates, itertools: names by which enumerations are called; by which itertools or one of them is known.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.plots = self.checks = self.searches = False
        self.shown: set[str] = set()
        self.truths: set[str] = set()
        self.enumerates: set[str] = set()
        self.itertools: set[str] = set()
        last = tree.body[-1]
        if isinstance(last, ast.Expr):
            self._show(last.value)
        pending: list[tuple[ast.AST, bool]] = [(tree, False)]
        while pending:
            node, in_loop = pending.pop()
            self._look_at(node, in_loop)
            in_loop = in_loop or isinstance(node, _LOOPS)
            for name in node._fields:
                value = getattr(node, name, None)
                for child in value if isinstance(value, list) else (value,):
                    if isinstance(child, _BRANCHES):
                        pending.append((child, in_loop))

    @property
    def purpose(self) -> Purpose:
        if self.plots:
            return Purpose.PLOT
        if self.checks or self.shown & self.truths:
            return Purpose.VERIFICATION
        return Purpose.SEARCH if self.searches or self.enumerates & self.itertools else Purpose.CALCULATION

    def _look_at(self, node: ast.AST, in_loop: bool) -> None:
        if isinstance(node, ast.Call):
            self._call(node)
        elif isinstance(node, _CHOICES):
            self.searches |= in_loop
            self.checks |= not in_loop and isinstance(node, ast.If) and _tells_two_cases(node)
        elif isinstance(node, ast.comprehension):
            self.searches |= bool(node.ifs)
        elif isinstance(node, ast.Assert):
            self.checks = True
        elif isinstance(node, ast.Assign):
            if _is_truth(node.value):
                self.truths.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                self.plots |= alias.name.partition(".")[0] in _PLOTTING
                if alias.name == "itertools":
                    self.itertools.add(alias.asname or alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            self.plots |= module.partition(".")[0] in _PLOTTING
            if module == "itertools":
                names = {alias.asname or alias.name for alias in node.names if alias.name in _ENUMERATIONS}
                self.itertools |= _ENUMERATIONS if node.names[0].name == "*" else names

    def _call(self, node: ast.Call) -> None:
        function = node.func
        name = _called_name(node)
        if name == "print" and isinstance(function, ast.Name):
            for argument in node.args:
                self._show(argument)
        self.plots |= name in _PLOTS
        self.checks |= name in _CHECKS
        self.searches |= name == "filter"
        if isinstance(function, ast.Name):
            self.enumerates.add(function.id)
        elif name in _ENUMERATIONS and isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            self.enumerates.add(function.value.id)

    def _show(self, node: ast.expr) -> None:
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        for part in parts:
            value = part.value if isinstance(part, ast.FormattedValue) else part
            if isinstance(value, ast.Name):
                self.shown.add(value.id)
            self.checks |= _is_truth(value)


def _called_name(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _is_truth(node: ast.expr) -> bool:
    if isinstance(node, ast.BoolOp):
        return any(_is_truth(value) for value in node.values)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    return isinstance(node, ast.Compare) or (isinstance(node, ast.Call) and _called_name(node) in _TRUTH_CALLS)


def _tells_two_cases(node: ast.If) -> bool:
    return bool(node.orelse) and all(map(_prints_fixed_text, [*node.body, *node.orelse]))


def _prints_fixed_text(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    call = node.value
    return _called_name(call) == "print" and all(isinstance(argument, ast.Constant) for argument in call.args)
