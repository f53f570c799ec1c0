"""Runs the demo's own snippets in this process and returns what the code interpreter would return for them.

Thousands of demonstrations through the sandbox would take minutes; the demo writes its snippets itself, so they are
known to be harmless. A test holds these outputs against the real sandbox's, byte for byte.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import traceback

from megatron_retool.data.demo.traces import ToolOutput

MAX_OUTPUT_CHARACTERS = 60


class SnippetRunner:
    """Callable from code to ToolOutput with the code interpreter's conventions.

    Args:
        print_last_expression: tools.code_interpreter.print_last_expression: a last line that is a bare expression is
            printed.
    """

    def __init__(self, print_last_expression: bool) -> None:
        self.print_last_expression = print_last_expression
        self._run = functools.lru_cache(maxsize=65536)(self._execute)

    def __call__(self, code: str) -> ToolOutput:
        return self._run(code)

    def settings(self) -> dict[str, object]:
        """What the outputs depend on besides the code."""
        return {"print_last_expression": self.print_last_expression}

    def _execute(self, code: str) -> ToolOutput:
        stdout = io.StringIO()
        error = ""
        try:
            tree = ast.parse(code)
            if self.print_last_expression and tree.body and isinstance(tree.body[-1], ast.Expr):
                _print_value(tree.body[-1])
                ast.fix_missing_locations(tree)
            with contextlib.redirect_stdout(stdout):
                exec(compile(tree, "main.py", "exec"), {"__name__": "__main__"})
        except Exception as raised:
            error = traceback.format_exception_only(raised)[-1].strip()
        printed = stdout.getvalue().strip()
        return ToolOutput((error or printed)[:MAX_OUTPUT_CHARACTERS], succeeded=not error and bool(printed))


def _print_value(statement: ast.Expr) -> None:
    call = statement.value
    is_print = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "print"
    if not is_print:
        statement.value = ast.Call(ast.Name("print", ast.Load()), [call], [])
