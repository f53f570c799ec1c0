"""A question to its final answer: the model's tool calls are run here, turn by turn.

The calls and results between a question and its answer stay with the server: a client sees only the answer, and sends
that back. ``HiddenTurns`` puts them into the history again, so that the model continues from what it really did.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from megatron_retool.config import MultiTurnConfig
from megatron_retool.trajectory import ToolCall
from sglang_rollout.agent.loop import run_call
from sglang_rollout.agent.written_calls import ParsedCall
from sglang_rollout.gateway.conversation import ConversationAnswer, Message, SpokenCall, followed_by, history_digests
from tools.tool import ToolSession

MOST_HIDDEN = 4096
"""Answers whose turns are kept; of older ones a client's history has only the text."""

Ask = Callable[[list[Message]], Awaitable[ConversationAnswer]]
Tools = Sequence[Mapping[str, Any]] | None


class Watcher(Protocol):
    """Reads along."""

    def said(self, answer: ConversationAnswer) -> None:
        """A turn is complete; its calls run next, if it has some."""

    def ran(self, call: SpokenCall, record: ToolCall, text: str) -> None:
        """A call has its result, ``text``."""


class NullWatcher:
    """A ``Watcher`` that looks away."""

    def said(self, answer: ConversationAnswer) -> None:
        """Ignore the answer."""

    def ran(self, call: SpokenCall, record: ToolCall, text: str) -> None:
        """Ignore the call."""


@dataclass
class Finished:
    """What followed a question.

    Attributes:
        answers: of the model, one for each turn; the last one is final.
        turns: messages of all that came before the last one.
        at_limit: the last one has calls that were not run: max_assistant_turns or max_tool_calls holds.
    """

    answers: list[ConversationAnswer] = field(default_factory=list)
    turns: list[Message] = field(default_factory=list)
    at_limit: bool = False

    def answer(self) -> ConversationAnswer:
        """The final answer; its usage is that of all turns, with what tools said among the sampled tokens."""
        first, last = self.answers[0], self.answers[-1]
        grown = last.prompt_tokens - first.prompt_tokens + last.sampled_tokens
        return replace(
            last,
            calls=(),
            finish_reason="length" if self.at_limit else last.finish_reason,
            prompt_tokens=first.prompt_tokens,
            cached_tokens=first.cached_tokens,
            sampled_tokens=max(grown, sum(answer.sampled_tokens for answer in self.answers)),
        )


async def until_final(
    ask: Ask,
    tools: ToolSession | None,
    limits: MultiTurnConfig,
    messages: Sequence[Message],
    watcher: Watcher | None = None,
) -> Finished:
    """Ask, run the calls of the answer side by side, ask again with their results, until there are no calls.

    Args:
        tools: None: the first answer is the final one.

    Raises:
        whatever ``ask`` raises.
    """
    watcher = watcher or NullWatcher()
    finished, ran = Finished(), 0
    while True:
        answer = await ask([*messages, *finished.turns])
        finished.answers.append(answer)
        watcher.said(answer)
        if not answer.calls or tools is None:
            return finished
        ran += len(answer.calls)
        if len(finished.answers) >= limits.max_assistant_turns or ran > limits.max_tool_calls:
            finished.at_limit = True
            return finished
        finished.turns.append(answer.message())
        results = await asyncio.gather(*(run_call(tools, _parsed(call)) for call in answer.calls))
        for call, (record, text) in zip(answer.calls, results, strict=True):
            watcher.ran(call, record, text)
            finished.turns.append({"role": "tool", "tool_call_id": call.id, "content": text})


class HiddenTurns:
    """Turns between questions and answers, by the history that a client sends back.

    Args:
        most: answers whose turns are kept; those that were not needed for the longest time are forgotten.
    """

    def __init__(self, most: int = MOST_HIDDEN) -> None:
        self._most = most
        self._turns: OrderedDict[bytes, list[Message]] = OrderedDict()

    def keep(self, history: Sequence[Message], tools: Tools, answer: ConversationAnswer, turns: list[Message]) -> None:
        """``turns`` came between ``history``, as the client sent it, and ``answer``."""
        if not turns:
            return
        self._turns[followed_by(history_digests(history, tools)[-1], answer.message())] = turns
        if len(self._turns) > self._most:
            self._turns.popitem(last=False)

    def whole(self, history: Sequence[Message], tools: Tools) -> list[Message]:
        """``history`` with the turns that are known before its answers."""
        if not self._turns:
            return list(history)
        whole: list[Message] = []
        for message, digest in zip(history, history_digests(history, tools)[1:], strict=True):
            if message["role"] == "assistant" and digest in self._turns:
                self._turns.move_to_end(digest)
                whole += self._turns[digest]
            whole.append(message)
        return whole


def _parsed(call: SpokenCall) -> ParsedCall:
    if call.error is not None:
        return ParsedCall(call.name, {}, call.arguments, call.error)
    return ParsedCall(call.name, json.loads(call.arguments), "")
