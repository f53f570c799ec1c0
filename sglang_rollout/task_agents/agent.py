"""Runs task agents: a session of the gateway for each rollout, whose segments become the rollout's rows.

    runner = TaskAgents(config, tokenizer, tools)
    async with runner.serving(sampler, sampling, "train") as agent:
        await agent.run(state, generate, paused)

Whatever the agent does, its rollout ends: with a typed outcome in ``reward_info["agent"]`` and the rows of what was
sampled until then. A rollout that is stopped from outside (a pause, the end of a stream) leaves its state as it was,
and starts again where it is continued.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_retool.config import Config, SamplingConfig
from megatron_retool.registry import Extension
from megatron_retool.rollout_rows import AGENT_KEY
from megatron_retool.rollout_rows import AgentOutcome as Outcome
from megatron_retool.trajectory import TOKEN_COLUMNS, FinishReason, Trajectory
from sglang_rollout.agent.agents import task_agents
from sglang_rollout.agent.loop import Generate, opened
from sglang_rollout.agent.trajectory_state import TrajectoryState
from sglang_rollout.agent.turn_glue import Tokenizer
from sglang_rollout.gateway import shortcut
from sglang_rollout.gateway.interface import Sampler, Segment, SessionHandle, SessionLimits
from sglang_rollout.gateway.server import Gateway
from sglang_rollout.task_agents.client import MODEL, ClientSettings, task_of
from sglang_rollout.task_agents.function import is_asynchronous, run_function
from sglang_rollout.task_agents.outcome import AgentEnd
from sglang_rollout.task_agents.program import ProgramLimits, run_program
from sglang_rollout.task_agents.usage import UsageWatch
from tools.tool import ToolCaller

# Programs and threads take memory and cores of this machine, which are not known to suffice for more.
_PROCESSES_OR_THREADS = 64


class TaskAgents:
    """The task agents of a run: what is common to all its streams.

    Args:
        config: its rollout.agent is a function or a program.
        tokenizer: the model's.
        tools: opened for each rollout, whose agent may call them through the gateway.

    Raises:
        ExtensionError: the function cannot be loaded or called.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, tools: ToolCaller) -> None:
        rollout = config.rollout
        self.config = config
        self.tokenizer = tokenizer
        self.tools = tools
        self.function: Extension[Callable[..., Any]] | None = None
        if isinstance(rollout.agent, str):
            shortcut.install()  # before the function's module makes clients
            self.function = task_agents.bind(rollout.agent, rollout.agent_kwargs)
        # What a row may be long: the learner's micro-batches hold no more.
        longest = config.data.max_prompt_length + config.data.max_response_length
        self.seconds = rollout.multi_turn.max_wall_seconds
        self.limits = SessionLimits(
            context_length=min(longest, rollout.engine.context_length or longest),
            max_response_length=config.data.max_response_length,
            max_calls=rollout.agent_limits.max_calls,
            max_sampled_tokens=rollout.agent_limits.max_sampled_tokens,
            max_wall_seconds=self.seconds,
        )
        self.watch = UsageWatch()
        places = rollout.agent_limits.max_concurrent
        if places is None and self.function is not None and is_asynchronous(self.function):
            # With fewer the engines would decode smaller batches than they do for the built-in loop.
            places = rollout.max_concurrent_trajectories * rollout.engine.count
        self.places = asyncio.Semaphore(places or _PROCESSES_OR_THREADS)

    @contextlib.asynccontextmanager
    async def serving(
        self, sampler: Sampler, sampling: SamplingConfig, purpose: str, *, stop_strings: bool
    ) -> AsyncIterator[TaskAgent]:
        """The agent of one stream; its calls are sampled by ``sampler`` as ``sampling`` says.

        Args:
            purpose: what a task says of it.
            stop_strings: whether engines can end a turn at a text.
        """
        async with Gateway(
            sampler, self.tokenizer, self.config.rollout.multi_turn, model=MODEL, stop_strings=stop_strings
        ) as gateway:
            with shortcut.leads_to(gateway.transport):
                yield TaskAgent(self, gateway, sampling, purpose)


