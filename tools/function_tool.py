"""A tool that is one function.

    def lookup(query: str, language: str = "en", *, top_k: int = 3) -> str:
        '''Look a term up.

        Args:
            query: What to look for.
            language: Two letters.
        '''

Its positional parameters are what the policy passes: their schema comes from the type hints and the docstring (as
``transformers.utils.get_json_schema`` reads them). Its keyword-only parameters are settings: of the entry's kwargs, and
of a prompt's execute_kwargs. It may be asynchronous; if not, it runs in a thread.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from megatron_retool.errors import InputError
from tools.tool import Tool, ToolResult, run_method


class FunctionTool(Tool):
    """Calls ``function`` with the policy's arguments and ``settings``.

    Raises:
        ValueError: the function has no docstring, or a parameter has no type hint or no description in it.
    """

    def __init__(self, function: Callable[..., Any], settings: Mapping[str, Any] | None = None) -> None:
        self.function = function
        self.name = function.__name__
        self.schema = schema_of(function)
        self._settings = dict(settings or {})

    async def call(self, arguments: Mapping[str, Any], **settings: Any) -> ToolResult | str:
        """Call the function with the arguments and the prompt's settings."""
        result: ToolResult | str = await run_method(self.function, **arguments, **{**self._settings, **settings})
        return result


def argument_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters that the policy passes."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD)


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """OpenAI function schema of what the policy passes.

    Raises:
        ValueError: see FunctionTool.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    names = argument_names(function)
    signature = inspect.signature(function)

    def described() -> None:
        """Stands for ``function`` without its settings."""

    described.__name__, described.__doc__ = function.__name__, inspect.getdoc(function)
    try:
        hints = typing.get_type_hints(function)
        # Without settings and return value: chat templates would show them to the policy.
        described.__annotations__ = {name: hints[name] for name in names if name in hints}
        described.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[signature.parameters[name] for name in names], return_annotation=signature.empty
        )
        schema: dict[str, Any] = get_json_schema(described)
    except (DocstringParsingException, TypeHintParsingException, NameError, TypeError) as error:
        raise InputError(
            f"{error}. The schema of a function comes from its type hints and its docstring (a description, then "
            "'Args:' with a line 'name: what it is' for each positional parameter)"
        ) from error
    return schema
