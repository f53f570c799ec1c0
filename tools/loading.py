"""From an element of rollout.multi_turn.tools to a tool, checked before anything starts."""

from __future__ import annotations

import copy
import inspect
import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jsonschema

from megatron_retool.config import ConfigError, ToolsConfig
from megatron_retool.config.loading import with_settings
from megatron_retool.config.rollout import ToolEntry
from megatron_retool.errors import UserError
from megatron_retool.registry import ExtensionError, Registry
from tools.function_tool import FunctionTool, argument_names
from tools.tool import Tool

if TYPE_CHECKING:
    from code_interpreter.client import CodeInterpreterClient

BUILT_IN = {
    "code_interpreter": "tools.code_interpreter_tool:CodeInterpreterTool",
    "search": "tools.search.tool:SearchTool",
    "read_page": "tools.search.page_tool:ReadPageTool",
    "mcp": "tools.mcp_servers.tools:mcp_tools",
}
"""Tool classes, and functions that make tools. One that has a section tools.<name> is made with it, the others with the
keyword arguments of their entry."""


@dataclass(frozen=True)
class NamedTool:
    """A tool under the name that the policy calls it by.

    Attributes:
        label: the setting that it comes from.
        takes: names of tools_kwargs that its methods take, None for any.
        timeout_seconds: of a call; None: it has a limit of its own.
    """

    label: str
    name: str
    tool: Tool
    schema: dict[str, Any]
    validator: jsonschema.Draft202012Validator
    takes: Mapping[str, frozenset[str] | None]
    takes_session: bool
    stateful: bool
    timeout_seconds: float | None = None


def make_tools(
    config: ToolsConfig, index: int, entry: ToolEntry, client: CodeInterpreterClient | None
) -> list[NamedTool]:
    """The tool of an element of rollout.multi_turn.tools, or the tools where its target makes several.

    Args:
        index: of the element.
        client: of the run's own sandbox servers.

    Raises:
        ConfigError: a built-in lacks a setting, or a setting is wrong.
        ExtensionError: the target cannot be loaded or made, or is no tool.
    """
    key = f"rollout.multi_turn.tools[{index}]"
    label = f"{key}={entry.tool}"
    kwargs: Mapping[str, Any] = entry.kwargs
    section = getattr(config, entry.tool, None) if entry.tool in BUILT_IN else None
    registry: Registry[Callable[..., Any]] = Registry(key, (), built_in=BUILT_IN, kwargs_key=f"{key}.kwargs")
    result = registry.load(entry.tool)
    if section is not None:
        for name in getattr(result, "server_settings", ()):
            if name in kwargs:
                raise ConfigError(f"{key}.kwargs.{name} belongs to the servers: set tools.{entry.tool}.{name}")
        kwargs = {"config": with_settings(section, entry.kwargs, f"{key}.kwargs")}
        if "client" in inspect.signature(result).parameters:
            kwargs["client"] = client
        if "search" in inspect.signature(result).parameters:
            kwargs["search"] = config.search
    if inspect.isclass(result) or _makes_a_tool(result):
        make: Callable[[], Any] = registry.bind(entry.tool, kwargs)
    else:
        takes = argument_names(result) if inspect.isfunction(result) else ()
        own = Registry[Callable[..., Any]](key, takes, kwargs_key=f"{key}.kwargs").bind(entry.tool, kwargs)

        def make() -> Any:
            if not inspect.isfunction(result):
                raise ValueError("it is neither a class nor a function")
            return FunctionTool(result, own.kwargs)

    try:
        tool = make()
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}" if section is None else str(error)) from error
    except Exception as error:
        also = " A function that makes a tool says so: -> Tool" if inspect.isfunction(result) else ""
        told = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        raise ExtensionError(f"{label}: making the tool failed: {told}.{also}") from error
    several = isinstance(tool, list)
    if several and entry.name is not None:
        raise ConfigError(
            f"{key}.name={entry.name}: {entry.tool} makes tools that have names of their own: leave it out"
        )
    for each in tool if several else [tool]:
        if not isinstance(each, Tool):
            raise ExtensionError(
                f"{label}: {type(each).__name__} is no tool: derive the class from tools.tool.Tool, or name a function"
            )
    seconds = None if entry.tool in BUILT_IN else entry.timeout_seconds
    return [
        replace(named_tool(each, entry.name, label), timeout_seconds=seconds) for each in (tool if several else [tool])
    ]


