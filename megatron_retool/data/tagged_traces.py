"""Reasoning with code between tags, as ReTool writes it, and the conversation of tool calls that it stands for.

    Let me count. <code>print(sum(range(10)))</code> <interpreter>45</interpreter> So it is \\boxed{45}.

A block of code may be fenced with ```python. Hermes' tags are read too: <tool_call> with the JSON of a code_interpreter
call, and <tool_response>. Source: ReTool, arXiv 2504.11536, section 3.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_retool.errors import InputError
from tools.code_interpreter_tool import CodeInterpreterTool
from untrusted import load_json

Message = dict[str, Any]

_OUTPUT_TAG = {"code": "interpreter", "tool_call": "tool_response"}
_TAG = re.compile(rf"<(/?)({'|'.join([*_OUTPUT_TAG, *_OUTPUT_TAG.values()])})>")
_FENCE = re.compile(r"\s*```(?:python|py)?[ \t]*\n(.*?)\n?[ \t]*```\s*\Z", re.DOTALL)
_ANSWER_TAG = re.compile(r"</?answer>")


class TraceError(InputError):
    """A trace is not of the format. ``reason`` is one of a few, to count by; the message says where."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class TracedCall:
    """A block of code."""

    text: str
    """Between the block before, or the beginning, and this one."""
    code: str
    output: str | None
    """What the trace says that it printed; None where it says nothing."""


@dataclass(frozen=True)
class Trace:
    """Reasoning with tool calls that was read from tagged text."""

    calls: list[TracedCall]
    answer: str
    """What follows the last block."""


def parse_trace(text: str) -> Trace:
    """The calls in ``text`` and what follows them.

    Raises:
        TraceError: a tag is not closed, stands where none can, or a block holds no code.
    """
    calls: list[TracedCall] = []
    position = 0
    while True:
        tag = _TAG.search(text, position)
        if tag is None:
            return Trace(calls, without_answer_tags(text[position:]))
        name = tag[2]
        if tag[1] or name not in _OUTPUT_TAG:
            raise TraceError("stray tag", f"{tag[0]} at character {tag.start()} belongs to no block")
        content, end = _block(text, tag)
        code = _code_of(content, name, tag.start())
        output = None
        following = _TAG.search(text, end)
        if following is not None and following[0] == f"<{_OUTPUT_TAG[name]}>":
            if text[end : following.start()].strip():
                raise TraceError("stray tag", f"{following[0]} at character {following.start()} follows no block")
            output, after = _block(text, following)
            output = output.strip()
        else:
            after = end
        calls.append(TracedCall(text[position : tag.start()].strip(), code, output))
        position = after


def _block(text: str, tag: re.Match[str]) -> tuple[str, int]:
    """What stands between the opening ``tag`` and its closing one, and where that ends."""
    closing = f"</{tag[2]}>"
    end = text.find(closing, tag.end())
    if end < 0:
        raise TraceError("unclosed block", f"{tag[0]} at character {tag.start()} is never closed")
    return text[tag.end() : end], end + len(closing)


def _code_of(content: str, tag: str, place: int) -> str:
    if tag == "tool_call":
        try:
            call = load_json(content, strict=False)
            name, content = call["name"], call["arguments"]["code"]
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError("bad tool call", f"<tool_call> at character {place}: no call with code in JSON") from error
        if name != CodeInterpreterTool.name or not isinstance(content, str):
            raise TraceError("bad tool call", f"<tool_call> at character {place}: calls {name!r:.60}")
    fenced = _FENCE.match(content)
    code = fenced[1] if fenced else content.strip("\n").rstrip()
    if not code.strip():
        raise TraceError("empty code", f"<{tag}> at character {place} holds no code")
    return code


def without_answer_tags(text: str) -> str:
    """``text``, stripped, without <answer> tags around what is in a box anyway."""
    return (_ANSWER_TAG.sub("", text) if "\\boxed" in text else text).strip()


def conversation(prompt: Sequence[Message], trace: Trace, outputs: Sequence[str]) -> list[Message]:
    """The messages: ``prompt``, each call with its output as a turn of its own, and the answer."""
    messages = [*prompt]
    for call, output in zip(trace.calls, outputs, strict=True):
        messages += [tool_call(CodeInterpreterTool.name, {"code": call.code}, call.text), tool_result(output)]
    return [*messages, {"role": "assistant", "content": trace.answer}]


def tool_call(name: str, arguments: dict[str, str], content: str) -> Message:
    """An assistant's message that calls a tool after ``content``."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def tool_result(output: str) -> Message:
    """The message with a tool's output."""
    return {"role": "tool", "content": output}
