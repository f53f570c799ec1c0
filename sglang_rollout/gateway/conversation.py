"""What a call asks for and what it is answered, whichever API it came by; and when two messages are the same.

A message is a dictionary as chat templates take them: role, content (a text), ``tool_calls`` of an assistant with
arguments as an object (as text where it is none), ``tool_call_id`` of a tool's result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_retool.data.chat_template import normalize_messages
from untrusted import without_surrogates

Message = dict[str, Any]


@dataclass(frozen=True)
class Constraint:
    """What an answer must be.

    Attributes:
        field: of the request, which asks for it.
        schema: of the answer's text; None: the answer is tool calls.
        name: of the tool that must be called; None: any of the request's.
    """

    field: str
    schema: Mapping[str, Any] | None = None
    name: str | None = None


@dataclass(frozen=True)
class ConversationCall:
    """A request, translated.

    Attributes:
        tools: schemas in Chat Completions' form; None: the session's.
        max_tokens: most tokens of each answer; None: as many as there is room for.
        stop: texts at which an answer ends.
        choices: answers that are wanted.
        sampling: temperature and top_p that it asks for; whether they count is the session's to say.
        thinking: whether the model is to think before it answers; None: as the chat template has it.
        parallel_calls: an answer may have several tool calls; otherwise it has its first one.
        constraint: what an answer must be; None: anything.
        steered: penalties, top_k and min_p that it asks for; only a served model takes some of them.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    choices: int = 1
    model: str = ""
    sampling: Mapping[str, float] = field(default_factory=dict)
    thinking: bool | None = None
    parallel_calls: bool = True
    constraint: Constraint | None = None
    steered: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TextCall:
    """A request to continue with texts, without a chat template.

    Attributes:
        prompts: texts, or token ids.
        max_tokens: most tokens that follow a prompt; 0: none.
        choices: answers to each prompt.
        echo: an answer begins with its prompt.
        log_probs: likeliest tokens to show at each place; None: no log-probs.
        stop, seed, model, sampling, steered: as of ``ConversationCall``.
    """

    prompts: list[str | list[int]]
    max_tokens: int
    choices: int = 1
    echo: bool = False
    log_probs: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    model: str = ""
    sampling: Mapping[str, float] = field(default_factory=dict)
    steered: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TextToken:
    """A token of a ``TextAnswer``.

    Attributes:
        log_prob: at temperature 1; None: of a prompt's first token.
        likeliest: (text, log-prob) of the likeliest tokens at its place; empty where none were asked for.
    """

    text: str
    log_prob: float | None
    likeliest: list[tuple[str, float]]


@dataclass(frozen=True)
class TextAnswer:
    """How a text continues.

    Attributes:
        text: with the prompt where the call says echo.
        finish_reason: stop or length.
        tokens: of the text and the end, where the call asks for log-probs.
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    sampled_tokens: int
    tokens: list[TextToken] | None = None


@dataclass(frozen=True)
class SpokenCall:
    """A tool call that the model wrote.

    Attributes:
        arguments: JSON; where the call is malformed what the model wrote.
        raw: the text that the call was read from.
        error: what is wrong with it; None: nothing.
    """

    id: str
    name: str
    arguments: str
    raw: str
    error: str | None = None


@dataclass(frozen=True)
class ConversationAnswer:
    """A turn as clients see it.

    Attributes:
        content: its text without tool calls and end of turn.
        finish_reason: stop, length or tool_calls.
        matched_stop: the text of ``ConversationCall.stop`` at which it ended.
        tokens: (text, log-prob) of each sampled token.
    """

    content: str
    calls: tuple[SpokenCall, ...]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    sampled_tokens: int
    matched_stop: str | None = None
    tokens: list[tuple[str, float]] = field(default_factory=list)

    def message(self) -> Message:
        """As it is expected back in the history of the next call."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls
        ]
        message: Message = {"role": "assistant", "content": self.content, "tool_calls": calls}
        return normalize_messages([message])[0]


def call_ids(message: Mapping[str, Any]) -> tuple[str, ...]:
    """The ids of an assistant's tool calls."""
    return tuple(str(call.get("id")) for call in message.get("tool_calls", ()))


def in_call_order(messages: Sequence[Message]) -> list[Message]:
    """``messages`` with the results of each turn's calls in the order of the calls, by their ids.

    A chat template shows results by their place, so that a client's own order would give calls each other's results.
    """
    ordered: list[Message] = []
    results: list[Message] = []
    places: dict[str, int] = {}

    def flush() -> None:
        results.sort(key=lambda result: places.get(str(result.get("tool_call_id")), len(places)))
        ordered.extend(results)
        results.clear()

    for message in messages:
        if message["role"] == "tool":
            results.append(message)
            continue
        flush()
        ordered.append(message)
        if message["role"] == "assistant":
            places = {identifier: place for place, identifier in enumerate(call_ids(message))}
    flush()
    return ordered


def message_key(message: Mapping[str, Any], asked: Sequence[str] = ()) -> bytes:
    """Equal for messages that tell the model the same.

    White space around a text does not count, nor the form of a call's arguments as JSON, nor the ids of calls: a
    result is known by its place among the calls that it may answer.

    Args:
        asked: ids of the calls of the assistant's turn before a tool's result.
    """
    calls = []
    for call in message.get("tool_calls", ()):
        function = call.get("function", call)
        calls.append([function.get("name"), function.get("arguments")])
    identifier = message.get("tool_call_id")
    place = asked.index(identifier) if identifier in asked else -1
    parts = [message["role"], message["content"].strip(), message.get("reasoning_content", ""), calls, place]
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(without_surrogates(text).encode(), digest_size=16).digest()


def history_digests(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[bytes]:
    """[len(messages) + 1] digests: of only the tools, then of each beginning of the history."""
    shown = json.dumps(list(tools or ()), ensure_ascii=False)
    digests = [hashlib.blake2b(without_surrogates(shown).encode(), digest_size=16).digest()]
    asked: tuple[str, ...] = ()
    for message in messages:
        digests.append(followed_by(digests[-1], message, asked))
        if message["role"] == "assistant":
            asked = call_ids(message)
    return digests


def followed_by(digest: bytes, message: Mapping[str, Any], asked: Sequence[str] = ()) -> bytes:
    """The digest of a history of ``digest`` and then ``message``."""
    return hashlib.blake2b(digest + message_key(message, asked), digest_size=16).digest()
