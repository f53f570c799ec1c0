"""Name → tool. The agent loop asks here for schemas and makes every call through here."""

from __future__ import annotations

import importlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jsonschema

from megatron_retool.config import ConfigError, ToolsConfig
from tools.tool import ReportsMetrics, Tool, ToolResult

if TYPE_CHECKING:
    from tools.code_interpreter.client import CodeInterpreterClient

__all__ = ["FACTORIES", "Tool", "ToolRegistry", "ToolResult"]

logger = logging.getLogger(__name__)


def _code_interpreter(config: ToolsConfig, client: CodeInterpreterClient | None) -> Tool:
    from tools.code_interpreter.client import CodeInterpreterClient
    from tools.code_interpreter.tool import CodeInterpreterTool

    if client is None and not config.code_interpreter.urls:
        raise ConfigError(
            "tools.code_interpreter.url is not set and no server was started: "
            "run python -m tools.code_interpreter.server, or let the trainer start one"
        )
    return CodeInterpreterTool(config.code_interpreter, client or CodeInterpreterClient(config.code_interpreter.urls))


def _search(config: ToolsConfig, _: CodeInterpreterClient | None) -> Tool:
    from tools.search.index import BM25Index, CorpusError
    from tools.search.tool import SearchTool

    if config.search.corpus is None:
        raise ConfigError("tools.search.corpus is not set: name a .parquet or .jsonl file with a column 'text'")
    try:
        return SearchTool(BM25Index.from_file(config.search.corpus), config.search)
    except CorpusError as error:
        raise ConfigError(f"tools.search.corpus: {error}") from error


FACTORIES: dict[str, Callable[[ToolsConfig, CodeInterpreterClient | None], Tool]] = {
    "code_interpreter": _code_interpreter,
    "search": _search,
}
"""Built-in tools: name → function of (settings, client of the sandbox servers)."""


class ToolRegistry:
    """The tools of one run.

    A call never raises for what a model can do wrong: an unknown name, arguments that are no JSON or break the
    schema, code that fails.  Each of these is a ToolResult whose text tells the model what was wrong.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            names = ", ".join(sorted(tool.name for tool in tools))
            raise ConfigError(f"rollout.multi_turn.tools: two tools have the same name: {names}")
        self._validators = {}
        for tool in tools:
            parameters = tool.schema["function"]["parameters"]
            jsonschema.Draft202012Validator.check_schema(parameters)
            self._validators[tool.name] = jsonschema.Draft202012Validator(parameters)

    @classmethod
    def from_config(
        cls, config: ToolsConfig, names: Sequence[str], *, code_interpreter: CodeInterpreterClient | None = None
    ) -> ToolRegistry:
        """Make the tools that ``names`` lists.

        Args:
            names: built-in names, or ``package.module:factory`` for a function ToolsConfig → Tool of one's own.
            code_interpreter: client of the servers that the trainer starts; None: of those that the settings name.

        Raises:
            ConfigError: an unknown name, or a tool that lacks a setting.
        """
        return cls([_make(config, name, code_interpreter) for name in names])

    @property
    def names(self) -> list[str]:
        return list(self._tools)

    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI function schemas, in order, for the chat template's ``tools``."""
        return [tool.schema for tool in self._tools.values()]

    async def call(self, name: str, arguments: Any) -> ToolResult:
        """Run tool ``name``.

        Args:
            arguments: an object, or the JSON text of one.
        """
        started = time.monotonic()
        tool = self._tools.get(name)
        if tool is None:
            text = f"Error: there is no tool {str(name)[:60]!r}; the tools are: {', '.join(self._tools) or 'none'}"
            return ToolResult("unknown_tool", text, 0.0)
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except json.JSONDecodeError as error:
                return ToolResult("bad_arguments", f"Error: the arguments are not valid JSON: {error}", 0.0)
        problem = jsonschema.exceptions.best_match(self._validators[name].iter_errors(arguments))
        if problem is not None:
            place = ".".join(str(part) for part in problem.absolute_path)
            text = f"Error: bad arguments for {name}: {place + ': ' if place else ''}{problem.message[:200]}"
            return ToolResult("bad_arguments", text, 0.0)
        try:
            return await tool.call(arguments)
        except Exception as error:
            logger.exception("tool %s failed", name)
            text = f"Error: the tool failed: {type(error).__name__}"
            return ToolResult("error", text, time.monotonic() - started)

    def take_metrics(self) -> dict[str, float]:
        """What the tools counted since the last call."""
        metrics: dict[str, float] = {}
        for tool in self._tools.values():
            if isinstance(tool, ReportsMetrics):
                metrics |= tool.take_metrics()
        return metrics

    async def close(self) -> None:
        """Close the tools' connections."""
        for tool in self._tools.values():
            await tool.close()

    async def __aenter__(self) -> ToolRegistry:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _make(config: ToolsConfig, name: str, code_interpreter: CodeInterpreterClient | None) -> Tool:
    if name in FACTORIES:
        return FACTORIES[name](config, code_interpreter)
    module_name, colon, factory_name = name.partition(":")
    if not colon:
        known = ", ".join(FACTORIES)
        raise ConfigError(f"rollout.multi_turn.tools: unknown tool {name!r}; known: {known}, package.module:factory")
    try:
        factory: Callable[[Mapping[str, Any] | ToolsConfig], Tool] = getattr(
            importlib.import_module(module_name), factory_name
        )
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"rollout.multi_turn.tools: cannot load {name!r}: {error}") from error
    return factory(config)
