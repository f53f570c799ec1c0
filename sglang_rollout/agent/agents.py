"""rollout.agent: what drives the trajectories of a run.

An ``Agent`` samples by itself, token for token. A task agent (docs/agents.md) is a function of a task and a client's
settings, or a program, that knows only a model's API: sglang_rollout/task_agents/ runs it behind the gateway.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Sequence
from typing import Any

from megatron_retool.config import DataConfig, RolloutConfig
from megatron_retool.registry import ExtensionError, Registry, load_object
from sglang_rollout.agent.loop import Agent, AgentSetup
from sglang_rollout.agent.turn_glue import Tokenizer, TurnGlueError
from sglang_rollout.engine.base import StopConditions
from tools.tool import ToolCaller

agents: Registry[Callable[..., Any]] = Registry(
    "rollout.agent", takes=("setup",), built_in={"tool_calling": "sglang_rollout.agent.loop:AgentLoop"}
)


BUILT_IN = "tool_calling"
task_agents: Registry[Callable[..., Any]] = Registry("rollout.agent", takes=("task", "client"))
"""run(task, client, *, its own settings) -> reward | None | dict, plain or asynchronous."""
_ENVIRONMENTS = "sglang_rollout.environments.loop"
"""The agent of rollout.environment, imported where it is chosen: it renders as the gateway does, a floor above."""


def is_task_agent(rollout: RolloutConfig) -> bool:
    """Whether rollout.agent is a program, or names a function whose first parameter is called task.

    Raises:
        ExtensionError: it cannot be loaded.
    """
    target = rollout.agent
    if not isinstance(target, str):
        return True
    if target in agents.names:
        return False
    result = agents.load(target)
    return not inspect.isclass(result) and next(iter(_parameters(result)), None) == "task"


def _parameters(found: Any) -> Sequence[str]:
    try:
        return list(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        return []


def make_agent(rollout: RolloutConfig, data: DataConfig, tokenizer: Tokenizer, tools: ToolCaller) -> Agent:
    """What rollout.agent names, made with rollout.agent_kwargs. Nothing is started.

    Raises:
        ExtensionError: agent or tool-call format cannot be loaded or made, or is none.
        ChatTemplateError: the tokenizer's chat template cannot express tool results.
    """
    # Behind a task agent the built-in one says where a turn ends, and whether the chat template can be used.
    target, kwargs = (BUILT_IN, {}) if is_task_agent(rollout) else (rollout.agent, rollout.agent_kwargs)
    setup = AgentSetup(
        rollout.multi_turn,
        tokenizer,
        tools,
        max_response_length=data.max_response_length,
        context_length=rollout.engine.context_length,
    )
    if rollout.environment is not None:
        loop: Agent = load_object("rollout.environment", f"{_ENVIRONMENTS}:make_environment_loop")(rollout, data, setup)
        return loop
    extension = agents.bind(target, kwargs)
    try:
        made = extension(setup)
    except (ExtensionError, TurnGlueError):
        raise
    except Exception as error:
        raise ExtensionError(f"{extension.label}: making it failed: {type(error).__name__}: {error}") from error
    return _checked(made, extension.label)


def _checked(made: Any, label: str) -> Agent:
    kind = type(made).__name__
    if not isinstance(getattr(made, "stop", None), StopConditions):
        raise ExtensionError(
            f"{label}: {kind}.stop must be StopConditions ({StopConditions.__module__}): where the engine ends a turn"
        )
    _check_run(kind, getattr(made, "run", None), label)
    agent: Agent = made
    return agent


def _check_run(kind: str, run: Any, label: str, *bound: str) -> None:
    """``bound``: ("self",) where ``run`` is a class's."""
    form = "define async def run(self, state, generate, paused) -> bool"
    if not inspect.iscoroutinefunction(run):
        raise ExtensionError(f"{label}: {kind} has no asynchronous method run: {form}")
    try:
        inspect.signature(run).bind(*bound, "state", "generate", "paused")
    except TypeError as error:
        raise ExtensionError(f"{label}: {kind}.run cannot be called with three arguments ({error}): {form}") from error


def check_agent(rollout: RolloutConfig) -> None:
    """Raise ExtensionError where the run's agent cannot be loaded, made with its keyword arguments, or run.

    The rest is checked where it is made, for which a tokenizer is needed.
    """
    if rollout.environment is not None:
        load_object("rollout.environment", f"{_ENVIRONMENTS}:environment_of")(rollout)
        return
    if is_task_agent(rollout):
        if isinstance(rollout.agent, str):
            task_agents.bind(rollout.agent, rollout.agent_kwargs)
        else:
            check_program(rollout.command)
        if rollout.branching.enable:
            raise ExtensionError(
                f"rollout.agent={rollout.agent}: rollout.branching forks trajectories of the built-in agent; "
                "set rollout.branching.enable to false"
            )
        return
    extension = agents.bind(rollout.agent, rollout.agent_kwargs)
    if inspect.isclass(extension.object):
        _check_run(extension.object.__name__, getattr(extension.object, "run", None), extension.label, "self")


def check_program(command: Sequence[str]) -> None:
    """Raise ExtensionError where the program of rollout.agent.command is not on this machine."""
    if shutil.which(command[0]) is None:
        raise ExtensionError(
            f"rollout.agent.command={' '.join(command)}: there is no program {command[0]!r} on PATH: name it by its "
            "whole path, or install it on the node of the driver"
        )
