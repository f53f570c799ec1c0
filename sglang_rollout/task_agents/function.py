"""A task agent that is a function: asynchronous in the run's event loop, plain in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable
from typing import Any

from megatron_retool.registry import Extension
from megatron_retool.rollout_rows import AgentOutcome as Outcome
from sglang_rollout.task_agents.client import ClientSettings
from sglang_rollout.task_agents.outcome import MESSAGE_CHARACTERS, AgentEnd

_END_SECONDS = 1.0


def is_asynchronous(function: Extension[Callable[..., Any]]) -> bool:
    """Whether it is run in the event loop, and not in a thread."""
    return inspect.iscoroutinefunction(function.object)


async def run_function(
    function: Extension[Callable[..., Any]], task: dict[str, Any], client: ClientSettings, left: Callable[[], float]
) -> AgentEnd:
    """Call ``function`` and wait for it.

    Neither kind can be stopped against its will: after a time-out a plain one keeps running in its thread, and one that
    catches its cancellation in the loop, until the next call of the model, which is refused.

    Args:
        left: seconds that it still has; asked again when they are over.
    """
    work = asyncio.create_task(_called(function, task, client))
    try:
        while not work.done() and (seconds := left()) > 0:
            await asyncio.wait({work}, timeout=seconds)
        return work.result() if work.done() else AgentEnd(Outcome.TIMEOUT)
    finally:
        if not work.done():
            work.cancel()
            await asyncio.wait({work}, timeout=_END_SECONDS)


async def _called(function: Extension[Callable[..., Any]], task: dict[str, Any], client: ClientSettings) -> AgentEnd:
    try:
        if is_asynchronous(function):
            value = await function(task, client)
        else:
            value = await _in_thread(lambda: function(task, client))
            if inspect.isawaitable(value):
                value = await value
        return AgentEnd.returned(value)
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        this = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and (this is None or this.cancelling()):
            raise  # by run_function, and not by what the agent waited for
        return AgentEnd(Outcome.CRASH, function.raised(error)[:MESSAGE_CHARACTERS])


async def _in_thread(call: Callable[[], Any]) -> Any:
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if result.done():
            return
        if error is None:
            result.set_result(value)
        else:
            # A future takes no StopIteration, and what is neither would end the event loop.
            fits = isinstance(error, (Exception, SystemExit)) and not isinstance(error, StopIteration)
            result.set_exception(error if fits else RuntimeError(repr(error)))

    def work() -> None:
        value, raised = None, None
        try:
            value = call()
        except BaseException as error:
            raised = error
        with contextlib.suppress(RuntimeError):  # the loop has ended before the agent
            loop.call_soon_threadsafe(settle, value, raised)

    # Not of a pool: a thread that never ends must keep neither others waiting nor the program from ending.
    threading.Thread(target=work, daemon=True, name="task-agent").start()
    return await result
