"""Anthropic's Messages: a request's JSON to a ``ConversationCall``, the answer to an object or a stream's events."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_retool.data.chat_template import normalize_messages
from sglang_rollout.gateway import constraints, fields, request_fields
from sglang_rollout.gateway.chat_completions import pieces
from sglang_rollout.gateway.conversation import ConversationAnswer, ConversationCall, Message, in_call_order
from sglang_rollout.gateway.errors import invalid, unsupported
from untrusted import load_json


@dataclass(frozen=True)
class MessagesRequest:
    """A call and what its answer must look like."""

    call: ConversationCall
    stream: bool
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")


def read(body: fields.Json, to_count: bool = False) -> MessagesRequest:
    """The request in ``body``.

    Args:
        to_count: its tokens are counted only, for which it need not have max_tokens.

    Raises:
        ApiError: 400, naming the field.
    """
    request_fields.check(body, request_fields.MESSAGES)
    output = fields.mapping(body, "output_config")
    request_fields.check(output, request_fields.OUTPUT_CONFIG, "output_config.")
    form = constraints.of_response_format(output.get("format"), "output_config.format")
    form = form or constraints.of_response_format(body.get("output_format"), "output_format")
    _check_edits(fields.mapping(body, "context_management"))
    sampling = fields.sampling(body)
    messages: list[Message] = []
    system = fields.content_text(body.get("system"), "system", ("text",))
    if system:
        messages.append({"role": "system", "content": system})
    given = fields.items(body, "messages")
    if not given:
        raise invalid("messages", "expected at least one message")
    for place, item in enumerate(given):
        messages += _read(item, f"messages[{place}].")
    if messages[-1]["role"] == "assistant":
        raise unsupported("messages", "the last message must be a user's: a turn that is begun is not continued")
    limit = fields.integer(body, "max_tokens", 1)
    if limit is None and not to_count:
        raise invalid("max_tokens", "it is missing")
    choice, tools = body.get("tool_choice"), fields.tools(body, _schema)
    one_call = isinstance(choice, dict) and fields.flag(choice, "disable_parallel_tool_use", "tool_choice.")
    call = ConversationCall(
        messages=in_call_order(normalize_messages(messages)),
        tools=tools,
        max_tokens=limit,
        stop=fields.texts(body, "stop_sequences"),
        model=fields.text(body, "model", default=""),
        sampling=sampling,
        thinking=_thinking(fields.mapping(body, "thinking")),
        parallel_calls=not one_call,
        constraint=constraints.of_tool_choice(choice, tools) or form,
        steered=fields.steered(body),
    )
    return MessagesRequest(call, fields.flag(body, "stream"))


def _thinking(asked: fields.Json) -> bool | None:
    kinds = {None: None, "adaptive": None, "enabled": True, "disabled": False}
    kind = asked.get("type")
    if kind is not None and (not isinstance(kind, str) or kind not in kinds):
        raise invalid("thinking.type", f"expected enabled, adaptive or disabled, got {kind!r:.40}")
    return kinds[kind]


def _check_edits(management: fields.Json) -> None:
    for place, edit in enumerate(fields.items(management, "edits", "context_management.")):
        if not fields.text(edit, "type", f"context_management.edits[{place}].").startswith("clear_thinking_"):
            raise unsupported(f"context_management.edits[{place}]", "the gateway does not change a history")


def message(request: MessagesRequest, answer: ConversationAnswer, model: str) -> dict[str, Any]:
    """The ``message`` object."""
    return {
        **_head(request, answer, model),
        "content": _blocks(answer),
        "stop_reason": _stop_reason(answer),
        "stop_sequence": answer.matched_stop,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.sampled_tokens},
    }


def events(request: MessagesRequest, answer: ConversationAnswer, model: str) -> Iterator[dict[str, Any]]:
    """The events of a stream; each is sent under the name in its ``type``."""
    head = _head(request, answer, model)
    yield {"type": "message_start", "message": head}
    for index, block in enumerate(_blocks(answer)):
        is_text = block["type"] == "text"
        empty = {"type": "text", "text": ""} if is_text else {**block, "input": {}}
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        content = block["text"] if is_text else json.dumps(block["input"], ensure_ascii=False)
        for piece in pieces(content):
            delta = {"type": "text_delta", "text": piece}
            if not is_text:
                delta = {"type": "input_json_delta", "partial_json": piece}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": _stop_reason(answer), "stop_sequence": answer.matched_stop}
    yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": answer.sampled_tokens}}
    yield {"type": "message_stop"}


def _read(item: fields.Json, path: str) -> list[Message]:
    """The messages of one of Anthropic's: a user's may hold results of tools and texts."""
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system"):
        raise invalid(f"{path}role", f"expected user, assistant or system, got {role!r:.40}")
    if role == "system" and content is not None:
        return [{"role": role, "content": fields.content_text(content, f"{path}content", ("text",))}]
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if content is None:
        raise invalid(f"{path}content", "it is missing")
    blocks = fields.items(item, "content", path)
    return _assistant(blocks, path) if role == "assistant" else _user(blocks, path)


def _assistant(blocks: list[fields.Json], path: str) -> list[Message]:
    said, thought, calls = "", "", []
    for place, block in enumerate(blocks):
        where = f"{path}content[{place}]."
        if block.get("type") == "text":
            said += fields.text(block, "text", where)
        elif block.get("type") == "thinking":
            thought += fields.text(block, "thinking", where)
        elif block.get("type") == "redacted_thinking":
            continue
        elif block.get("type") == "tool_use":
            given = block.get("input")
            if not isinstance(given, dict):
                raise invalid(f"{where}input", "expected an object")
            # As the answer wrote a call whose arguments are no object.
            arguments = given["malformed"] if list(given) == ["malformed"] else given
            calls.append(
                fields.tool_call(fields.text(block, "id", where), fields.text(block, "name", where), arguments)
            )
        else:
            raise unsupported(f"{where}type", f"{block.get('type')!r:.40} in an assistant's message")
    message: Message = {"role": "assistant", "content": said}
    if thought:
        message["reasoning_content"] = thought
    return [{**message, "tool_calls": calls} if calls else message]


def _user(blocks: list[fields.Json], path: str) -> list[Message]:
    messages: list[Message] = []
    for place, block in enumerate(blocks):
        where = f"{path}content[{place}]"
        if block.get("type") == "tool_result":
            text = fields.content_text(block.get("content"), f"{where}.content", ("text",))
            identifier = fields.text(block, "tool_use_id", f"{where}.")
            messages.append({"role": "tool", "content": text, "tool_call_id": identifier})
            continue
        text = fields.content_text([block], f"{path}content", ("text",))
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += text
        else:
            messages.append({"role": "user", "content": text})
    if not messages:
        raise invalid(f"{path}content", "it is empty")
    return messages


def _schema(tool: fields.Json, path: str) -> dict[str, Any] | None:
    if tool.get("type") not in (None, "custom"):
        return None
    return fields.function_schema(tool, path, "input_schema")


def _head(request: MessagesRequest, answer: ConversationAnswer, model: str) -> dict[str, Any]:
    return {
        "id": request.id,
        "type": "message",
        "role": "assistant",
        "model": request.call.model or model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": 0},
    }


def _blocks(answer: ConversationAnswer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = [{"type": "text", "text": answer.content}] * _text_blocks(answer)
    for call in answer.calls:
        given = _arguments(call.arguments)
        # The API has no place for a call whose arguments are no object.
        given = given if isinstance(given, dict) and call.error is None else {"malformed": call.arguments}
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    return blocks


def _text_blocks(answer: ConversationAnswer) -> int:
    return 1 if answer.content or not answer.calls else 0


def _arguments(text: str) -> Any:
    try:
        return load_json(text)
    except ValueError:
        return None


def _stop_reason(answer: ConversationAnswer) -> str:
    if answer.matched_stop is not None:
        return "stop_sequence"
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[answer.finish_reason]
