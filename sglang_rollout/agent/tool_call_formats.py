"""How a policy writes tool calls and how results come back. Pure text, no tokenizer state.

| format | a call | its result |
|---|---|---|
| hermes | ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` | the chat template's tool message |
| qwen3_coder | ``<tool_call><function=…><parameter=…>…</parameter></function></tool_call>`` | the same |
| glm45 | ``<tool_call>name<arg_key>…</arg_key><arg_value>…</arg_value></tool_call>`` | ``<tool_response>`` |
| harmony | ``to=functions.name<|channel|>…<|message|>{…}<|call|>`` | a message of the function |
| retool | ``<code>…</code>`` | ``<interpreter>…</interpreter>`` |
| arpo | ``<search>…</search>``, ``<python>…</python>`` | ``<result>…</result>`` |

A turn ends at the chat template's end of turn with the first two, else at a closing tag or the end of text.
Hermes is what Qwen2.5 and Qwen3 write, qwen3_coder Qwen3-Coder and Qwen3.5, glm45 GLM-4.5 and 4.6, all with several
calls in a turn; harmony is gpt-oss's, with one; retool is arXiv:2504.11536, where code may lie in a Markdown fence;
arpo is arXiv:2507.19849.

A call that cannot be understood is a ``ParsedCall`` with ``error`` set: the message goes back to the model as the
tool's output, so that it can correct itself. Parsing never raises.

rollout.multi_turn.format names a class of ``formats`` or anybody's own, made with rollout.multi_turn.format_kwargs.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from megatron_retool.config import Config, MultiTurnConfig
from megatron_retool.registry import ExtensionError, Registry, check_methods
from megatron_retool.untrusted import load_json
from tools.arguments import WrittenText

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParsedCall:
    """One tool call. ``arguments`` is what the tool gets; ``raw`` is what the model wrote; ``error`` excludes both."""

    name: str
    arguments: dict[str, Any]
    raw: str
    error: str | None = None


class ToolCallFormat(Protocol):
    """A way to write calls. ``uses_chat_template``: results are tool messages of the chat template."""

    uses_chat_template: bool
    closing_tags: tuple[str, ...]
    """Strings at which a turn must stop because a result follows; none where the chat template's end of turn does."""

    def parse(self, text: str) -> list[ParsedCall]:
        """Calls of one assistant turn, in order. ``text`` is the turn without its end-of-turn token."""
        ...

    def render_results(self, results: Sequence[str]) -> str:
        """Text that follows the turn. Only for formats without a chat template."""
        ...


@runtime_checkable
class NamesResults(Protocol):
    """A format without a chat template whose results say which tool they are of."""

    def render_named_results(self, names: Sequence[str], results: Sequence[str]) -> str:
        """Text that follows the turn, in place of ``render_results``."""
        ...


formats: Registry[Callable[..., Any]] = Registry("rollout.multi_turn.format", takes=())


@formats.register("hermes")
class HermesFormat:
    """JSON in <tool_call> tags, as Qwen2.5 and Qwen3 are trained to write."""

    uses_chat_template = True
    closing_tags: tuple[str, ...] = ()

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def parse(self, text: str) -> list[ParsedCall]:
        return [
            self.read(body.strip()) if closed else _malformed(body.strip(), f"the tool call has no {self._CLOSE}")
            for body, closed in _opened_blocks(without_reasoning(text), self._OPEN, self._CLOSE)
        ]

    def read(self, body: str) -> ParsedCall:
        """A call from what is between its tags."""
        return _hermes_call(body)

    def render_results(self, results: Sequence[str]) -> str:
        raise NotImplementedError("results are tool messages of the chat template")


@formats.register("qwen3_coder")
class Qwen3CoderFormat(HermesFormat):
    """Functions and parameters in tags within <tool_call>, as Qwen3-Coder and Qwen3.5 are trained to write.

    Values are texts where the tool's schema takes one, else JSON.
    """

    def read(self, body: str) -> ParsedCall:
        head, opened, rest = body.partition(">")
        inside, closed, after = rest.rpartition("</function>")
        name = head.removeprefix("<function=").strip()
        if not (opened and closed and head.startswith("<function=") and name) or after.strip():
            return _malformed(body, "expected <function=name>…</function>")
        arguments: dict[str, Any] = {}
        for parameter, finished in _opened_blocks(inside, "<parameter=", "</parameter>"):
            key, found, value = parameter.partition(">")
            if not (finished and found and key.strip()):
                return _malformed(body, "expected <parameter=name>…</parameter>", name)
            arguments[key.strip()] = WrittenText(value.removeprefix("\n").removesuffix("\n"))
        return ParsedCall(name, arguments, body)


