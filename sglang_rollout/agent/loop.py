"""One trajectory: generate a turn, run its tool calls, append the results, until there is a reason to stop.

Token in, token out. The ids that the engine sampled go into the trajectory as they are, tool results are tokenised
once (``turn_glue``), and the next request is the concatenation: nothing is ever decoded and encoded again.

``TrajectoryState`` is all there is to know about an unfinished trajectory. It holds token ids only, so a trajectory
that was paused, or whose engine died, continues at any engine; the weight version of every token stays with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_retool.config import MultiTurnConfig
from megatron_retool.rollout_rows import ROW_NAMES, own_extra_info
from megatron_retool.trajectory import FinishReason, ToolCall
from sglang_rollout.agent.call_positions import call_positions
from sglang_rollout.agent.chosen_format import make_format, parsed_calls
from sglang_rollout.agent.long_texts import by_size
from sglang_rollout.agent.tool_call_formats import ToolCallFormat
from sglang_rollout.agent.trajectory_state import TrajectoryState
from sglang_rollout.agent.turn_glue import Tokenizer, TurnGlue
from sglang_rollout.agent.written_calls import ParsedCall
from sglang_rollout.engine.base import GenerateResult, StopConditions
from tools.tool import EarlierCall, ToolCaller, ToolResult, ToolSession, TrajectoryInfo

logger = logging.getLogger(__name__)


Generate = Callable[[TrajectoryState, int, float], Awaitable[GenerateResult]]
"""(state, most new tokens, seconds until the deadline) -> what the engine sampled after the state's ids."""


@dataclass(frozen=True)
class AgentSetup:
    """What an agent is made with.

    Attributes:
        config: rollout.multi_turn.
        tokenizer: the model's.
        tools: opens the tools of a trajectory (``opened``).
        max_response_length: tokens after the prompt, tool results included.
        context_length: prompt and response together; None where the engine's is not the tighter limit.
    """

    config: MultiTurnConfig
    tokenizer: Tokenizer
    tools: ToolCaller
    max_response_length: int
    context_length: int | None = None


class Agent(Protocol):
    """Drives trajectories: samples turns (``generate``, then ``TrajectoryState.append_sampled``), appends what is not
    sampled (``append_unsampled``) and says when one ends (``finish_reason``). One object serves all trajectories.

    Made as ``agent(setup: AgentSetup, **rollout.agent_kwargs)``.
    """

    stop: StopConditions
    """Where the engine ends a turn."""

    async def run(self, state: TrajectoryState, generate: Generate, paused: Callable[[], bool]) -> bool:
        """Go on until the trajectory is finished (True; finish_reason is set) or paused (False; called again later).

        All that it must know later is in ``state``. ``paused()`` true, or a result whose finish_reason is "abort", asks
        for a return at the next place where it can be continued. What ``generate`` raises goes to the caller.
        """
        ...


