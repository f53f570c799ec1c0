"""OpenAI's Responses: a request's JSON to a ``ConversationCall``, the answer to an object or a stream's events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_retool.data.chat_template import normalize_messages
from sglang_rollout.gateway import constraints, fields, request_fields
from sglang_rollout.gateway.chat_completions import pieces
from sglang_rollout.gateway.conversation import ConversationAnswer, ConversationCall, Message, in_call_order
from sglang_rollout.gateway.errors import ApiError, invalid, unsupported

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_PARTS = ("input_text", "output_text", "text")


@dataclass(frozen=True)
class ResponsesRequest:
    """A call and what its answer must look like.

    Attributes:
        history: of the call without instructions, which a later request does not inherit.
        body: as it came.
    """

    call: ConversationCall
    stream: bool
    history: list[Message]
    body: fields.Json
    id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))


def read(body: fields.Json, earlier: Mapping[str, list[Message]]) -> ResponsesRequest:
    """The request in ``body``.

    Args:
        earlier: histories by the id of the response that ended them, for previous_response_id.

    Raises:
        ApiError: 400, naming the field; 404, previous_response_id is unknown.
    """
    request_fields.check(body, request_fields.RESPONSES)
    text = fields.mapping(body, "text")
    request_fields.check(text, request_fields.TEXT, "text.")
    form, tools = constraints.of_response_format(text.get("format"), "text.format"), fields.tools(body, _schema)
    reasoning = fields.mapping(body, "reasoning")
    request_fields.check(reasoning, request_fields.REASONING, "reasoning.")
    if "message.output_text.logprobs" in (body.get("include") or ()):
        raise unsupported("include", "message.output_text.logprobs: use Chat Completions for log-probs")
    sampling = fields.sampling(body)
    history: list[Message] = []
    if body.get("previous_response_id") is not None:
        previous = fields.text(body, "previous_response_id")
        if previous not in earlier:
            message = f"there is no response {previous!r:.60} in this session"
            raise ApiError(404, message, code="previous_response_not_found", param="previous_response_id")
        history += earlier[previous]
    history += _read_input(body)
    instructions = fields.text(body, "instructions", default="")
    messages = [{"role": "system", "content": instructions}, *history] if instructions else history
    fields.check_history(messages, "input")
    call = ConversationCall(
        messages=in_call_order(normalize_messages(messages)),
        tools=tools,
        max_tokens=fields.integer(body, "max_output_tokens", 1),
        model=fields.text(body, "model", default=""),
        sampling=sampling,
        thinking=False if fields.text(reasoning, "effort", "reasoning.", default="") == "none" else None,
        parallel_calls=fields.optional_flag(body, "parallel_tool_calls") is not False,
        constraint=constraints.of_tool_choice(body.get("tool_choice"), tools) or form,
    )
    return ResponsesRequest(call, fields.flag(body, "stream"), normalize_messages(history), body)


def response(request: ResponsesRequest, answer: ConversationAnswer, model: str) -> dict[str, Any]:
    """The ``response`` object."""
    cut = answer.finish_reason == "length"
    return {
        **_head(request, model),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output(request, answer),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": min(answer.cached_tokens, answer.prompt_tokens)},
            "output_tokens": answer.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
        },
    }


def events(request: ResponsesRequest, answer: ConversationAnswer, model: str) -> Iterator[dict[str, Any]]:
    """The events of a stream; each is sent under the name in its ``type``."""
    for number, event in enumerate(_events(request, answer, model)):
        yield {**event, "sequence_number": number}


def failure_events(body: fields.Json, error: ApiError, model: str) -> Iterator[dict[str, Any]]:
    """The events of a stream that fails with ``error``.

    Args:
        body: of the request, as far as it was read.
    """
    request = ResponsesRequest(
        ConversationCall(messages=[], model=fields.text(body, "model", default="")), True, [], body
    )
    begun = {**_head(request, model), "status": "in_progress", "output": [], "usage": None}
    failed = {**begun, "status": "failed", "error": {"code": error.code, "message": str(error)}}
    steps = (("created", begun), ("in_progress", begun), ("failed", failed))
    for number, (step, response) in enumerate(steps):
        yield {"type": f"response.{step}", "response": response, "sequence_number": number}


def _events(request: ResponsesRequest, answer: ConversationAnswer, model: str) -> Iterator[dict[str, Any]]:
    begun = {**_head(request, model), "status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    final = response(request, answer, model)
    for index, item in enumerate(final["output"]):
        of_item = {"item_id": item["id"], "output_index": index}
        is_message = item["type"] == "message"
        opened = {**item, "status": "in_progress", **({"content": []} if is_message else {"arguments": ""})}
        yield {"type": "response.output_item.added", "output_index": index, "item": opened}
        if is_message:
            (part,) = item["content"]
            of_part = {**of_item, "content_index": 0}
            yield {"type": "response.content_part.added", **of_part, "part": {**part, "text": ""}}
            for piece in pieces(part["text"]):
                yield {"type": "response.output_text.delta", **of_part, "delta": piece, "logprobs": []}
            yield {"type": "response.output_text.done", **of_part, "text": part["text"], "logprobs": []}
            yield {"type": "response.content_part.done", **of_part, "part": part}
        else:
            kind = "response.function_call_arguments"
            for piece in pieces(item["arguments"]):
                yield {"type": f"{kind}.delta", **of_item, "delta": piece}
            yield {"type": f"{kind}.done", **of_item, "name": item["name"], "arguments": item["arguments"]}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{final['status']}", "response": final}


def _read_input(body: fields.Json) -> list[Message]:
    given = body.get("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not given:
        raise invalid("input", "expected a string or an array of items")
    messages: list[Message] = []
    for place, item in enumerate(fields.items(body, "input")):
        where = f"input[{place}]."
        kind = item.get("type", "message")
        if kind == "message":
            role = _ROLES.get(item["role"]) if isinstance(item.get("role"), str) else None
            if role is None:
                raise invalid(f"{where}role", f"expected one of {', '.join(_ROLES)}, got {item.get('role')!r:.40}")
            if item.get("content") is None:
                raise invalid(f"{where}content", "it is missing")
            messages.append({"role": role, "content": fields.content_text(item["content"], f"{where}content", _PARTS)})
        elif kind == "function_call":
            name, arguments = fields.text(item, "name", where), fields.text(item, "arguments", where)
            call = fields.tool_call(fields.text(item, "call_id", where), name, arguments)
            # A turn's text and its calls are items of their own.
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            text = fields.content_text(item.get("output"), f"{where}output", _PARTS)
            messages.append({"role": "tool", "content": text, "tool_call_id": fields.text(item, "call_id", where)})
        else:
            raise unsupported(f"{where}type", f"{kind!r:.40}")
    return messages


def _schema(tool: fields.Json, path: str) -> dict[str, Any] | None:
    if fields.text(tool, "type", path) != "function":
        return None
    return fields.function_schema(tool, path)


def _head(request: ResponsesRequest, model: str) -> dict[str, Any]:
    body = request.body
    return {
        "id": request.id,
        "object": "response",
        "created_at": request.created,
        "model": request.call.model or model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": request.call.parallel_calls,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": body.get("temperature"),
        "text": {"format": (body.get("text") or {}).get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
    }


def _output(request: ResponsesRequest, answer: ConversationAnswer) -> list[dict[str, Any]]:
    suffix = request.id.removeprefix("resp_")
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if answer.content or not answer.calls:
        part = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg_{suffix}", "role": "assistant", "status": status}
        items.append({**message, "content": [part]})
    for place, call in enumerate(answer.calls):
        item = {"type": "function_call", "id": f"fc_{suffix}_{place}", "call_id": call.id, "status": status}
        item |= {"name": call.name, "arguments": call.arguments}
        items.append(item if call.error is None else {**item, "error": call.error})
    return items
