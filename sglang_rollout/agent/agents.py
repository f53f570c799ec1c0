"""rollout.agent: what drives the trajectories of a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megatron_retool.config import Config
from megatron_retool.registry import ExtensionError, Registry
from sglang_rollout.agent.loop import Agent, AgentSetup
from sglang_rollout.agent.turn_glue import ChatTemplateError, Tokenizer
from sglang_rollout.engine.base import StopConditions
from tools.tool import ToolCaller

agents: Registry[Callable[..., Any]] = Registry(
    "rollout.agent", takes=("setup",), built_in={"tool_calling": "sglang_rollout.agent.loop:AgentLoop"}
)


def make_agent(config: Config, tokenizer: Tokenizer, tools: ToolCaller) -> Agent:
    """What rollout.agent names, made with rollout.agent_kwargs. Nothing is started.

    Raises:
        ExtensionError: agent or tool-call format cannot be loaded or made, or is none.
        ChatTemplateError: the tokenizer's chat template cannot express tool results.
    """
    rollout = config.rollout
    setup = AgentSetup(
        rollout.multi_turn,
        tokenizer,
        tools,
        max_response_length=config.data.max_response_length,
        context_length=rollout.engine.context_length,
    )
    extension = agents.bind(rollout.agent, rollout.agent_kwargs)
    try:
        made = extension(setup)
    except (ExtensionError, ChatTemplateError):
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


def check_agent(config: Config) -> None:
    """Raise ExtensionError where the run's agent cannot be loaded, made with its keyword arguments, or run.

    The rest is checked where it is made, for which a tokenizer is needed.
    """
    extension = agents.bind(config.rollout.agent, config.rollout.agent_kwargs)
    if inspect.isclass(extension.object):
        _check_run(extension.object.__name__, getattr(extension.object, "run", None), extension.label, "self")
