"""OpenAI's Chat Completions: a request's JSON to a ``ConversationCall``, answers to an object or a stream's chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_retool.data.chat_template import normalize_messages
from sglang_rollout.gateway import constraints, fields, request_fields
from sglang_rollout.gateway.conversation import ConversationAnswer, ConversationCall, Message, in_call_order
from sglang_rollout.gateway.errors import invalid, unsupported

_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
_PARTS = ("text", "refusal")
PIECE = 48
"""Characters of a streamed piece."""


@dataclass(frozen=True)
class ChatRequest:
    """A call and what its answer must look like."""

    call: ConversationCall
    stream: bool
    include_usage: bool
    log_probs: bool
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))


def read(body: fields.Json) -> ChatRequest:
    """The request in ``body``.

    Raises:
        ApiError: 400, naming the field.
    """
    request_fields.check(body, request_fields.CHAT)
    sampling = fields.sampling(body)
    messages = [_message(item, f"messages[{place}].") for place, item in enumerate(fields.items(body, "messages"))]
    if not messages:
        raise invalid("messages", "expected at least one message")
    fields.check_history(messages, "messages")
    stream = fields.flag(body, "stream")
    options = fields.mapping(body, "stream_options")
    request_fields.check(options, request_fields.STREAM_OPTIONS, "stream_options.")
    limit = fields.integer(body, "max_completion_tokens", 1)
    tools = fields.tools(body, _schema)
    form = constraints.of_response_format(body.get("response_format"), "response_format")
    call = ConversationCall(
        messages=in_call_order(normalize_messages(messages)),
        tools=tools,
        max_tokens=limit if limit is not None else fields.integer(body, "max_tokens", 1),
        stop=fields.texts(body, "stop"),
        seed=fields.integer(body, "seed", 0),
        choices=fields.integer(body, "n", 1) or 1,
        model=fields.text(body, "model", default=""),
        sampling=sampling,
        thinking=_thinking(body),
        parallel_calls=fields.optional_flag(body, "parallel_tool_calls") is not False,
        constraint=constraints.of_tool_choice(body.get("tool_choice"), tools) or form,
        steered=fields.steered(body),
    )
    return ChatRequest(call, stream, fields.flag(options, "include_usage", "stream_options."), _log_probs(body))


def _thinking(body: fields.Json) -> bool | None:
    switches = fields.mapping(body, "chat_template_kwargs")
    request_fields.check(switches, request_fields.CHAT_TEMPLATE_KWARGS, "chat_template_kwargs.")
    for name in switches:
        return fields.optional_flag(switches, name, "chat_template_kwargs.")
    return False if fields.text(body, "reasoning_effort", default="") == "none" else None


def completion(request: ChatRequest, answers: Sequence[ConversationAnswer], model: str) -> dict[str, Any]:
    """The ``chat.completion`` object."""
    choices = []
    for index, answer in enumerate(answers):
        message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
        if answer.calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [_call(answer, place) for place in range(len(answer.calls))]
        choices.append(
            {
                "index": index,
                "message": message,
                "finish_reason": answer.finish_reason,
                "logprobs": {"content": _token_log_probs(answer), "refusal": None} if request.log_probs else None,
            }
        )
    return {**_head(request, "chat.completion", model), "choices": choices, "usage": _usage(answers)}


def chunks(request: ChatRequest, answers: Sequence[ConversationAnswer], model: str) -> Iterator[dict[str, Any]]:
    """The ``chat.completion.chunk`` objects, without the closing [DONE]."""
    head = _head(request, "chat.completion.chunk", model)

    def chunk(index: int, delta: dict[str, Any], finish: str | None = None, log_probs: Any = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": log_probs}
        return {**head, "choices": [choice], **({"usage": None} if request.include_usage else {})}

    for index, answer in enumerate(answers):
        log_probs = {"content": _token_log_probs(answer), "refusal": None} if request.log_probs else None
        yield chunk(index, {"role": "assistant", "content": ""}, log_probs=log_probs)
        for piece in pieces(answer.content):
            yield chunk(index, {"content": piece})
        for place, call in enumerate(answer.calls):
            opened = {"index": place, **_call(answer, place)}
            opened["function"] = {"name": call.name, "arguments": ""}
            yield chunk(index, {"tool_calls": [opened]})
            for piece in pieces(call.arguments):
                yield chunk(index, {"tool_calls": [{"index": place, "function": {"arguments": piece}}]})
        yield chunk(index, {}, answer.finish_reason)
    if request.include_usage:
        yield {**head, "choices": [], "usage": _usage(answers)}


def pieces(text: str) -> Iterator[str]:
    """``text`` as a stream brings it."""
    for start in range(0, len(text), PIECE):
        yield text[start : start + PIECE]


def _message(item: fields.Json, path: str) -> Message:
    if item.get("function_call"):
        raise unsupported(f"{path}function_call", "use tool_calls")
    role = _ROLES.get(item["role"]) if isinstance(item.get("role"), str) else None
    if role is None:
        raise invalid(f"{path}role", f"expected one of {', '.join(_ROLES)}, got {item.get('role')!r:.40}")
    message: Message = {"role": role, "content": fields.content_text(item.get("content"), f"{path}content", _PARTS)}
    if role == "assistant":
        calls = [
            read_call(call, f"{path}tool_calls[{place}].")
            for place, call in enumerate(fields.items(item, "tool_calls", path))
        ]
        if calls:
            message["tool_calls"] = calls
        elif item.get("content") is None:
            raise invalid(f"{path}content", "an assistant's message needs content or tool_calls")
        if isinstance(item.get("reasoning_content"), str) and item["reasoning_content"]:
            message["reasoning_content"] = item["reasoning_content"]
    elif item.get("content") is None:
        raise invalid(f"{path}content", "it is missing")
    if role == "tool":
        message["tool_call_id"] = fields.text(item, "tool_call_id", path)
    return message


def read_call(call: fields.Json, path: str = "") -> dict[str, Any]:
    """A tool call as an answer has it.

    Raises:
        ApiError: 400, naming the field.
    """
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        raise invalid(f"{path}function", 'expected a call of type "function" with an object here')
    name, arguments = fields.text(function, "name", f"{path}function."), function.get("arguments", "")
    return fields.tool_call(
        fields.text(call, "id", path), name, fields.text({"arguments": arguments}, "arguments", path)
    )


def _schema(tool: fields.Json, path: str) -> dict[str, Any] | None:
    if isinstance(tool.get("type"), str) and tool["type"] != "function":
        return None
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise invalid(f"{path}function", 'expected a tool of type "function" with an object here')
    return fields.function_schema(function, f"{path}function.")


def _log_probs(body: fields.Json) -> bool:
    return fields.flag(body, "logprobs")


def _head(request: ChatRequest, kind: str, model: str) -> dict[str, Any]:
    return {"id": request.id, "object": kind, "created": request.created, "model": request.call.model or model}


def _call(answer: ConversationAnswer, place: int) -> dict[str, Any]:
    call = answer.calls[place]
    written: dict[str, Any] = {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
    # Not of the API: what the model should be told of a call that it wrote badly.
    return written if call.error is None else {**written, "error": call.error}


def _token_log_probs(answer: ConversationAnswer) -> list[dict[str, Any]]:
    return [
        {"token": text, "logprob": log_prob, "bytes": list(text.encode(errors="replace")), "top_logprobs": []}
        for text, log_prob in answer.tokens
    ]


def _usage(answers: Sequence[ConversationAnswer]) -> dict[str, Any]:
    prompt, sampled = answers[0].prompt_tokens, sum(answer.sampled_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": min(prompt, answers[0].cached_tokens)},
    }