class TaskAgent:
    """Runs the rollouts of one stream; in the manager it has the place of an ``Agent``."""

    def __init__(self, shared: TaskAgents, gateway: Gateway, sampling: SamplingConfig, purpose: str) -> None:
        self._shared = shared
        self._gateway = gateway
        self._sampling = sampling
        self._purpose = purpose

    async def run(self, state: TrajectoryState, generate: Generate, paused: Callable[[], bool]) -> bool:
        """One whole rollout; ``state`` gets its rows and its finish reason. False: it is not to begin now.

        Raises:
            RolloutError, NoEngineAvailable: the engines could not answer, so that no other agent can continue either.
        """
        async with self._shared.places:
            if paused():
                return False
            began = time.monotonic()
            # Whoever stops the rollout finds it as it was.
            work = state.unstarted()
            async with opened(self._shared.tools, work, self._shared.seconds) as tools:
                # Opening the tools took time of the rollout.
                left = max(self._shared.seconds - work.seconds, 0.0)
                handle = self._gateway.open_session(
                    self._sampling,
                    tool_session=tools,
                    limits=replace(self._shared.limits, max_wall_seconds=left),
                    seed=state.seed,
                    group_id=state.group_id,
                    index=state.index,
                )
                try:
                    end = await self._ended(work, handle)
                finally:
                    segments = await handle.close()
                if handle.failure is not None:
                    raise handle.failure
                work.finish_reason = FinishReason.STOP
            work.timing = work.timing.with_times_of(handle.timing)
            seconds = time.monotonic() - began
        if end.outcome is Outcome.CRASH and handle.overflowed:
            end = replace(end, outcome=Outcome.CONTEXT_OVERFLOW)
        if end.outcome is Outcome.TIMEOUT:
            end = replace(end, message=f"not done after {self._shared.seconds:g} s")
        state.seconds += seconds
        state.rows = rows_of(work, segments, end, seconds)
        state.finish_reason = state.rows[-1].finish_reason
        return True

    async def _ended(self, state: TrajectoryState, handle: SessionHandle) -> AgentEnd:
        shared = self._shared
        client = ClientSettings(handle.base_url, handle.anthropic_base_url, handle.key, self._gateway.transport)
        task = task_of(state, self._purpose, shared.tools.schemas(state.extra_info))
        if shared.function is not None:
            return await run_function(shared.function, task, client, handle.seconds_left)
        limits = shared.config.rollout.agent_limits
        allowed = ProgramLimits(handle.seconds_left, limits.memory_mb, limits.max_processes)
        return await run_program(shared.config.rollout.command, task, client, allowed, shared.watch)


_FINISH = {
    Outcome.CRASH: FinishReason.ABORTED,
    Outcome.TIMEOUT: FinishReason.ABORTED,
    Outcome.RESOURCES: FinishReason.ABORTED,
    Outcome.CONTEXT_OVERFLOW: FinishReason.LENGTH,
}
"""Of the rollout's last row; other outcomes leave the last segment's."""


def rows_of(state: TrajectoryState, segments: Sequence[Segment], end: AgentEnd, seconds: float) -> list[Trajectory]:
    """The rows of a rollout, one for each segment, in their order; one without a response where nothing was sampled.

    Turns are numbered over the rollout, in the order in which they were answered. The first row has its timing.
    """
    about: dict[str, Any] = {"outcome": end.outcome.value, "seconds": seconds}
    if end.message:
        about["message"] = end.message
    if end.result is not None:
        about["result"] = dict(end.result)
    rows = [_row(state, segment, number) for number, segment in enumerate(segments)]
    if not rows:
        rows = [replace(state, finish_reason=_nothing_sampled(end)).to_trajectory()]
    rows[-1].finish_reason = _FINISH.get(end.outcome, rows[-1].finish_reason)
    for row in rows:
        row.reward_info = {**state.reward_info, AGENT_KEY: about}
        row.extra_info = dict(state.extra_info)
        row.timing = None
    rows[0].timing = state.timing
    return rows


def _nothing_sampled(end: AgentEnd) -> FinishReason:
    return FinishReason.STOP if end.outcome is Outcome.FINISHED else FinishReason.ABORTED


def _row(state: TrajectoryState, segment: Segment, number: int) -> Trajectory:
    calls = np.array(segment.calls, np.int64)
    turns = segment.turn_ids.astype(np.int64)
    if len(calls):
        turns = np.where(turns >= 0, calls[np.maximum(turns, 0)], -1)
    columns = {name: getattr(segment, name) for name in TOKEN_COLUMNS} | {"turn_ids": turns}
    return Trajectory(
        **columns,
        group_id=state.group_id,
        index=state.index,
        finish_reason=segment.finish_reason,
        routed_experts=segment.routed_experts,
        tool_calls=list(segment.tool_calls),
        segment=number,
    )