@formats.register("glm45")
class Glm45Format:
    """A name, keys and values in tags, as GLM-4.5 and GLM-4.6 are trained to write.

    Their template ends no turn: what the model samples last is the token that opens the next message. A turn that calls
    tools ends at <|observation|>, which opens their results. Values are as in ``Qwen3CoderFormat``.

    Args:
        turn_header: what opens the policy's next turn; with thinking turned off ``<|assistant|>\\n<think></think>``.
    """

    uses_chat_template = False
    closing_tags: tuple[str, ...] = ("<|observation|>",)

    def __init__(self, *, turn_header: str = "<|assistant|>") -> None:
        self.turn_header = turn_header

    def parse(self, text: str) -> list[ParsedCall]:
        if not text.endswith(self.closing_tags):
            return []
        spoken = without_reasoning(text.removesuffix(self.closing_tags[0]))
        return [
            self._read(body) if closed else _malformed(body.strip(), "the tool call has no </tool_call>")
            for body, closed in _opened_blocks(spoken, "<tool_call>", "</tool_call>")
        ]

    def _read(self, body: str) -> ParsedCall:
        head, *pairs = body.split("<arg_key>")
        name = head.strip()
        if not name or "<" in name:
            return _malformed(body, "expected the name of a function", name)
        arguments: dict[str, Any] = {}
        for pair in pairs:
            key, closed, rest = pair.partition("</arg_key>")
            between, opened, value = rest.partition("<arg_value>")
            value, ended, after = value.rpartition("</arg_value>")
            if not (closed and opened and ended and key.strip()) or between.strip() or after.strip():
                return _malformed(body, "expected <arg_key>…</arg_key><arg_value>…</arg_value>", name)
            arguments[key.strip()] = WrittenText(value)
        return ParsedCall(name, arguments, body)

    def render_results(self, results: Sequence[str]) -> str:
        shown = "".join(f"\n<tool_response>\n{result}\n</tool_response>" for result in results)
        return shown + self.turn_header


@formats.register("harmony")
class HarmonyFormat:
    """Messages on channels, as gpt-oss is trained to write: a call is a message to a function and ends the turn.

    What the policy writes on its other channels before a call (its analysis) stays in the context.
    """

    uses_chat_template = False
    closing_tags: tuple[str, ...] = ("<|call|>",)

    _RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]+)")
    _NAME = re.compile(r"[\w-]{1,64}")

    def parse(self, text: str) -> list[ParsedCall]:
        message, called, _ = text.partition("<|call|>")
        if not called:
            return []
        header, found, body = message.rpartition("<|message|>")
        recipient = self._RECIPIENT.search(header.rpartition("<|start|>")[2]) if found else None
        name = "" if recipient is None else recipient[1].rpartition(".")[2]
        if not self._NAME.fullmatch(name):
            return [_malformed(body, "expected to=functions.name and <|message|> before <|call|>")]
        return [_call_of_json(name, body.strip() or "{}", body)]

    def render_results(self, results: Sequence[str]) -> str:
        return self.render_named_results([""] * len(results), results)

    def render_named_results(self, names: Sequence[str], results: Sequence[str]) -> str:
        shown = "".join(
            f"<|start|>functions.{name or 'unknown'} to=assistant<|channel|>commentary<|message|>{result}<|end|>"
            for name, result in zip(names, results, strict=True)
        )
        return f"{shown}<|start|>assistant"