class AgentLoop:
    """The agent of tool calls: a turn, its calls side by side, their results, the next turn.

    A subclass may change ``sample_turn``, ``answer_calls``, or what ``run`` does with them.

    Raises:
        ExtensionError, ChatTemplateError: the tool-call format cannot be made, or not be used with the chat template.
    """

    def __init__(self, setup: AgentSetup) -> None:
        self.config = setup.config
        self.tokenizer = setup.tokenizer
        self.tools = setup.tools
        self.max_response_length = setup.max_response_length
        self.context_length = setup.context_length
        self.format: ToolCallFormat = make_format(setup.config)
        self.glue = TurnGlue(setup.tokenizer, self.format, setup.config.max_tool_response_tokens)
        self.stop = stop_conditions(self.format, setup.tokenizer, self.glue.end_of_turn_id)

    def remaining(self, state: TrajectoryState) -> int:
        """Tokens that the response may still grow by."""
        remaining = self.max_response_length - len(state.response_ids)
        if self.context_length is not None:
            remaining = min(remaining, self.context_length - state.length)
        return remaining

    async def run(self, state: TrajectoryState, generate: Generate, paused: Callable[[], bool] = lambda: False) -> bool:
        """Go on until the trajectory is finished (True; finish_reason is set) or paused (False; call again later).

        Raises:
            whatever ``generate`` raises; ``state`` is then as it was before the request.
        """
        if state.finish_reason is None and paused():
            return False
        async with opened(self.tools, state, self.config.max_wall_seconds) as tools:
            while state.finish_reason is None:
                if paused():
                    return False
                began = time.monotonic()
                deadline = self.config.max_wall_seconds - state.seconds
                try:
                    if deadline <= 0:
                        state.finish_reason = FinishReason.ABORTED
                    elif state.pending_calls:
                        await self.answer_calls(state, tools, deadline)
                    elif not await self.sample_turn(state, generate, deadline):
                        return False
                finally:
                    state.seconds += time.monotonic() - began
        return True

    async def sample_turn(self, state: TrajectoryState, generate: Generate, deadline: float) -> bool:
        """Sample the rest of the turn and decide what it means: ``state.finish_reason``, or calls that are pending.

        False: the request came back unfinished.
        """
        remaining = self.remaining(state)
        if remaining <= 0:
            state.finish_reason = FinishReason.LENGTH
            return True
        began, counted = time.monotonic(), state.seconds
        result = await generate(state, remaining, deadline)
        if not self.ends_turn(state, result, time.monotonic() - began - (counted - state.seconds), deadline):
            return state.finish_reason is not None
        ended = result.matched_stop == self.glue.end_of_turn_id
        calls = []
        if ended == self.format.uses_chat_template:
            text = self._turn_text(state, without_last=ended)
            calls = parsed_calls(self.format, text, lambda: _names(self.tools.schemas(state.extra_info)))
        if not calls:
            state.finish_reason = FinishReason.STOP
        elif (
            state.turn + 1 >= self.config.max_assistant_turns
            or len(state.tool_calls) + len(calls) > self.config.max_tool_calls
        ):
            state.finish_reason = FinishReason.TOOL_LIMIT
            if self.config.at_tool_limit == "append_eos" and not ended and self.remaining(state) > 0:
                state.append_unsampled([self.glue.end_of_turn_id])
        elif self.remaining(state) <= 0:
            state.finish_reason = FinishReason.LENGTH
        else:
            state.pending_calls = calls
        return True

    def ends_turn(self, state: TrajectoryState, result: GenerateResult, seconds: float, deadline: float) -> bool:
        """Append what was sampled. Whether the turn is whole; if not, ``state.finish_reason`` is set where no more can
        follow.

        Args:
            seconds: that the request took, what engines that failed have cost left out.
        """
        state.append_sampled(result)
        if result.finish_reason == "abort":
            if seconds >= deadline:
                state.finish_reason = FinishReason.ABORTED
            return False
        if result.finish_reason == "length":
            state.finish_reason = FinishReason.LENGTH
            return False
        return True

    async def answer_calls(self, state: TrajectoryState, tools: ToolSession, deadline: float) -> None:
        """Run the pending calls side by side and append their results; the next turn may begin.

        Cancelled while the calls run, it leaves the state as it was, and they run again later.
        """
        calls, began = state.pending_calls, time.monotonic()
        try:
            async with asyncio.timeout(deadline):
                records, texts = zip(*await asyncio.gather(*(run_call(tools, call) for call in calls)), strict=True)
        except TimeoutError:
            state.finish_reason = FinishReason.ABORTED
            return
        finally:
            state.timing = state.timing.plus(tools=time.monotonic() - began)
        rendered = await by_size(sum(map(len, texts)), self.glue.render, texts, [call.name for call in calls])
        state.pending_calls = []
        before = call_positions(self.tokenizer, state.response_ids[state.turn_start :], [call.raw for call in calls])
        for record, position, tokens, truncated in zip(
            records, before, rendered.result_tokens, rendered.truncated, strict=True
        ):
            record.position = -1 if position < 0 else state.turn_start + position
            record.output_tokens, record.output_truncated = tokens, truncated
            state.tool_calls.append(record)
        remaining = self.remaining(state)
        state.append_unsampled(rendered.ids[:remaining])
        if len(rendered.ids) >= remaining:
            state.finish_reason = FinishReason.LENGTH
            return
        state.turn += 1
        state.turn_start = len(state.response_ids)

    def _turn_text(self, state: TrajectoryState, without_last: bool) -> str:
        ids = state.response_ids[state.turn_start : -1 if without_last else None]
        return self.tokenizer.decode(ids, skip_special_tokens=False)


