"""The agent of environments: a turn, what the environment says to it, the next turn, and the environment's reward.

Turns are sampled and appended as ``AgentLoop`` does it, token for token. What differs is where the prompt, the tools,
the answers and the reward come from: an ``Environment``, made for each trajectory. However it fails, the trajectory
ends with a typed outcome in ``reward_info["agent"]``, where the reward manager also finds what ``score`` returned.

Nothing of an environment is kept where a trajectory stops for a while or is forked. One that ``replays`` is started
over and led through the turns that the trajectory has, which are read off its token ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_retool.config import ConfigError, DataConfig, RolloutConfig
from megatron_retool.registry import Extension, ExtensionError
from megatron_retool.rollout_rows import AGENT_KEY
from megatron_retool.rollout_rows import AgentOutcome as Outcome
from megatron_retool.trajectory import FinishReason, ToolCall
from sglang_rollout.agent.call_positions import call_positions
from sglang_rollout.agent.chosen_format import parsed_calls
from sglang_rollout.agent.long_texts import by_size
from sglang_rollout.agent.loop import AgentLoop, AgentSetup, Generate, row_of
from sglang_rollout.agent.trajectory_state import MAX_EMPTY_ANSWERS, TrajectoryState
from sglang_rollout.agent.written_calls import ParsedCall
from sglang_rollout.environments.base import Action, Call, Environment, Message, environments
from sglang_rollout.environments.episode import EnvironmentFailure, Episode
from sglang_rollout.gateway.errors import ApiError
from sglang_rollout.gateway.rendering import ContextRenderer
from sglang_rollout.gateway.text_size import characters
from sglang_rollout.task_agents.outcome import AgentEnd
from tools.arguments import typed_arguments
from tools.registry import refused
from tools.tool import ToolResult


@dataclass(frozen=True)
class _Turn:
    """A whole turn: what the environment gets, and what the policy reads about calls that it does not get."""

    action: Action
    written: Sequence[ParsedCall]
    refusals: Sequence[ToolResult | None]


class EnvironmentLoop(AgentLoop):
    """Leads trajectories through environments.

    Args:
        setup: of any agent.
        made: makes the environment of a trajectory.
        call_seconds: rollout.environment_timeout_seconds.
        max_prompt_length: tokens that a prompt may have.

    Raises:
        ExtensionError: rollout.multi_turn.format writes results outside the chat template.
    """

    def __init__(
        self,
        setup: AgentSetup,
        made: Extension[Callable[..., Any]],
        call_seconds: float,
        max_prompt_length: int,
    ) -> None:
        super().__init__(setup)
        self.renderer = ContextRenderer(setup.tokenizer, setup.config)
        self._made = made
        self._call_seconds = call_seconds
        self._max_prompt_length = max_prompt_length

    async def run(self, state: TrajectoryState, generate: Generate, paused: Callable[[], bool] = lambda: False) -> bool:
        """See ``Agent``."""
        if state.finish_reason is not None:
            return True
        if paused():
            return False
        episode = Episode(self._made, self._call_seconds)
        try:
            try:
                end = await self._played(state, episode, generate, paused)
                if end is None:
                    return False
            except EnvironmentFailure as failure:
                end = failure.end
                overflow = end.outcome is Outcome.CONTEXT_OVERFLOW
                state.finish_reason = FinishReason.LENGTH if overflow else FinishReason.ABORTED
            about: dict[str, Any] = {"outcome": end.outcome.value, "seconds": state.seconds}
            if end.message:
                about["message"] = end.message
            if end.result is not None:
                about["result"] = dict(end.result)
            state.reward_info[AGENT_KEY] = about
            return True
        finally:
            await episode.close()

    async def _played(
        self, state: TrajectoryState, episode: Episode, generate: Generate, paused: Callable[[], bool]
    ) -> AgentEnd | None:
        """The end of the episode and its reward; None: paused.

        Raises:
            EnvironmentFailure: there is no more to be had of the environment.
        """
        with _working(state, tools=True):
            await self._begin(state, episode)
        whole, empty, out_of_time = self._turn_is_whole(state), 0, False
        while state.finish_reason is None:
            if paused():
                return None
            deadline = self.config.max_wall_seconds - state.seconds
            if deadline <= 0:
                state.finish_reason, out_of_time = FinishReason.ABORTED, True
            elif whole:
                with _working(state, tools=True):
                    await self._answer(state, episode)
                whole = False
            else:
                length = len(state.response_ids)
                with _working(state):
                    whole = await self.sample_turn(state, generate, deadline)
                out_of_time = state.finish_reason is FinishReason.ABORTED
                # An engine may end a request by itself: what is missing is sampled again.
                empty = 0 if len(state.response_ids) > length else empty + 1
                if empty == MAX_EMPTY_ANSWERS and state.finish_reason is None:
                    raise RuntimeError(f"the engine ended a request {empty} times without a token")
                await asyncio.sleep(0)
        with _working(state, tools=True):
            end = await episode.score()
        if out_of_time and end.outcome is Outcome.FINISHED:
            message = f"not done after {self.config.max_wall_seconds:g} s (rollout.multi_turn.max_wall_seconds)"
            end = replace(end, outcome=Outcome.TIMEOUT, message=message)
        return end

    async def sample_turn(self, state: TrajectoryState, generate: Generate, deadline: float) -> bool:
        """Sample the rest of the turn. Whether it is whole; see ``ends_turn``."""
        remaining = self.remaining(state)
        if remaining <= 0:
            state.finish_reason = FinishReason.LENGTH
            return False
        began, counted = time.monotonic(), state.seconds
        result = await generate(state, remaining, deadline)
        return self.ends_turn(state, result, time.monotonic() - began - (counted - state.seconds), deadline)

    async def _begin(self, state: TrajectoryState, episode: Episode) -> None:
        """Reset, with the prompt that it gives; then the turns that the trajectory has already."""
        start = await episode.reset(row_of(state), self._seconds_left(state))
        if start.messages is not None or episode.tools:
            messages = state.messages if start.messages is None else start.messages
            if not messages:
                raise EnvironmentFailure(Outcome.CRASH, "reset gave tools and no messages, and the data have none")
            try:
                given, tools = [dict(message) for message in messages], episode.tools or None
                ids = await by_size(characters([given, tools]), self.renderer.prompt, given, tools)
            except ApiError as error:
                raise EnvironmentFailure(Outcome.CRASH, f"reset: {error}") from error
            if len(ids) > self._max_prompt_length:
                raise EnvironmentFailure(
                    Outcome.CONTEXT_OVERFLOW,
                    f"reset: a prompt of {len(ids)} tokens, and data.max_prompt_length={self._max_prompt_length}",
                )
            state.prompt_ids, state.own_prompt = ids, True
        for turn in range(state.turn):
            await self._replay(state, episode, turn)

    async def _replay(self, state: TrajectoryState, episode: Episode, turn: int) -> None:
        places = [place for place, number in enumerate(state.turn_ids) if number == turn]
        first, last = places[0], places[-1] + 1
        ids = state.response_ids[first:last]
        result = await self._answered(ids, self._turn(ids, episode), episode, self._seconds_left(state))
        if result is None or result != state.response_ids[last : last + len(result)]:
            raise EnvironmentFailure(
                Outcome.CRASH,
                f"{self._made.label} says that it replays, and answered turn {turn} otherwise when it was gone through "
                "again: set replays to False",
            )

    async def _answer(self, state: TrajectoryState, episode: Episode) -> None:
        """Give the turn to the environment and append what it says; the next turn may begin.

        Cancelled meanwhile, it leaves the state as it was.
        """
        ids = state.response_ids[state.turn_start :]
        turn = self._turn(ids, episode)
        if turn.written and len(state.tool_calls) + len(turn.written) > self.config.max_tool_calls:
            state.finish_reason = FinishReason.TOOL_LIMIT
            return
        began, started = time.monotonic(), time.time()
        answer = await self._answered(ids, turn, episode, self._seconds_left(state))
        seconds = time.monotonic() - began
        before = call_positions(self.tokenizer, ids, [call.raw for call in turn.written])
        for call, refusal, position in zip(turn.written, turn.refusals, before, strict=True):
            arguments = call.raw if call.error else json.dumps(call.arguments, ensure_ascii=False)
            status = "ok" if refusal is None else "parse_error" if call.error else refusal.status
            record = ToolCall(call.name, arguments, status, seconds if refusal is None else 0.0, started=started)
            record.position = -1 if position < 0 else state.turn_start + position
            state.tool_calls.append(record)
        if answer is None:
            state.finish_reason = FinishReason.STOP
        elif state.turn + 1 >= self.config.max_assistant_turns:
            state.finish_reason = FinishReason.TOOL_LIMIT
        else:
            remaining = self.remaining(state)
            state.append_unsampled(answer[: max(remaining, 0)])
            if len(answer) >= remaining:
                state.finish_reason = FinishReason.LENGTH
                return
            state.turn += 1
            state.turn_start = len(state.response_ids)

    async def _answered(self, ids: Sequence[int], turn: _Turn, episode: Episode, seconds: float) -> list[int] | None:
        """Token ids between a turn of ``ids`` and the next one; None: the episode is over.

        A turn whose calls are all refused is not shown to the environment.
        """
        messages: list[Message] = []
        if turn.action.calls or not turn.written:
            step = await episode.step(turn.action, seconds)
            if step.done:
                return None
            messages = list(step.messages)
        results = [messages.pop(0)["content"] if refusal is None else refusal.text for refusal in turn.refusals]
        try:
            return await by_size(characters([results, messages]), self._shown, ids, results, messages)
        except ApiError as error:
            raise EnvironmentFailure(Outcome.CRASH, f"step: {error}") from error

    def _shown(self, ids: Sequence[int], results: Sequence[str], messages: Sequence[Message]) -> list[int]:
        """Token ids of tool results and messages after a turn of ``ids``."""
        shown = [{"role": "tool", "content": text} for text in results]
        # An environment may repeat what the policy wrote: no message of it may forge another one.
        shown += [{"role": each["role"], "content": self.glue.limited(each["content"])} for each in messages]
        return self.renderer.after_turn(ids, shown)

    def _turn(self, ids: Sequence[int], episode: Episode) -> _Turn:
        visible = ids[:-1] if ids and ids[-1] in self.stop.token_ids else ids
        text = self.tokenizer.decode(list(visible), skip_special_tokens=False)
        # As the built-in loop: what ends otherwise than a turn of the template is no call.
        ended = bool(ids) and ids[-1] == self.glue.end_of_turn_id
        parsed = parsed_calls(self.format, text, lambda: episode.validators) if ended else []
        written = [_typed(call, episode) for call in parsed]
        refusals = [
            ToolResult("bad_arguments", call.error)
            if call.error
            else refused(call.name, call.arguments, episode.validators)
            for call in written
        ]
        calls = tuple(
            Call(call.name, call.arguments) for call, refusal in zip(written, refusals, strict=True) if refusal is None
        )
        return _Turn(Action(text, calls), written, refusals)

    def _turn_is_whole(self, state: TrajectoryState) -> bool:
        """Whether the turn was sampled to its end, and its answer is missing."""
        ids = state.response_ids
        return len(ids) > state.turn_start and ids[-1] in self.stop.token_ids

    def _seconds_left(self, state: TrajectoryState) -> float:
        return max(self.config.max_wall_seconds - state.seconds, 0.0)


def _typed(call: ParsedCall, episode: Episode) -> ParsedCall:
    validator = episode.validators.get(call.name)
    return call if validator is None else replace(call, arguments=typed_arguments(call.arguments, validator.schema))


@contextlib.contextmanager
def _working(state: TrajectoryState, tools: bool = False) -> Iterator[None]:
    """The block's time is the trajectory's."""
    began = time.monotonic()
    try:
        yield
    finally:
        elapsed = time.monotonic() - began
        state.seconds += elapsed
        if tools:
            state.timing = state.timing.plus(tools=elapsed)


def environment_of(rollout: RolloutConfig) -> Extension[Callable[..., Any]]:
    """What rollout.environment names, with its keyword arguments; one is made and dropped.

    Raises:
        ExtensionError: it cannot be loaded or made, is no Environment, or cannot do what the configuration asks of it.
    """
    assert rollout.environment is not None
    made = environments.bind(rollout.environment, rollout.environment_kwargs)
    try:
        environment = made()
    except (ConfigError, ExtensionError):
        raise
    except Exception as error:
        raise ExtensionError(f"{made.label}: {made.raised(error)}") from error
    if not isinstance(environment, Environment):
        raise ExtensionError(
            f"{made.label}: {type(environment).__name__} is no environment: derive it from "
            f"{Environment.__module__}.{Environment.__name__}"
        )
    for setting in ("partial", "branching"):
        if getattr(rollout, setting).enable and not environment.replays:
            what = "continues with" if setting == "partial" else "forks"
            raise ExtensionError(
                f"{made.label}: rollout.{setting} {what} trajectories, and {type(environment).__name__} cannot be gone "
                f"through again: set rollout.{setting}.enable to false, or replays = True in it where the same row and "
                "the same turns always give the same messages"
            )
    return made


def make_environment_loop(rollout: RolloutConfig, data: DataConfig, setup: AgentSetup) -> EnvironmentLoop:
    """The agent of rollout.environment.

    Raises:
        ExtensionError: see ``environment_of`` and ``EnvironmentLoop``.
    """
    made = environment_of(rollout)
    return EnvironmentLoop(setup, made, rollout.environment_timeout_seconds, data.max_prompt_length)