def _makes_a_tool(found: Any) -> bool:
    """Whether it is a function that is annotated to return a tool or a list of tools, and not a tool itself."""
    try:
        returned = typing.get_type_hints(found).get("return")
    except (TypeError, NameError):
        return False
    if typing.get_origin(returned) is list:
        (returned,) = typing.get_args(returned)
    return inspect.isclass(returned) and issubclass(returned, Tool)


def named_tool(tool: Tool, name: str | None = None, label: str = "the tool") -> NamedTool:
    """``tool`` checked, as ``ToolRegistry`` takes it.

    Args:
        name: another name than its own.
        label: for messages.

    Raises:
        ExtensionError: name, schema or a method is missing or wrong.
    """
    for method in ("start", "stop", "open", "call", "close", "take_metrics"):
        if not callable(getattr(tool, method)):
            raise ExtensionError(
                f"{label}: {type(tool).__name__}.{method}={getattr(tool, method)!r:.60} hides the method {method} of a "
                f"tool: give the attribute another name (self._{method})"
            )
    own = getattr(tool, "name", None)
    schema = _checked_schema(label, own, getattr(tool, "schema", None))
    if name is not None:
        schema["function"]["name"] = name
    inherited = {method: getattr(type(tool), method) is getattr(Tool, method) for method in ("open", "call", "close")}
    if inherited["call"]:
        raise ExtensionError(f"{label}: {type(tool).__name__} defines no call: add async def call(self, arguments)")
    takes: dict[str, frozenset[str] | None] = {}
    for method, first in (("open", "trajectory"), ("call", "arguments"), ("close", "session")):
        if inherited[method]:
            takes[method] = frozenset()
        elif isinstance(tool, FunctionTool):
            takes[method] = _keywords(label, method, tool.function, None)
        else:
            takes[method] = _keywords(label, method, getattr(tool, method), first)
    parameters = dict(schema["function"]["parameters"])
    if isinstance(tool, FunctionTool):
        # Or the policy could set the function's settings. Not in the schema, where it would only cost tokens.
        parameters["additionalProperties"] = False
    call = takes["call"]
    takes["call"] = None if call is None else call - {"session"}
    takes_session = "session" in inspect.signature(tool.call).parameters
    return NamedTool(
        label,
        name or schema["function"]["name"],
        tool,
        schema,
        jsonschema.Draft202012Validator(parameters),
        takes,
        takes_session,
        stateful=not (inherited["open"] and inherited["close"]),
    )


def _keywords(label: str, method: str, function: Callable[..., Any], first: str | None) -> frozenset[str] | None:
    """Names that ``function`` takes as keywords, None for any.

    Args:
        first: what it is called with by position; None: only its keyword-only parameters count.
    """
    parameters = list(inspect.signature(function).parameters.values())
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    if first is None:
        return frozenset(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)
    by_position = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if not by_position and not any(each.kind is each.VAR_POSITIONAL for each in parameters):
        also = " (what ends with the run is stop(self))" if method == "close" else ""
        raise ExtensionError(f"{label}: {method} must take {first}: define {method}(self, {first}, …){also}")
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    needed = [
        each.name
        for each in parameters
        if each.default is each.empty and each not in by_position[:1] and each.name != "session"
        and each.kind is not each.VAR_POSITIONAL
    ]  # fmt: skip
    if needed:
        raise ExtensionError(
            f"{label}: {method} needs {', '.join(needed)}, which only some prompts may give: give it a default"
        )
    return frozenset(names) - {each.name for each in by_position[:1]}


def _checked_schema(label: str, name: Any, schema: Any) -> dict[str, Any]:
    """A copy of ``schema``.

    Raises:
        ExtensionError: it is no OpenAI function schema, or not of this name.
    """
    form = '{"type": "function", "function": {"name": …, "description": …, "parameters": {"type": "object", …}}}'
    function = schema.get("function") if isinstance(schema, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("parameters"), Mapping):
        raise ExtensionError(f"{label}: schema={schema!r:.80} must be {form}")
    if not isinstance(name, str) or not name or function.get("name") != name:
        raise ExtensionError(
            f"{label}: the tool's name is {name!r} and its schema's {function.get('name')!r}: set both to one text"
        )
    try:
        jsonschema.Draft202012Validator.check_schema(function["parameters"])
        json.dumps(schema)
    except jsonschema.SchemaError as error:
        place = ".".join(str(part) for part in error.absolute_path)
        raise ExtensionError(
            f"{label}: schema.function.parameters{'.' + place if place else ''} is no JSON schema: {error.message}"
        ) from error
    except (TypeError, ValueError) as error:
        raise ExtensionError(f"{label}: the schema is not made of JSON types: {error}") from error
    return copy.deepcopy(dict(schema))
