"""How a policy writes tool calls and how results come back: hermes, ReTool and ARPO. Pure text, no tokenizer state.

| format | call | result | a turn ends at |
|---|---|---|---|
| hermes | ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` | the chat template's tool messages | end of turn |
| retool | ``<code>…</code>`` | ``<interpreter>…</interpreter>`` | ``</code>`` or end of text |
| arpo | ``<search>…</search>``, ``<python>…</python>`` | ``<result>…</result>`` | closing tag or end of text |

Hermes is what Qwen2.5 and Qwen3 write, with several calls in a turn; retool is arXiv:2504.11536, where code may lie in
a Markdown fence; arpo is arXiv:2507.19849.

A call that cannot be understood is a ``ParsedCall`` with ``error`` set: the message goes back to the model as the
tool's output, so that it can correct itself. Parsing never raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

CODE_TOOL = "code_interpreter"
SEARCH_TOOL = "search"


@dataclass(frozen=True)
class ParsedCall:
    """One tool call. ``arguments`` is what the tool gets; ``raw`` is what the model wrote; ``error`` excludes both."""

    name: str
    arguments: dict[str, Any]
    raw: str
    error: str | None = None


class ToolCallFormat(Protocol):
    """A way to write calls. ``uses_chat_template``: results are tool messages of the chat template."""

    name: str
    uses_chat_template: bool
    closing_tags: tuple[str, ...]
    """Strings at which a turn must stop because a result follows; none where the end of turn does it."""

    def parse(self, text: str) -> list[ParsedCall]:
        """Calls of one assistant turn, in order. ``text`` is the turn without its end-of-turn token."""
        ...

    def render_results(self, results: Sequence[str]) -> str:
        """Text that follows the turn. Only for formats without a chat template."""
        ...


class HermesFormat:
    """JSON in <tool_call> tags, as Qwen2.5 and Qwen3 are trained to write."""

    name = "hermes"
    uses_chat_template = True
    closing_tags: tuple[str, ...] = ()

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def parse(self, text: str) -> list[ParsedCall]:
        calls = []
        pieces = without_reasoning(text).split(self._OPEN)[1:]
        for piece in pieces:
            body, closed, _ = piece.partition(self._CLOSE)
            if closed:
                calls.append(_hermes_call(body.strip()))
            else:
                calls.append(_malformed(body.strip(), f"the tool call has no {self._CLOSE}"))
        return calls

    def render_results(self, results: Sequence[str]) -> str:
        raise NotImplementedError("hermes results are tool messages of the chat template")


class ReToolFormat:
    """Code between <code> tags; the interpreter's output follows in <interpreter> tags."""

    name = "retool"
    uses_chat_template = False
    closing_tags: tuple[str, ...] = ("</code>",)

    def parse(self, text: str) -> list[ParsedCall]:
        return [
            ParsedCall(CODE_TOOL, {"code": without_fence(body)}, body)
            if body is not None
            else _malformed("", f"</{tag}> without <{tag}>")
            for tag, body in tagged_blocks(text, ("code",))
        ]

    def render_results(self, results: Sequence[str]) -> str:
        return "".join(f"\n<interpreter>\n{result}\n</interpreter>\n" for result in results)


class ArpoFormat:
    """Searches and programs in tags of their own; every result comes in <result> tags."""

    name = "arpo"
    uses_chat_template = False
    closing_tags: tuple[str, ...] = ("</search>", "</python>")

    def parse(self, text: str) -> list[ParsedCall]:
        calls = []
        for tag, body in tagged_blocks(text, ("search", "python")):
            if body is None:
                calls.append(_malformed("", f"</{tag}> without <{tag}>"))
            elif tag == "search":
                calls.append(ParsedCall(SEARCH_TOOL, {"query": body.strip()}, body))
            else:
                calls.append(ParsedCall(CODE_TOOL, {"code": without_fence(body)}, body))
        return calls

    def render_results(self, results: Sequence[str]) -> str:
        return "".join(f" <result>\n{result}\n</result>" for result in results)


FORMATS: dict[str, ToolCallFormat] = {"hermes": HermesFormat(), "retool": ReToolFormat(), "arpo": ArpoFormat()}


def without_reasoning(text: str) -> str:
    """``text`` without <think> blocks: a call that the model only considers is not a call.

    A closing tag without an opening one ends reasoning that began in the prompt (Qwen3 opens it there); an opening tag
    without a closing one means that all that follows is reasoning.
    """
    head, closing, tail = text.partition("</think>")
    if closing and "<think>" not in head:
        text = tail
    text = re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL)
    return text.partition("<think>")[0]


def tagged_blocks(text: str, tags: Sequence[str]) -> list[tuple[str, str | None]]:
    """(tag, content) of every ``<tag>…</tag>`` in order. A block begins at the last opening tag before its end.

    The content is None where there is no opening tag.
    """
    blocks: list[tuple[str, str | None]] = []
    start = 0
    for closing in re.finditer("|".join(f"</({tag})>" for tag in tags), text):
        tag = next(group for group in closing.groups() if group)
        opening = text.rfind(f"<{tag}>", start, closing.start())
        blocks.append((tag, text[opening + len(tag) + 2 : closing.start()] if opening >= 0 else None))
        start = closing.end()
    return blocks


def without_fence(code: str) -> str:
    """Code without the Markdown fence that may surround it."""
    fenced = re.fullmatch(r"\s*```[a-zA-Z0-9_+-]*[ \t]*\n(.*?)\n?[ \t]*```\s*", code, flags=re.DOTALL)
    return fenced[1] if fenced else code.strip("\n")


def truncate_middle(head: str, tail: str, removed: int) -> str:
    """``head`` and ``tail`` of an over-long text with a line between them that says how much is missing."""
    return f"{head}\n[... {removed} tokens left out ...]\n{tail}"


def _hermes_call(body: str) -> ParsedCall:
    try:
        # Newlines and tabs inside strings are what a program is made of; refusing them would only cost turns.
        call = json.loads(body, strict=False)
    except json.JSONDecodeError as error:
        return _malformed(body, f"{error.msg} at character {error.pos}")
    except RecursionError:
        return _malformed(body, "nested too deeply")
    if not isinstance(call, dict):
        return _malformed(body, 'expected an object with "name" and "arguments"')
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return _malformed(body, '"name" is missing')
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False)
        except (json.JSONDecodeError, RecursionError):
            return _malformed(body, '"arguments" is not an object', name)
    if not isinstance(arguments, dict):
        return _malformed(body, '"arguments" is not an object', name)
    return ParsedCall(name, arguments, body)


def _malformed(body: str, reason: str, name: str = "") -> ParsedCall:
    # Short on purpose: it is part of the response and of its length limit.
    return ParsedCall(name, {}, body, error=f"Error: invalid tool call: {reason}")
