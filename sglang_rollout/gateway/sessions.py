"""An open session: its limits, its calls under way, its end."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_retool.config import SamplingConfig
from megatron_retool.trajectory import RolloutTiming
from sglang_rollout.agent.long_texts import by_size, in_thread
from sglang_rollout.agent.trajectory_state import TrajectoryState
from sglang_rollout.engine.base import EngineRejected, GenerateResult, Steering
from sglang_rollout.engine.router import NoEngineAvailable
from sglang_rollout.gateway import constraints
from sglang_rollout.gateway.continuation import continued
from sglang_rollout.gateway.conversation import (
    ConversationAnswer,
    ConversationCall,
    Message,
    TextAnswer,
    TextCall,
    history_digests,
)
from sglang_rollout.gateway.errors import (
    ApiError,
    context_overflow,
    invalid,
    limit_reached,
    no_tools,
    session_closed,
    unsupported,
)
from sglang_rollout.gateway.interface import GatewayStatistics, Sampler, Segment, SessionLimits, TurnRequest
from sglang_rollout.gateway.rendering import ContextRenderer
from sglang_rollout.gateway.session_tree import Context, SessionTree, Turn, seed_of
from sglang_rollout.gateway.text_size import BYTES_A_CHARACTER, SMALLEST_BODY_LIMIT, characters
from sglang_rollout.gateway.tool_desk import ToolDesk
from sglang_rollout.session import RolloutError
from tools.tool import ToolSession

_OF_SAMPLING = ("top_k", "min_p")
"""What a call asks for that every engine has, for ``SamplingConfig`` has it."""
CHARACTERS_OF_MOST_TOKENS = 4
"""An estimate, for messages that are too long to be tokenised."""
Tools = Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True)
class SessionSettings:
    """How a session's calls are sampled; see ``Gateway.open_session``.

    Attributes:
        steers: engines take penalties.
        grammars: engines hold answers to a grammar.
    """

    sampling: SamplingConfig
    limits: SessionLimits
    tools: list[dict[str, Any]] | None
    seed: int | None
    group_id: int
    index: int
    calls_choose_sampling: bool = False
    steers: bool = False
    grammars: bool = False


class OpenSession:
    """One agent's calls. Implements ``interface.SessionHandle``; all methods belong to one event loop.

    Args:
        root_url: the server's, without a slash at its end.
        tools: of ``run_tool``; None: it refuses.
        forget: called with the session when it is closed.

    Attributes:
        failure: of the engines, at the last call that they could not answer.
        overflowed: a call's context had no room for an answer.
        responses: histories of the Responses API by the id of their response.
    """

    def __init__(
        self,
        settings: SessionSettings,
        renderer: ContextRenderer,
        sampler: Sampler,
        statistics: GatewayStatistics,
        root_url: str,
        forget: Callable[[OpenSession], None],
        tools: ToolSession | None = None,
    ) -> None:
        self.settings = settings
        self.id, self.key = secrets.token_urlsafe(16), secrets.token_urlsafe(24)
        self.base_url = f"{root_url}/sessions/{self.id}/v1"
        self.anthropic_base_url = f"{root_url}/sessions/{self.id}"
        self.failure: Exception | None = None
        self.overflowed = False
        self.responses: dict[str, list[dict[str, Any]]] = {}
        self._renderer = renderer
        self._sampler = sampler
        self._statistics = statistics
        self._forget = forget
        self._tree = SessionTree(renderer)
        self._desk = None if tools is None else ToolDesk(tools, renderer)
        self._timing = RolloutTiming()
        self._running: set[asyncio.Task[GenerateResult]] = set()
        self._concurrent = 0
        self._promised = 0
        self._sampled_tokens = 0
        self._opened = time.monotonic()
        self._held_seconds = self._held_until = 0.0
        self._closed: list[Segment] | None = None

    def seconds_left(self) -> float:
        """Until max_wall_seconds are over, at least a second while a call is under way: it may be held, and then ends
        by its own deadline."""
        left = self._remaining_seconds()
        return max(left, 1.0) if self._running else left

    @property
    def timing(self) -> RolloutTiming:
        """Where the time of its calls went; of calls side by side each counts."""
        return self._timing if self._desk is None else self._timing.with_times_of(self._desk.timing)

    def segments(self) -> list[Segment]:
        """What has been sampled so far, in the order in which the segments began."""
        return self._tree.segments() if self._closed is None else self._closed

    async def close(self) -> list[Segment]:
        """End the session: calls under way are cancelled, later ones get status 404. A second call gives the same."""
        if self._closed is None:
            self._closed = self._tree.segments()
            self._statistics.segments += len(self._closed)
            self._forget(self)
            running = list(self._running)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            if self._desk is not None:
                await self._desk.close()
        return self._closed

    async def run_tool(self, call: Message) -> Message:
        """Run ``call``, a tool call of an answer, with the run's tools.

        Returns:
            The message of its result, to be sent with the next call.

        Raises:
            ApiError: there are no tools, a limit holds, or the session has ended.
        """
        limits = self.settings.limits
        if self._closed is not None:
            raise session_closed()
        if self._desk is None:
            raise no_tools()
        if len(self._desk.at_work) >= limits.max_concurrent_calls:
            raise limit_reached("max_concurrent_calls", limits.max_concurrent_calls)
        try:
            record, text = await self._desk.run(call, self._tree.spoken(call["id"]), self._remaining_seconds())
        except TimeoutError:
            raise limit_reached("max_wall_seconds", limits.max_wall_seconds) from None
        except asyncio.CancelledError:
            self._check_cancelled()
            raise
        self._tree.ran(call["id"], record)
        return {"role": "tool", "tool_call_id": call["id"], "content": text}

    async def answer(self, call: ConversationCall, with_tokens: bool = False) -> list[ConversationAnswer]:
        """Sample ``call.choices`` answers and keep them.

        Args:
            with_tokens: fill ``ConversationAnswer.tokens``.

        Raises:
            ApiError: the call is wrong, or beyond a limit, or the session has ended, or no engine can answer.
        """
        limits = self.settings.limits
        self._check_limits(call)
        self._check_steering(call)
        tools = self.settings.tools if call.tools is None else call.tools
        self._promised += call.choices
        self._concurrent += 1
        try:
            parent, glue_ids, digest = await self._rendered(call, tools)
            context = self._tree.context(parent, glue_ids, digest, call.choices)
            try:
                state = context.state(self.settings.group_id, self.settings.index)
                request = self._request(call, context, state, tools)
                results = await self._sampled(call, context, state, request)
            except BaseException:
                self._tree.unanswered(context)
                raise
        finally:
            self._concurrent -= 1
            self._promised -= call.choices
        if self._closed is not None:
            raise session_closed()
        answers = []
        for result in results:
            answer = self._renderer.answer(result, call.stop, state.length, with_tokens, tools, call.constraint)
            if not call.parallel_calls:
                answer = replace(answer, calls=answer.calls[:1])
            self._sampled_tokens += len(result.output_ids)
            if result.output_ids:
                self._tree.add(context, result, answer)
            answers.append(answer)
        self._statistics.calls += 1
        if any(result.finish_reason == "abort" for result in results):
            raise limit_reached("max_wall_seconds", limits.max_wall_seconds)
        return answers

    async def complete(self, call: TextCall) -> list[TextAnswer]:
        """How the prompts of ``call`` continue; nothing of it is kept, so a session that is trained on refuses it.

        Raises:
            ApiError: as ``answer``; or what is sampled here is trained on.
        """
        if not self.settings.calls_choose_sampling:
            raise ApiError(
                400,
                "completions are for a served model (megatron-retool serve): what a run samples is turns of a "
                "conversation, under the chat template: use chat/completions",
                code="unsupported_endpoint",
            )
        if self._closed is not None:
            raise session_closed()
        self._check_steering(call)
        sampling, steering = self._sampling(call), Steering(penalties=_penalties(call))
        answers = await continued(call, sampling, steering, self.settings.limits, self._renderer, self._sampler)
        self._statistics.calls += 1
        return answers

    @property
    def max_body_bytes(self) -> int:
        """The largest body, in bytes, whose messages may fit into the context."""
        limit = self.settings.limits.context_length
        if limit is None:
            return sys.maxsize
        return max(SMALLEST_BODY_LIMIT, BYTES_A_CHARACTER * limit * self._renderer.longest_token)

    def too_long(self, size: int) -> ApiError:
        """The error for messages of ``size`` characters or bytes, which cannot have room however they are tokenised."""
        limit = self.settings.limits.context_length
        assert limit is not None
        self.overflowed = True
        return context_overflow(max(size // CHARACTERS_OF_MOST_TOKENS, limit + 1), limit, "context_length")

    async def check_size(self, messages: Sequence[Message], tools: Tools) -> int:
        """Characters of a request.

        Raises:
            ApiError: more of them would be shown to the model than its longest tokens could hold.
        """
        limit = self.settings.limits.context_length
        of_tools = characters(tools)
        if limit is not None:
            most, shown = limit * self._renderer.longest_token, of_tools
            for place, size in enumerate(self._renderer.sizes(messages)):
                shown += size
                if shown > most:
                    before = messages[:place]
                    digests = await in_thread(history_digests, before, tools)
                    self._tree.overflowed(self._tree.longest_known(before, digests)[0], [])
                    raise self.too_long(of_tools + characters(messages))
        return of_tools + characters(messages)

    async def count_tokens(self, call: ConversationCall) -> int:
        """Tokens of the context in which ``call`` would be answered.

        Raises:
            ApiError: the chat template refuses the messages, they cannot have room, or the session has ended.
        """
        if self._closed is not None:
            raise session_closed()
        tools = self.settings.tools if call.tools is None else call.tools
        parent, ids, digest = await self._rendered(call, tools)
        return Context(parent, ids, digest, ()).state().length

    async def _rendered(self, call: ConversationCall, tools: Tools) -> tuple[Turn | None, list[int], bytes]:
        """The turn that a history continues, the ids that follow it, and the history's digest."""
        messages = call.messages
        size = await self.check_size(messages, tools)
        most = self.settings.limits.context_length
        digests = await by_size(size, history_digests, messages, tools)
        parent, covered = self._tree.longest_known(messages, digests)
        if parent is not None:
            ids = await by_size(
                size, self._renderer.after_turn, parent.result.output_ids, messages[covered:], most, call.thinking
            )
        else:
            known = await by_size(size, self._tree.known, messages)
            ids = await by_size(size, self._renderer.prompt, messages, tools, known, most, call.thinking)
        if self._closed is not None:
            raise session_closed()
        return parent, ids, digests[-1]

    def _check_limits(self, call: ConversationCall) -> None:
        limits = self.settings.limits
        if self._closed is not None:
            raise session_closed()
        if call.choices > limits.max_choices:
            raise invalid("n", f"at most {limits.max_choices} choices, got {call.choices}")
        if self._remaining_seconds() <= 0:
            raise limit_reached("max_wall_seconds", limits.max_wall_seconds)
        if len(self._tree) + self._promised + call.choices > limits.max_calls:
            raise limit_reached("max_calls", limits.max_calls)
        if self._concurrent >= limits.max_concurrent_calls:
            raise limit_reached("max_concurrent_calls", limits.max_concurrent_calls)
        if limits.max_sampled_tokens is not None and self._sampled_tokens >= limits.max_sampled_tokens:
            raise limit_reached("max_sampled_tokens", limits.max_sampled_tokens)

    def _steering(self, call: ConversationCall, state: TrajectoryState, tools: Tools) -> Steering:
        grammar = None
        if call.constraint is not None:
            shape = self._renderer.call_shape
            reasons = self._renderer.is_reasoning([*state.prompt_ids, *state.response_ids])
            grammar = constraints.grammar(call.constraint, tools, shape, several=call.parallel_calls, reasons=reasons)
        return Steering(grammar, _penalties(call))

    def _check_steering(self, call: ConversationCall | TextCall) -> None:
        """Refuse what changes the distribution, where it must not or cannot be changed."""
        constraint = call.constraint if isinstance(call, ConversationCall) else None
        for name in (*call.steered, *([] if constraint is None else [constraint.field])):
            if not self.settings.calls_choose_sampling:
                raise unsupported(
                    name,
                    "a run trains on the policy's own distribution; a served model (megatron-retool serve) takes it",
                )
            if name not in _OF_SAMPLING and not self.settings.steers:
                raise unsupported(name, "these engines (rollout.engine.backend) cannot; those of SGLang can")
        if constraint is not None and not self.settings.grammars:
            raise unsupported(constraint.field, "the engines have no tokenizer, which a grammar needs")

    def _request(self, call: ConversationCall, context: Context, state: TrajectoryState, tools: Tools) -> TurnRequest:
        """How each choice is sampled."""
        limits = self.settings.limits
        rooms = []
        if limits.context_length is not None:
            rooms.append((limits.context_length, state.length, "context_length"))
        if limits.max_response_length is not None:
            rooms.append((limits.max_response_length, len(state.response_ids), "max_response_length"))
        room = call.max_tokens
        if rooms:
            limit, used, name = min(rooms, key=lambda each: each[0] - each[1])
            if used >= limit:
                self.overflowed = True
                room = max(limit - used + len(context.glue_ids), 0)
                self._tree.overflowed(context.parent, context.glue_ids[:room])
                raise context_overflow(used, limit, name)
            room = limit - used if room is None else min(room, limit - used)
        if limits.max_sampled_tokens is not None:
            left = limits.max_sampled_tokens - self._sampled_tokens
            room = left if room is None else min(room, left)
        if room is None:
            raise invalid("max_tokens", "the session has no context_length, so every call must say max_tokens")
        stop = self._renderer.stop
        stop = replace(stop, strings=(*stop.strings, *call.stop))
        steering = self._steering(call, state, tools)
        return TurnRequest(room, self._sampling(call), stop, self._remaining_seconds(), steering)

    def _sampling(self, call: ConversationCall | TextCall) -> SamplingConfig:
        sampling = self.settings.sampling
        if not self.settings.calls_choose_sampling:
            return sampling
        asked = {**call.sampling, **{name: call.steered[name] for name in _OF_SAMPLING if name in call.steered}}
        if "top_p" in asked:
            # A share of 0 is the API's word for only the most probable token.
            asked["top_p"] = max(asked["top_p"], 1e-6)
        return replace(sampling, **asked)  # type: ignore[arg-type]

    async def _sampled(
        self, call: ConversationCall, context: Context, state: TrajectoryState, request: TurnRequest
    ) -> list[GenerateResult]:
        """One result for each choice, or none of them."""
        settings = self.settings
        tasks = []
        for choice, draw in enumerate(context.draws):
            # A call's own seed is meant to repeat its answer.
            of_session = seed_of(settings.seed, draw)
            seed = of_session if call.seed is None else seed_of(call.seed, choice)
            own = state.fork(settings.index, seed) if call.choices > 1 else replace(state, seed=seed)
            tasks.append(asyncio.create_task(self._held(own, request)))
            # Cancelled ones too, until they have given back what they hold at the engines.
            self._running.add(tasks[-1])
            tasks[-1].add_done_callback(self._running.discard)
        try:
            return list(await asyncio.gather(*tasks))
        except asyncio.CancelledError:
            self._check_cancelled()
            raise
        except (RolloutError, NoEngineAvailable) as error:
            if call.constraint is not None and isinstance(error.__cause__, EngineRejected):
                raise invalid(
                    call.constraint.field, f"the engine cannot hold to it: {error.__cause__.reason}"
                ) from error
            self.failure = error
            raise ApiError(503, f"the engines cannot answer: {error}", code="engines_unavailable") from error
        finally:
            for task in tasks:
                task.cancel()

    def _check_cancelled(self) -> None:
        """Raise where what was waited for was cancelled by ``close``, and not the caller by a client that has gone."""
        task = asyncio.current_task()
        if self._closed is not None and (task is None or not task.cancelling()):
            raise session_closed() from None

    async def _held(self, state: TrajectoryState, request: TurnRequest) -> GenerateResult:
        state.timing = RolloutTiming(engine=self._timing.engine)
        try:
            return await self._sampler.generate(state, request)
        finally:
            self._timing = self._timing.with_times_of(state.timing)
            # Calls that were held side by side count once.
            now = time.monotonic()
            if state.seconds < 0:
                self._held_seconds += now - min(now, max(now + state.seconds, self._held_until))
                self._held_until = now

    def _remaining_seconds(self) -> float:
        return self.settings.limits.max_wall_seconds - (time.monotonic() - self._opened - self._held_seconds)


def _penalties(call: ConversationCall | TextCall) -> dict[str, float]:
    return {name: value for name, value in call.steered.items() if name not in _OF_SAMPLING}


def session_settings(
    sampling: SamplingConfig,
    tools: Sequence[Mapping[str, Any]] | None,
    limits: SessionLimits | None,
    seed: int | None,
    group_id: int,
    index: int,
    calls_choose_sampling: bool = False,
    steers: bool = False,
    grammars: bool = False,
) -> SessionSettings:
    """The settings of a session, with copies of what the caller may change."""
    schemas = None if tools is None else [dict(tool) for tool in tools]
    return SessionSettings(
        sampling, limits or SessionLimits(), schemas, seed, group_id, index, calls_choose_sampling, steers, grammars
    )