@formats.register("retool")
class ReToolFormat:
    """Code between <code> tags; the interpreter's output follows in <interpreter> tags.

    Args:
        code_tool: name of the tool that runs the code.
    """

    uses_chat_template = False
    closing_tags: tuple[str, ...] = ("</code>",)

    def __init__(self, *, code_tool: str = "code_interpreter") -> None:
        self.code_tool = code_tool

    def parse(self, text: str) -> list[ParsedCall]:
        return [
            ParsedCall(self.code_tool, {"code": without_fence(body)}, body)
            if body is not None
            else _malformed("", f"</{tag}> without <{tag}>")
            for tag, body in tagged_blocks(text, ("code",))
        ]

    def render_results(self, results: Sequence[str]) -> str:
        return "".join(f"\n<interpreter>\n{result}\n</interpreter>\n" for result in results)


@formats.register("arpo")
class ArpoFormat:
    """Searches and programs in tags of their own; every result comes in <result> tags.

    Args:
        code_tool: name of the tool that runs what is in <python>.
        search_tool: name of the tool that looks up what is in <search>.
    """

    uses_chat_template = False
    closing_tags: tuple[str, ...] = ("</search>", "</python>")

    def __init__(self, *, code_tool: str = "code_interpreter", search_tool: str = "search") -> None:
        self.code_tool = code_tool
        self.search_tool = search_tool

    def parse(self, text: str) -> list[ParsedCall]:
        calls = []
        for tag, body in tagged_blocks(text, ("search", "python")):
            if body is None:
                calls.append(_malformed("", f"</{tag}> without <{tag}>"))
            elif tag == "search":
                calls.append(ParsedCall(self.search_tool, {"query": body.strip()}, body))
            else:
                calls.append(ParsedCall(self.code_tool, {"code": without_fence(body)}, body))
        return calls

    def render_results(self, results: Sequence[str]) -> str:
        return "".join(f" <result>\n{result}\n</result>" for result in results)


def parsed_calls(call_format: ToolCallFormat, text: str) -> list[ParsedCall]:
    """The calls of a turn. What a format raises is told to the model, as of any call that it wrote badly."""
    try:
        return call_format.parse(text)
    except Exception as error:
        # It was tried on a few texts alone.
        logger.exception("rollout.multi_turn.format: parse raised on %.200r", text)
        message = f"Error: invalid tool call: reading it failed: {type(error).__name__}"
        return [ParsedCall("", {}, text, error=message)]


def make_format(config: MultiTurnConfig) -> ToolCallFormat:
    """What rollout.multi_turn.format names, checked.

    Raises:
        ExtensionError: it cannot be loaded or made, or is no ToolCallFormat.
    """
    extension = formats.bind(config.format, config.format_kwargs)
    try:
        made = extension()
    except Exception as error:
        raise ExtensionError(f"{extension.label}: making it failed: {type(error).__name__}: {error}") from error
    return checked_format(made, extension.label)


def check_format(config: Config) -> None:
    """Raise ExtensionError where the run's tool-call format cannot be used."""
    make_format(config.rollout.multi_turn)


_TRIALS = (
    "",
    "\n",
    "The answer is 42.",
    '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>',
    "<tool_call>{</tool_call><tool_call>",
    "<code>print(1)</code></code>",
    "<think>I <code></think></python>",
    '{"name": 3}</search>\ufffd\x00',
)
"""What a model may write, well or badly formed."""


def checked_format(made: Any, label: str) -> ToolCallFormat:
    """``made``, if it has what ToolCallFormat asks for and parses some texts.

    Args:
        label: for messages.

    Raises:
        ExtensionError: naming what is missing or wrong.
    """
    kind = type(made).__name__
    check_methods(label, made, ToolCallFormat, "parse", "render_results")
    for name, wanted in (("uses_chat_template", bool), ("closing_tags", tuple)):
        if not isinstance(getattr(made, name, None), wanted):
            raise ExtensionError(f"{label}: {kind}.{name} must be a {wanted.__name__}")
    tags = made.closing_tags
    if not all(isinstance(tag, str) and tag for tag in tags) or bool(tags) == made.uses_chat_template:
        raise ExtensionError(
            f"{label}: {kind}.closing_tags={tags!r} must be () where uses_chat_template is True, and otherwise the "
            "texts at which a turn stops for its results"
        )
    for text in (*_TRIALS, *(f"<{tag}>x{tag}{tag}" for tag in tags)):
        try:
            calls = made.parse(text)
        except Exception as error:
            raise ExtensionError(
                f"{label}: parse({text!r}) raised {type(error).__name__}: {error}. What is malformed must come back "
                "as a ParsedCall with error"
            ) from error
        if not isinstance(calls, list) or not all(isinstance(call, ParsedCall) for call in calls):
            raise ExtensionError(f"{label}: parse({text!r}) returned {calls!r:.60}, which is no list of ParsedCall")
    if not made.uses_chat_template:
        _check_rendering(label, "render_results(['1', ''])", lambda: made.render_results(["1", ""]))
    if isinstance(made, NamesResults):
        tried = "render_named_results(['search', ''], ['1', ''])"
        _check_rendering(label, tried, lambda: made.render_named_results(["search", ""], ["1", ""]))
    found: ToolCallFormat = made
    return found


