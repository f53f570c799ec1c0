"""Runs the demo's own snippets in this process and returns what the code interpreter would return for them.

Thousands of demonstrations through the sandbox would take minutes; the demo writes its snippets itself, so they are
known to be harmless. How a result is put to the model is the tool's own function, and a test holds these outputs
against the real sandbox's, byte for byte.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import linecache
import traceback
from types import CodeType

from code_interpreter.protocol import ExecutionResult, Outcome
from code_interpreter.snippet import FILE_NAME
from megatron_retool.config import CodeInterpreterConfig
from megatron_retool.data.demo.tool_output import ToolOutput
from tools.code_interpreter_tool import describe


class SnippetRunner:
    """Callable from code to ToolOutput, under the code interpreter's settings."""

    def __init__(self, config: CodeInterpreterConfig) -> None:
        self._config = config
        self._run = functools.lru_cache(maxsize=65536)(self._execute)

    def __call__(self, code: str) -> ToolOutput:
        """What the code interpreter returns for ``code``; the same code runs once."""
        return self._run(code)

    def settings(self) -> dict[str, object]:
        """The settings that change what the model reads."""
        names = (
            "print_last_expression",
            "error_style",
            "max_error_characters",
            "max_output_characters",
            "empty_output_text",
        )
        return {name: getattr(self._config, name) for name in names}

    def _execute(self, code: str) -> ToolOutput:
        stdout = io.StringIO()
        outcome, stderr = Outcome.FINISHED, ""
        try:
            programs = self._compile(code)
        except SyntaxError as error:
            error.__traceback__ = None
            outcome, stderr = Outcome.COMPILE_ERROR, "".join(traceback.format_exception(error))
        else:
            try:
                with contextlib.redirect_stdout(stdout):
                    names = {"__name__": "__main__"}
                    for program in programs:
                        exec(program, names)
            except Exception as error:
                stderr = self._traceback(error, code)
        result = ExecutionResult(outcome, stdout.getvalue(), stderr, return_code=1 if stderr else 0)
        text = describe(result, self._config)
        return ToolOutput(text, succeeded=result.ok and bool(stdout.getvalue().strip()))

    def _compile(self, code: str) -> list[CodeType]:
        tree = ast.parse(code, FILE_NAME)
        if not self._config.print_last_expression or not tree.body or not isinstance(tree.body[-1], ast.Expr):
            return [compile(tree, FILE_NAME, "exec", dont_inherit=True)]
        # As the interactive interpreter runs it: the value of an expression statement is printed.
        last = ast.Interactive([tree.body.pop()])
        return [
            compile(tree, FILE_NAME, "exec", dont_inherit=True),
            compile(last, FILE_NAME, "single", dont_inherit=True),
        ]

    @staticmethod
    def _traceback(error: Exception, code: str) -> str:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != FILE_NAME:
            frames = frames.tb_next
        error.__traceback__ = frames
        # Where a traceback finds the lines that it shows.
        linecache.cache[FILE_NAME] = (len(code), None, code.splitlines(keepends=True), FILE_NAME)
        try:
            return "".join(traceback.format_exception(error))
        finally:
            del linecache.cache[FILE_NAME]
