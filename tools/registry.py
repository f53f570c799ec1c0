"""The tools of a run: made from the configuration, opened for trajectories, and every call goes through here."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jsonschema

from megatron_retool.config import ConfigError, RolloutConfig, ToolsConfig
from megatron_retool.config.rollout import tool_entries
from megatron_retool.errors import InputError
from megatron_retool.registry import ExtensionError
from tools.arguments import typed_arguments
from tools.loading import NamedTool, make_tools
from tools.tool import ToolResult, TrajectoryInfo, run_method
from untrusted import load_json, load_own_json

if TYPE_CHECKING:
    from code_interpreter.client import CodeInterpreterClient

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0
"""Longest end of a session. A trajectory waits for it, and so does a stream that is left."""

_METHODS = {
    "create_kwargs": "open",
    "execute_kwargs": "call",
    "calc_reward_kwargs": "close",
    "release_kwargs": "close",
}
"""verl's names for what a prompt gives a tool, and who takes it."""
_ROW_FIELDS = frozenset({"ground_truth", "question", "data_source"})
"""verl's data files give these to every tool for the sake of its reward. One that does not take them does without."""


class ToolRegistry:
    """The tools of one run.

    A call never raises for what a model can do wrong: an unknown name, arguments that are no JSON or break the
    schema, code that fails.  Each of these is a ToolResult whose text tells the model what was wrong.
    """

    def __init__(self, tools: Sequence[NamedTool]) -> None:
        self._tools: dict[str, NamedTool] = {}
        for named in tools:
            if named.name in self._tools:
                raise ConfigError(
                    f"{named.label} and {self._tools[named.name].label} have the same name {named.name!r}: give one of "
                    f"them another ({{tool: …, name: {named.name}_2}})"
                )
            self._tools[named.name] = named
        self._measured: dict[str, list[float]] = {}
        self._events: Counter[str] = Counter()
        self._reported: set[tuple[str, str]] = set()
        self._failures: Counter[tuple[str, str]] = Counter()

    @classmethod
    def from_config(
        cls, config: ToolsConfig, tools: Sequence[Any], *, code_interpreter: CodeInterpreterClient | None = None
    ) -> ToolRegistry:
        """Make the tools that rollout.multi_turn.tools lists. No process is started and no connection opened.

        Args:
            tools: rollout.multi_turn.tools.
            code_interpreter: client of the servers that the trainer starts; None: of those that the settings name.

        Raises:
            ConfigError: a tool lacks a setting, or two have one name.
            ExtensionError: a target cannot be loaded or made, or is no tool.
        """
        entries = tool_entries(tools)
        return cls(
            [tool for index, entry in enumerate(entries) for tool in make_tools(config, index, entry, code_interpreter)]
        )

    @property
    def names(self) -> list[str]:
        """Names of the tools."""
        return list(self._tools)

    def check_resuming(self, rollout: RolloutConfig) -> None:
        """Raise ConfigError where the run continues with trajectories that a tool's session could not follow."""
        for setting in ("partial", "branching"):
            for named in self._tools.values():
                if getattr(rollout, setting).enable and not named.tool.resumes:
                    raise ConfigError(
                        f"{named.label}: the sessions of {named.name} begin and end with a trajectory, and "
                        f"rollout.{setting} continues in the middle of one: set rollout.{setting}.enable to false, or "
                        "have no session for each trajectory"
                    )

    def schemas(self, extra_info: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """OpenAI function schemas for the chat template's ``tools``: of a prompt's tools in its order, or of all.

        Args:
            extra_info: the prompt's. ``tool_selection``: names of its tools (none or empty: all). ``tools_kwargs``:
                {name: {"create_kwargs": …, "execute_kwargs": …, …}}; ``need_tools_kwargs``: there must be some.

        Raises:
            ValueError: a name is unknown, or a tool does not take a setting.
        """
        extra_info = extra_info or {}
        self._check_settings(extra_info)
        return [self._tools[name].schema for name in self._selection(extra_info)]

    async def open(self, trajectory: TrajectoryInfo) -> TrajectoryTools:
        """The tools of a trajectory. One that cannot be opened answers every call with an error.

        Raises:
            ValueError: as ``schemas``.
        """
        extra_info = trajectory.extra_info
        tools = {name: self._tools[name] for name in self._selection(extra_info)}
        opened = TrajectoryTools(self, tools, extra_info.get("tools_kwargs") or {})
        try:
            await opened.open(trajectory)
        except BaseException:
            await opened.close({})
            raise
        return opened

    def record(self, metric: str, value: float) -> None:
        """Count a number for ``take_metrics``, which gives the mean."""
        self._measured.setdefault(metric, []).append(value)

    def count(self, event: str) -> None:
        """Count something that happened, for ``take_metrics``."""
        self._events[event] += 1

    def report(self, name: str, error: Exception) -> None:
        """Log what tool ``name`` raised: the first time with its traceback, then as a count in ``take_metrics``."""
        kind = (name, type(error).__name__)
        if kind in self._reported:
            self._failures[kind] += 1
        else:
            self._reported.add(kind)
            logger.error("tool %s failed", name, exc_info=error)

    def take_metrics(self) -> dict[str, float]:
        """What the tools counted since the last call."""
        metrics = {name: sum(values) / len(values) for name, values in self._measured.items()}
        metrics |= {name: float(count) for name, count in self._events.items()}
        self._measured.clear()
        self._events.clear()
        for (name, kind), count in self._failures.items():
            logger.warning("tool %s failed %d more times with %s; see its first traceback above", name, count, kind)
        self._failures.clear()
        for named in self._tools.values():
            for metric, value in named.tool.take_metrics().items():
                # Two tools may share a client, which counts for both and tells the first that asks.
                metrics.setdefault(metric, value)
        return metrics

    async def start(self) -> None:
        """Start the tools.

        Raises:
            ExtensionError: one of them raised.
        """
        for named in self._tools.values():
            try:
                await run_method(named.tool.start)
            except Exception as error:
                raise ExtensionError(f"{named.label}: start failed: {type(error).__name__}: {error}") from error

    async def stop(self) -> None:
        """Stop the tools."""
        for named in self._tools.values():
            try:
                await run_method(named.tool.stop)
            except Exception:
                logger.exception("%s: stop failed", named.label)

    async def __aenter__(self) -> ToolRegistry:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _selection(self, extra_info: Mapping[str, Any]) -> list[str]:
        selection = extra_info.get("tool_selection")
        if not selection:
            return self.names
        if not isinstance(selection, (list, tuple)) or not all(isinstance(name, str) for name in selection):
            raise InputError(f"tool_selection: expected a list of tools' names, found {selection!r:.60}")
        for name in selection:
            self._check_name("tool_selection", name)
        return list(dict.fromkeys(selection))

    def _check_name(self, key: str, name: str) -> None:
        if name not in self._tools:
            raise InputError(
                f"{key}: there is no tool {name!r}; rollout.multi_turn.tools has {', '.join(self._tools) or 'none'}"
            )

    def _check_settings(self, extra_info: Mapping[str, Any]) -> None:
        kwargs = extra_info.get("tools_kwargs")
        if not kwargs:
            if extra_info.get("need_tools_kwargs"):
                raise InputError("need_tools_kwargs is set, and tools_kwargs is missing or empty: add it, or unset it")
            return
        if not isinstance(kwargs, Mapping):
            raise InputError(f"tools_kwargs: expected {{tool: {{create_kwargs: {{…}}, …}}}}, found {kwargs!r:.60}")
        for name, groups in kwargs.items():
            self._check_name("tools_kwargs", name)
            if not isinstance(groups, Mapping):
                raise InputError(f"tools_kwargs.{name}: expected a mapping, found {groups!r:.60}")
            for group, given in groups.items():
                if group not in _METHODS:
                    raise InputError(f"tools_kwargs.{name}.{group}: expected one of {', '.join(_METHODS)}")
                if not isinstance(given, Mapping):
                    raise InputError(f"tools_kwargs.{name}.{group}: expected a mapping, found {given!r:.60}")
                takes = self._tools[name].takes[_METHODS[group]]
                ignored = _ROW_FIELDS if group == "create_kwargs" else frozenset()
                unknown = sorted(set(given) - takes - ignored) if takes is not None else []
                if unknown:
                    raise InputError(
                        f"tools_kwargs.{name}.{group}.{unknown[0]}: the tool's {_METHODS[group]} takes no such "
                        f"argument; it takes {', '.join(sorted(takes or ())) or 'none'}"
                    )


class TrajectoryTools:
    """The tools that one trajectory may call, with their sessions."""

    def __init__(
        self, registry: ToolRegistry, tools: Mapping[str, NamedTool], kwargs: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._registry = registry
        self._tools = tools
        self._kwargs = kwargs
        self._sessions: dict[str, Any] = {}
        self._failed: dict[str, str] = {}

    async def open(self, trajectory: TrajectoryInfo) -> None:
        """Open every tool that has something to open."""
        for name, named in self._tools.items():
            if not named.stateful:
                continue
            given = self._given(named, "create_kwargs")
            try:
                self._sessions[name] = await run_method(named.tool.open, trajectory, **given)
            except Exception as error:
                logger.exception("tool %s could not be opened for trajectory %s", name, trajectory.trajectory_id)
                self._failed[name] = type(error).__name__
                self._registry.count(f"tool/{name}/open_failures")

    async def call(self, name: str, arguments: Any) -> ToolResult:
        """Run tool ``name``.

        Args:
            arguments: an object, or the JSON text of one.
        """
        named = self._tools.get(name)
        if named is None:
            return unknown_tool(name, self._tools)
        if name in self._failed:
            return ToolResult("error", f"Error: the tool failed: {self._failed[name]}")
        if isinstance(arguments, str):
            try:
                arguments = load_json(arguments)
            except ValueError as error:
                return ToolResult("bad_arguments", f"Error: the arguments are not valid JSON: {error}")
        arguments = typed_arguments(arguments, named.validator.schema)
        return bad_arguments(name, arguments, named.validator) or await self._run(named, arguments)

    async def close(self, returned: dict[str, Any]) -> None:
        """End every session, to the end also where it is cancelled meanwhile.

        Args:
            returned: gets what the tools return, by name, as JSON types.
        """
        if not self._sessions:
            return
        closing = asyncio.ensure_future(self._close(returned))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await closing
            raise

    async def _run(self, named: NamedTool, arguments: Any) -> ToolResult:
        given = self._given(named, "execute_kwargs")
        if named.takes_session:
            given["session"] = self._sessions.get(named.name)
        started = time.monotonic()
        try:
            async with asyncio.timeout(named.timeout_seconds) as limit:
                result = await run_method(named.tool.call, arguments, **given)
            if isinstance(result, str):
                result = ToolResult("ok", result)
            if not isinstance(result, ToolResult):
                raise TypeError(f"call returned {result!r:.60}, which is neither text nor a ToolResult")
            if not isinstance(result.text, str):
                raise TypeError(f"call returned a ToolResult whose text is {result.text!r:.60}")
            measured = {f"tool/{named.name}/{metric}": float(value) for metric, value in result.metrics.items()}
        except Exception as error:
            measured = {}
            if isinstance(error, TimeoutError) and limit.expired():
                seconds = named.timeout_seconds
                result = ToolResult("timeout", f"Error: {named.name} did not answer within {seconds:g} s")
            else:
                self._registry.report(named.name, error)
                result = ToolResult("error", f"Error: the tool failed: {type(error).__name__}")
        for metric, value in measured.items():
            self._registry.record(metric, value)
        return result if result.seconds else dataclasses.replace(result, seconds=time.monotonic() - started)

    async def _close(self, returned: dict[str, Any]) -> None:
        sessions, self._sessions = self._sessions, {}
        for name, session in sessions.items():
            named = self._tools[name]
            given = self._given(named, "calc_reward_kwargs", "release_kwargs")
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    value = await run_method(named.tool.close, session, **given)
                if value is not None:
                    returned[name] = load_own_json(json.dumps(value, default=str))
            except Exception:
                logger.exception("tool %s could not be closed", name)
                self._registry.count(f"tool/{name}/close_failures")

    def _given(self, named: NamedTool, *groups: str) -> dict[str, Any]:
        """What the prompt gives a method."""
        kwargs = self._kwargs.get(named.name) or {}
        takes = named.takes[_METHODS[groups[0]]]
        given = {name: value for group in groups for name, value in (kwargs.get(group) or {}).items()}
        return {name: value for name, value in given.items() if takes is None or name in takes}


def refused(name: str, arguments: Any, validators: Mapping[str, jsonschema.Draft202012Validator]) -> ToolResult | None:
    """What a call is answered that names none of these tools or breaks its schema; None: it may be made."""
    if name not in validators:
        return unknown_tool(name, validators)
    return bad_arguments(name, arguments, validators[name])


def unknown_tool(name: Any, known: Iterable[str]) -> ToolResult:
    """What a call of no tool is answered."""
    text = f"Error: there is no tool {str(name)[:60]!r}; the tools are: {', '.join(known) or 'none'}"
    return ToolResult("unknown_tool", text)


def bad_arguments(name: str, arguments: Any, validator: jsonschema.Draft202012Validator) -> ToolResult | None:
    """What a call is answered whose arguments break the schema; None where they do not."""
    problem = jsonschema.exceptions.best_match(validator.iter_errors(arguments))
    if problem is None:
        return None
    place = ".".join(str(part) for part in problem.absolute_path)
    text = f"Error: bad arguments for {name}: {place + ': ' if place else ''}{problem.message[:200]}"
    return ToolResult("bad_arguments", text)


def check_tools(tools: ToolsConfig, rollout: RolloutConfig) -> None:
    """Make the run's tools as a run would, and drop them again: nothing is started.

    Raises:
        ConfigError, ExtensionError: see ``ToolRegistry.from_config``.
    """
    from code_interpreter.client import CodeInterpreterClient

    registry = ToolRegistry.from_config(
        tools, rollout.multi_turn.tools, code_interpreter=CodeInterpreterClient(["http://unused"])
    )
    registry.check_resuming(rollout)
