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
from types import CodeType

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
            with contextlib.redirect_stdout(stdout):
                names = {"__name__": "__main__"}
                for part in self._compile(code):
                    exec(part, names)
        except Exception as raised:
            error = traceback.format_exception_only(raised)[-1].strip()
        printed = stdout.getvalue().strip()
        return ToolOutput((error or printed)[:MAX_OUTPUT_CHARACTERS], succeeded=not error and bool(printed))

    def _compile(self, code: str) -> list[CodeType]:
        tree = ast.parse(code)
        if not self.print_last_expression or not tree.body or not isinstance(tree.body[-1], ast.Expr):
            return [compile(tree, "main.py", "exec")]
        # As the interactive interpreter runs it: the value of an expression statement is printed.
        last = ast.Interactive([tree.body.pop()])
        return [compile(tree, "main.py", "exec"), compile(last, "main.py", "single")]
