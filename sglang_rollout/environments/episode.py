"""One episode of an environment: its calls with their time limits, and a check of what it returned."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jsonschema

from megatron_retool.registry import Extension
from megatron_retool.rollout_rows import AgentOutcome as Outcome
from sglang_rollout.environments.base import Action, Environment, Start, Step
from sglang_rollout.task_agents.outcome import MESSAGE_CHARACTERS, AgentEnd
from tools.tool import run_method

logger = logging.getLogger(__name__)


class EnvironmentFailure(Exception):
    """An environment failed, and its episode with it."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.end = AgentEnd(outcome, message[:MESSAGE_CHARACTERS])


class Episode:
    """Calls an environment's methods.

    Args:
        made: makes the environment.
        call_seconds: longest time of one method.

    Attributes:
        tools: schemas of the episode's tools.
        validators: of their arguments, by name.
    """

    def __init__(self, made: Extension[Callable[..., Any]], call_seconds: float) -> None:
        self._made = made
        self._call_seconds = call_seconds
        self._environment: Environment | None = None
        self.tools: list[dict[str, Any]] = []
        self.validators: dict[str, jsonschema.Draft202012Validator] = {}

    async def reset(self, row: Mapping[str, Any], seconds: float) -> Start:
        """Make the environment and begin.

        Args:
            seconds: time that the trajectory has left.

        Raises:
            EnvironmentFailure: it cannot be made, raised, took too long, or returned what is no Start.
        """
        self._environment = await self._call("making it", self._made, seconds)
        start = await self._call("reset", self._environment.reset, seconds, row)
        if not isinstance(start, Start):
            raise _useless("reset", start, "a Start")
        if start.messages is not None:
            _check_messages("reset", start.messages, ("system", "user", "assistant", "tool"))
        try:
            self.tools = [json.loads(json.dumps(tool)) for tool in start.tools]
            functions = [tool["function"] for tool in self.tools]
            self.validators = {
                function["name"]: jsonschema.Draft202012Validator(function.get("parameters") or {"type": "object"})
                for function in functions
            }
            for validator in self.validators.values():
                validator.check_schema(validator.schema)
        except (TypeError, ValueError, KeyError, jsonschema.SchemaError) as error:
            raise _useless("reset", start.tools, f"function schemas ({type(error).__name__}: {error})") from error
        return start

    async def step(self, action: Action, seconds: float) -> Step:
        """Take a turn.

        Raises:
            EnvironmentFailure: it raised, took too long, or returned what is no Step.
        """
        assert self._environment is not None
        step = await self._call("step", self._environment.step, seconds, action)
        if not isinstance(step, Step):
            raise _useless("step", step, "a Step")
        if step.done:
            return step
        _check_messages("step", step.messages, ("system", "user", "tool"))
        roles = [message["role"] for message in step.messages]
        answers = roles.count("tool")
        if answers != len(action.calls) or roles[:answers] != ["tool"] * answers:
            wanted = f"a message of role tool for each of {len(action.calls)} calls, before any others"
            raise _useless("step", roles, wanted)
        if not step.messages:
            raise _useless("step", step, "messages, or done=True")
        return step

    async def score(self) -> AgentEnd:
        """The reward, or why there is none."""
        assert self._environment is not None
        try:
            return AgentEnd.returned(await self._call("score", self._environment.score, self._call_seconds))
        except EnvironmentFailure as failure:
            return failure.end

    async def close(self) -> None:
        """End it, to the end also where it is cancelled meanwhile. A failure is logged."""
        if self._environment is None:
            return
        environment, self._environment = self._environment, None
        closing = asyncio.ensure_future(self._call("close", environment.close, self._call_seconds))
        try:
            with contextlib.suppress(EnvironmentFailure):
                await asyncio.shield(closing)
        except asyncio.CancelledError:
            await asyncio.wait({closing})
            raise

    async def _call(self, what: str, method: Callable[..., Any], seconds: float, *arguments: Any) -> Any:
        limit = min(seconds, self._call_seconds)
        try:
            async with asyncio.timeout(limit) as deadline:
                return await run_method(method, *arguments)
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise  # of the trajectory, and not of what the environment waited for
            if isinstance(error, TimeoutError) and deadline.expired():
                why = f"{what} took longer than {limit:g} s"
                if limit == self._call_seconds:
                    why += " (rollout.environment_timeout_seconds)"
                raise EnvironmentFailure(Outcome.TIMEOUT, why) from error
            logger.warning("%s: %s failed", self._made.label, what, exc_info=error)
            raise EnvironmentFailure(Outcome.CRASH, f"{what}: {self._made.raised(error)}") from error


def _check_messages(method: str, messages: Any, roles: Sequence[str]) -> None:
    fits = isinstance(messages, Sequence) and all(
        isinstance(each, Mapping) and each.get("role") in roles and isinstance(each.get("content"), str)
        for each in messages
    )
    if not fits:
        raise _useless(method, messages, f"messages of role {', '.join(roles)} with a text as content")


def _useless(method: str, found: Any, wanted: str) -> EnvironmentFailure:
    return EnvironmentFailure(Outcome.CRASH, f"{method} returned {found!r:.300}, and not {wanted}")