@contextlib.asynccontextmanager
async def opened(tools: ToolCaller, state: TrajectoryState, max_wall_seconds: float) -> AsyncIterator[ToolSession]:
    """The trajectory's tools, open until the block is left, in whatever way.

    Where the trajectory is finished by then, what the tools returned at their close is in reward_info["tools"]. One
    that is paused opens them again when it resumes, and a fork opens its own. Opening counts as time of the trajectory;
    where it takes all that is left, the trajectory is aborted.
    """
    began = time.monotonic()
    session: ToolSession = _NoTools()
    try:
        async with asyncio.timeout(max_wall_seconds - state.seconds):
            session = await tools.open(_info(state))
    except TimeoutError:
        state.finish_reason = FinishReason.ABORTED
    finally:
        elapsed = time.monotonic() - began
        state.seconds, state.timing = state.seconds + elapsed, state.timing.plus(tools=elapsed)
    try:
        yield session
    finally:
        returned: dict[str, Any] = {}
        try:
            await session.close(returned)
        finally:
            if state.finish_reason is not None and returned:
                state.reward_info["tools"] = returned


def row_of(state: TrajectoryState) -> dict[str, Any]:
    """The data's row as agents and environments see it: messages, data_source, ground_truth, uid, extra_info (what else
    the row carries), group_id, index (of the rollout in its group) and seed (of the rollout's sampling; without
    rollout.engine.random_seed a number of its own, which the row and the rollout's place fix)."""
    seed = state.seed
    if seed is None:
        place = f"{state.extra_info.get('uid')}/{state.group_id}/{state.index}"
        seed = int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "big") >> 1
    return {
        "messages": [dict(message) for message in state.messages],
        **{name: state.extra_info.get(name) for name in ROW_NAMES},
        "extra_info": own_extra_info(state.extra_info),
        "group_id": state.group_id,
        "index": state.index,
        "seed": seed,
    }


def _names(schemas: Sequence[Mapping[str, Any]]) -> set[str]:
    return {schema["function"]["name"] for schema in schemas}


class _NoTools:
    async def call(self, name: str, arguments: Any) -> ToolResult:
        return ToolResult("error", "Error: the tools could not be opened in time")

    async def close(self, returned: dict[str, Any]) -> None:
        return None


def _info(state: TrajectoryState) -> TrajectoryInfo:
    earlier: dict[str, list[EarlierCall]] = {}
    for call in state.tool_calls:
        if call.status != "parse_error":
            earlier.setdefault(call.name, []).append(EarlierCall(json.loads(call.arguments), call.status))
    calls = {name: tuple(values) for name, values in earlier.items()}
    return TrajectoryInfo(state.group_id, state.index, state.extra_info, calls)


async def run_call(tools: ToolSession, call: ParsedCall) -> tuple[ToolCall, str]:
    """One call as it happened, and what the model reads of it."""
    arguments = call.raw if call.error else json.dumps(call.arguments, ensure_ascii=False)
    if call.error:
        return ToolCall(call.name, arguments, "parse_error", 0.0), call.error
    began, started = time.monotonic(), time.time()
    try:
        result = await tools.call(call.name, call.arguments)
        status, text, seconds = result.status, result.text, result.seconds
    except (Exception, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
            raise  # of this task, and not of one that the tool waited for
        # One broken tool must not end a step of hundreds of trajectories; it is counted and the model reads of it.
        logger.exception("tool %s raised", call.name)
        status, text, seconds = "error", f"Error: the tool failed: {type(error).__name__}", time.monotonic() - began
    return ToolCall(call.name, arguments, status, seconds, started=started), text


def stop_conditions(call_format: ToolCallFormat, tokenizer: Tokenizer, end_of_turn_id: int) -> StopConditions:
    """Where the engine must end a turn. A closing tag that is one token stops by id, others by string."""
    token_ids = [end_of_turn_id]
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in token_ids:
        token_ids.append(tokenizer.eos_token_id)
    strings = []
    for tag in call_format.closing_tags:
        ids = tokenizer.encode(tag, add_special_tokens=False)
        if len(ids) == 1:
            token_ids.append(ids[0])
        else:
            strings.append(tag)
    return StopConditions(tuple(token_ids), tuple(strings))