def _check_rendering(label: str, tried: str, render: Callable[[], Any]) -> None:
    try:
        rendered = render()
    except Exception as error:
        raise ExtensionError(f"{label}: {tried} raised {type(error).__name__}: {error}") from error
    if not isinstance(rendered, str):
        raise ExtensionError(f"{label}: {tried} returned {rendered!r:.60}, which is no text")


def without_reasoning(text: str) -> str:
    """``text`` without <think> blocks: a call that the model only considers is not a call.

    A closing tag without an opening one ends reasoning that began in the prompt (Qwen3 opens it there); an opening tag
    without a closing one means that all that follows is reasoning.
    """
    head, closing, tail = text.partition("</think>")
    if closing and "<think>" not in head:
        text = tail
    spoken: list[str] = []
    position = 0
    while True:
        opening = text.find("<think>", position)
        if opening < 0:
            return "".join([*spoken, text[position:]])
        spoken.append(text[position:opening])
        # Found by find and not by an expression, which looks for each opening tag's end anew.
        end = text.find("</think>", opening)
        if end < 0:
            return "".join(spoken)
        position = end + len("</think>")


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


def _opened_blocks(text: str, opening: str, closing: str) -> list[tuple[str, bool]]:
    """What follows every ``opening`` up to the next ``closing`` or ``opening``, and whether it is closed."""
    pieces = (piece.partition(closing) for piece in text.split(opening)[1:])
    return [(body, bool(closed)) for body, closed, _ in pieces]


_FENCE = re.compile(r"```[a-zA-Z0-9_+-]*[ \t]*")


def without_fence(code: str) -> str:
    """Code without the Markdown fence that may surround it."""
    opening, newline, rest = code.strip().partition("\n")
    if not newline or not rest.endswith("```") or _FENCE.fullmatch(opening) is None:
        return code.strip("\n")
    return rest.removesuffix("```").rstrip(" \t").removesuffix("\n")


def truncate_middle(head: str, tail: str, removed: int, unit: str = "tokens") -> str:
    """``head`` and ``tail`` of an over-long text with a line between them that says how much is missing."""
    return f"{head}\n[... {removed} {unit} left out ...]\n{tail}"


def _hermes_call(body: str) -> ParsedCall:
    try:
        # Newlines and tabs inside strings are what a program is made of; refusing them would only cost turns.
        call = load_json(body, strict=False)
    except ValueError as error:
        return _malformed(body, str(error))
    if not isinstance(call, dict):
        return _malformed(body, 'expected an object with "name" and "arguments"')
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return _malformed(body, '"name" is missing')
    if isinstance(arguments, str):
        return _call_of_json(name, arguments, body)
    if not isinstance(arguments, dict):
        return _malformed(body, '"arguments" is not an object', name)
    return ParsedCall(name, arguments, body)


def _call_of_json(name: str, written: str, raw: str) -> ParsedCall:
    """A call whose arguments are ``written`` as JSON."""
    try:
        arguments = load_json(written, strict=False)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        return _malformed(raw, '"arguments" is not an object', name)
    return ParsedCall(name, arguments, raw)


def _malformed(body: str, reason: str, name: str = "") -> ParsedCall:
    # Short on purpose: it is part of the response and of its length limit.
    return ParsedCall(name, {}, body, error=f"Error: invalid tool call: {reason}")
