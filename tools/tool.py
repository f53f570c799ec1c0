"""What a tool is, and its life: started with the run, opened with a trajectory, called, closed, stopped with the run.

    class Notebook(Tool):
        name = "notebook"
        schema = {"type": "function", "function": {"name": "notebook", "description": …, "parameters": {…}}}

        def __init__(self, *, url: str = "http://localhost:8888") -> None: ...         # settings: kwargs of its entry

        async def open(self, trajectory: TrajectoryInfo, *, packages=()) -> Session: ...  # create_kwargs of the prompt
        async def call(self, arguments, session, *, timeout=10.0) -> str: ...            # execute_kwargs of the prompt
        async def close(self, session) -> dict | None: ...

A tool without state defines only ``call(self, arguments)``. A function needs no class: see function_tool.

A session belongs to one trajectory in one process. It is closed when the trajectory ends in whatever way, and when the
trajectory is paused, but not while a call of it runs. A fork (ARPO), and a trajectory that continues after a pause or a
restart, open sessions of their own; ``TrajectoryInfo.earlier_calls`` says what the trajectory has called before, so
that a tool can rebuild its state.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

MOST_THREADS = 64
"""Calls of one tool that is not asynchronous, at the same time. Further ones wait."""
MOST_HANGING = 64
"""Calls of one tool that were given up and still run. From then on its calls fail at once."""

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
        """``<group_id>/<index>``. Validation counts its groups by itself, so it is unique only within a purpose."""
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
        that satisfies the schema. Plain text is a result of status ok. May raise only where the tool itself is broken.
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

    async def open(self, trajectory: TrajectoryInfo) -> ToolSession:
        """Open the tools for a trajectory."""

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
    return await _threads_of(getattr(method, "__self__", method)).run(call)


class _Threads:
    """The threads of one tool. A call that is given up leaves its thread, and the next one gets a fresh one."""

    def __init__(self) -> None:
        self._free: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._hanging = 0
        self._lock = threading.Lock()

    async def run(self, call: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        async with self._free.setdefault(loop, asyncio.Semaphore(MOST_THREADS)):
            if self._hanging >= MOST_HANGING:
                raise RuntimeError(f"{self._hanging} earlier calls of it hang")
            answered: asyncio.Future[Any] = loop.create_future()
            work = _Work(call, loop, answered)
            threading.Thread(target=work.run, args=(self._ended,), name="tool", daemon=True).start()
            try:
                return await answered
            finally:
                with self._lock:
                    if not work.ended:
                        work.given_up = True
                        self._hanging += 1

    def _ended(self, work: _Work) -> None:
        with self._lock:
            work.ended = True
            if work.given_up:
                self._hanging -= 1


class _Work:
    """One call in a thread of its own."""

    def __init__(self, call: Callable[[], Any], loop: asyncio.AbstractEventLoop, answered: asyncio.Future[Any]) -> None:
        self._call, self._loop, self._answered = call, loop, answered
        self.ended = self.given_up = False

    def run(self, ended: Callable[[_Work], None]) -> None:
        result, error = None, None
        try:
            result = self._call()
        except BaseException as raised:
            error = raised
        ended(self)
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            self._loop.call_soon_threadsafe(self._answer, result, error)

    def _answer(self, result: Any, error: BaseException | None) -> None:
        if self._answered.done():
            return
        if error is None:
            self._answered.set_result(result)
        else:
            self._answered.set_exception(error)


_TOOLS: WeakKeyDictionary[Any, _Threads] = WeakKeyDictionary()
_OTHERS = _Threads()
"""Of what cannot be a key."""


def _threads_of(owner: Any) -> _Threads:
    try:
        return _TOOLS.setdefault(owner, _Threads())
    except TypeError:
        return _OTHERS


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
