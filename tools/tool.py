"""What a tool is, and its life: started with the run, opened with a trajectory, called, closed, stopped with the run.

    class Notebook(Tool):
        name = "notebook"
        schema = {"type": "function", "function": {"name": "notebook", "description": …, "parameters": {…}}}

        def __init__(self, *, url: str = "http://localhost:8888") -> None: ...         # settings: kwargs of its entry

        async def open(self, trajectory: TrajectoryInfo, *, packages=()) -> Session: ...  # create_kwargs of the prompt
        async def call(self, arguments, session, *, timeout=10.0) -> str: ...            # execute_kwargs of the prompt
        async def close(self, session) -> dict | None: ...

A tool without state defines ``call(self, arguments)`` alone. A function needs no class: see function_tool.

A session belongs to one trajectory in one process. It is closed when the trajectory ends in whatever way, and when the
trajectory is paused. A fork (ARPO), and a trajectory that goes on after a pause or a restart, open sessions of their
own; ``TrajectoryInfo.earlier_calls`` says what the trajectory has called before, so that a tool can rebuild its state.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

_THREADS = ThreadPoolExecutor(64, thread_name_prefix="tool")
"""For tools that are not asynchronous. asyncio's own pool is as small as the machine has cores."""

STATUSES = ("ok", "error", "timeout", "unknown_tool", "bad_arguments")


@dataclass(frozen=True)
class ToolResult:
    """What one call came to."""

    status: str
    """One of STATUSES."""
    text: str
    """What the model reads."""
    seconds: float = 0.0
    """Wall-clock time of the call, with any wait for a free worker; 0: as the registry measures it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the tool's own; their means over a step's calls become tool/<tool>/<name>."""


@dataclass(frozen=True)
class EarlierCall:
    """A call of the same trajectory whose result the model has read."""

    arguments: Mapping[str, Any]
    status: str


@dataclass(frozen=True)
class TrajectoryInfo:
    """What a tool is opened for."""

    group_id: int
    index: int
    """Place in the group."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """The prompt's row: its extra_info with data_source, ground_truth and uid."""
    earlier_calls: Mapping[str, tuple[EarlierCall, ...]] = field(default_factory=dict)
    """By tool: calls before a pause, or of the parent before a fork; in order."""

    @property
    def trajectory_id(self) -> str:
        """``<group_id>/<index>``. Validation counts its groups by itself, so it is unique within a purpose alone."""
        return f"{self.group_id}/{self.index}"


class Tool:
    """Something that a policy can call. What is not defined does nothing.

    Methods may be synchronous; they are then run in a thread.
    """

    name: str
    schema: Mapping[str, Any]
    """{"type": "function", "function": {"name", "description", "parameters": JSON schema}}."""
    resumes: bool = True
    """A session can begin in the middle of a trajectory, after a pause (rollout.partial) or a fork (rollout.branching).
    """

    async def start(self) -> None:
        """Once, before the first trajectory: connections."""

    async def stop(self) -> None:
        """Once, at the end of the run; also where ``start`` failed or was not reached."""

    async def open(self, *arguments: Any, **settings: Any) -> Any:
        """``open(trajectory: TrajectoryInfo, **create_kwargs)``: what ``call`` and ``close`` get as ``session``."""

    async def call(self, *arguments: Any, **settings: Any) -> ToolResult | str:
        """``call(arguments)`` or ``call(arguments, session)``, with execute_kwargs: run with ``arguments``, a mapping
        that satisfies the schema. Text alone is a result of status ok. May raise only where the tool itself is broken.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no call")

    async def close(self, *arguments: Any, **settings: Any) -> Any:
        """``close(session, **{**calc_reward_kwargs, **release_kwargs})``: end of a session.

        What it returns is kept where the trajectory is finished: the reward function finds it in
        ``extra_info["tools"][name]``, as JSON types.
        """

    def take_metrics(self) -> dict[str, float]:
        """tool/… metrics since the last call."""
        return {}


class ToolSession(Protocol):
    """The tools of one trajectory."""

    async def call(self, name: str, arguments: Any) -> ToolResult:
        """Run tool ``name``. It answers with a status instead of raising."""
        ...

    async def close(self, returned: dict[str, Any]) -> None:
        """End it, also where it is cancelled meanwhile. ``returned`` gets what the tools return, by name."""
        ...


class ToolCaller(Protocol):
    """Opens tools for trajectories (tools.registry.ToolRegistry)."""

    async def open(self, trajectory: TrajectoryInfo) -> ToolSession: ...

    def schemas(self, extra_info: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """OpenAI function schemas of the tools that a prompt with this ``extra_info`` has."""
        ...


async def run_method(method: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Call a function: await it where it is asynchronous, else run it in a thread.

    Raises:
        RuntimeError: it asked for the end of the program, as ``sys.exit()`` does, or let a StopIteration out, as
            ``next()`` of an empty iterator does: a loop that waits for it would end, or wait for ever.
    """
    if inspect.iscoroutinefunction(method):
        try:
            return await method(*arguments, **keywords)
        except SystemExit as error:
            raise RuntimeError(repr(error)) from error
    call = functools.partial(_called, method, *arguments, **keywords)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, call)


def _called(method: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    try:
        return method(*arguments, **keywords)
    except (SystemExit, StopIteration) as error:
        raise RuntimeError(repr(error)) from error


def shorten_middle(text: str, limit: int) -> str:
    """``text``, or its beginning and end with a note between them where it has more than ``limit`` characters."""
    if len(text) <= limit:
        return text
    note = f"\n... [{len(text) - limit} characters left out] ...\n"
    if len(note) >= limit:
        return text[:limit]
    kept = limit - len(note)
    head = kept - kept // 2
    return text[:head] + note + text[len(text) - kept // 2 :]
