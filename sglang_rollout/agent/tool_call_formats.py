"""How a policy writes tool calls and how results come back. Pure text, no tokenizer state.

| format | of | a call |
|---|---|---|
| hermes | Qwen2.5, Qwen3 | ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` |
| qwen3_coder | Qwen3-Coder, Qwen3.5 | ``<tool_call><function=…><parameter=…>…</parameter></function></tool_call>`` |
| seed_oss | Seed-OSS | ``<seed:tool_call><function=…><parameter=…>…</parameter></function></seed:tool_call>`` |
| minimax_m2 | MiniMax-M2 | ``<minimax:tool_call><invoke name="…"><parameter name="…">…`` |
| deepseek_v3 | DeepSeek-V3, R1, V3.1 | ``<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`` |
| llama3 | Llama 3.1 to 3.3 | ``{"name": …, "parameters": {…}}``, which is the whole turn |
| glm45 | GLM-4.5, GLM-4.6 | ``<tool_call>name<arg_key>…</arg_key><arg_value>…</arg_value></tool_call>`` |
| harmony | gpt-oss | ``to=functions.name<|channel|>…<|message|>{…}<|call|>`` |
| retool | arXiv:2504.11536 | ``<code>…</code>``, answered in ``<interpreter>`` |
| arpo | arXiv:2507.19849 | ``<search>…</search>``, ``<python>…</python>``, answered in ``<result>`` |

Down to llama3, results are tool messages of the chat template, which ends the turn of calls as any other. With the
others a turn ends at a closing tag or token, and the format writes the results itself. llama3 and harmony have one call
in a turn, the others as many as the model writes.

A call that cannot be understood is a ``ParsedCall`` with ``error`` set: the message goes back to the model as the
tool's output, so that it can correct itself. Parsing never raises.

rollout.multi_turn.format names a class of ``formats`` or anybody's own, made with rollout.multi_turn.format_kwargs.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from megatron_retool.config import Config, MultiTurnConfig
from megatron_retool.registry import ExtensionError, Registry, check_methods
from sglang_rollout.agent.written_calls import (
    ParsedCall,
    call_of_json,
    json_call,
    malformed,
    opened_blocks,
    tagged_blocks,
    without_fence,
    without_reasoning,
)
from tools.arguments import WrittenText

logger = logging.getLogger(__name__)


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


class _ResultsByChatTemplate:
    """Results are tool messages of the chat template, and a turn of calls ends as any other does."""

    uses_chat_template = True
    closing_tags: tuple[str, ...] = ()

    def render_results(self, results: Sequence[str]) -> str:
        raise NotImplementedError("results are tool messages of the chat template")


@formats.register("hermes")
class HermesFormat(_ResultsByChatTemplate):
    """JSON in <tool_call> tags, as Qwen2.5 and Qwen3 are trained to write."""

    def parse(self, text: str) -> list[ParsedCall]:
        return _calls_between("<tool_call>", "</tool_call>", without_reasoning(text), json_call)


@formats.register("qwen3_coder")
class Qwen3CoderFormat(_ResultsByChatTemplate):
    """Functions and parameters in tags within <tool_call>, as Qwen3-Coder and Qwen3.5 are trained to write.

    Values are texts where the tool's schema takes one, else JSON.
    """

    def parse(self, text: str) -> list[ParsedCall]:
        return _calls_between("<tool_call>", "</tool_call>", without_reasoning(text), _call_in_tags)


@formats.register("seed_oss")
class SeedOssFormat(_ResultsByChatTemplate):
    """As ``Qwen3CoderFormat``, in Seed-OSS's own tags."""

    def parse(self, text: str) -> list[ParsedCall]:
        spoken = without_reasoning(text, "seed:think")
        return _calls_between("<seed:tool_call>", "</seed:tool_call>", spoken, _call_in_tags)


@formats.register("minimax_m2")
class MiniMaxM2Format(_ResultsByChatTemplate):
    """<invoke> tags in <minimax:tool_call>, as MiniMax-M2 is trained to write; values as in ``Qwen3CoderFormat``."""

    def parse(self, text: str) -> list[ParsedCall]:
        calls: list[ParsedCall] = []
        for body, closed in opened_blocks(without_reasoning(text), "<minimax:tool_call>", "</minimax:tool_call>"):
            invocations = opened_blocks(body, "<invoke ", "</invoke>") if closed else []
            calls += [_invocation(inside) if ended else malformed(inside, _INVOKE) for inside, ended in invocations]
            if not invocations:
                calls.append(malformed(body, _INVOKE if closed else "the tool call has no </minimax:tool_call>"))
        return calls


@formats.register("deepseek_v3")
class DeepSeekV3Format(_ResultsByChatTemplate):
    """Names and JSON between control tokens, as DeepSeek-V3, R1 and V3.1 are trained to write; several in a turn.

    V3 and R1 write the kind of tool before its name and put the JSON in a Markdown fence, V3.1 does neither.
    """

    def parse(self, text: str) -> list[ParsedCall]:
        return _calls_between("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", without_reasoning(text), self._read)

    def _read(self, body: str) -> ParsedCall:
        head, found, rest = body.partition("<｜tool▁sep｜>")
        fenced = head.strip() == "function" and "```" in rest
        name, _, written = rest.partition("\n") if fenced else (head, "", rest)
        if not (found and name.strip()):
            return malformed(body, "expected name<｜tool▁sep｜>{…}")
        return call_of_json(name.strip(), without_fence(written), body)


@formats.register("llama3")
class Llama3Format(_ResultsByChatTemplate):
    """A turn that is one JSON object with a name and parameters, as Llama 3.1 to 3.3 are trained to write."""

    def parse(self, text: str) -> list[ParsedCall]:
        before, tagged, body = text.partition("<|python_tag|>")
        body = (body if tagged else before).strip()
        if not body.startswith("{"):
            return [malformed(body, "expected an object after <|python_tag|>")] if tagged else []
        call = json_call(body)
        # Without the tag, an object may also be the answer.
        return [call] if tagged or call.name else []


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
        return _calls_between("<tool_call>", "</tool_call>", spoken, self._read)

    def _read(self, body: str) -> ParsedCall:
        head, *pairs = body.split("<arg_key>")
        name = head.strip()
        if not name or "<" in name:
            return malformed(body, "expected the name of a function", name)
        arguments: dict[str, Any] = {}
        for pair in pairs:
            key, closed, rest = pair.partition("</arg_key>")
            between, opened, value = rest.partition("<arg_value>")
            value, ended, after = value.rpartition("</arg_value>")
            if not (closed and opened and ended and key.strip()) or between.strip() or after.strip():
                return malformed(body, "expected <arg_key>…</arg_key><arg_value>…</arg_value>", name)
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
            return [malformed(body, "expected to=functions.name and <|message|> before <|call|>")]
        return [call_of_json(name, body.strip() or "{}", body)]

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
            else malformed("", f"</{tag}> without <{tag}>")
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
                calls.append(malformed("", f"</{tag}> without <{tag}>"))
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


_INVOKE = 'expected <invoke name="…">…</invoke>'
_NAMED = re.compile(r"name=[\"']?([^\"'>\s]+)[\"']?\s*>")


def _named(text: str) -> tuple[str, str]:
    """The name that a tag's attribute gives, and what follows the tag."""
    found = _NAMED.match(text)
    return ("", text) if found is None else (found[1], text[found.end() :])


def _calls_between(opening: str, closing: str, text: str, read: Callable[[str], ParsedCall]) -> list[ParsedCall]:
    """The calls of ``text``, one between each ``opening`` and its ``closing``."""
    return [
        read(body.strip()) if closed else malformed(body.strip(), f"the tool call has no {closing}")
        for body, closed in opened_blocks(text, opening, closing)
    ]


def _invocation(inside: str) -> ParsedCall:
    """A call from ``name="…"><parameter name="…">value</parameter>…``."""
    name, rest = _named(inside)
    if not name:
        return malformed(inside, _INVOKE)
    arguments: dict[str, Any] = {}
    for parameter, closed in opened_blocks(rest, "<parameter ", "</parameter>"):
        key, value = _named(parameter)
        if not (closed and key):
            return malformed(inside, 'expected <parameter name="…">…</parameter>', name)
        arguments[key] = WrittenText(value)
    return ParsedCall(name, arguments, inside)


def _call_in_tags(body: str) -> ParsedCall:
    """A call from ``<function=name><parameter=key>value</parameter>…</function>``."""
    head, opened, rest = body.partition(">")
    inside, closed, after = rest.rpartition("</function>")
    name = head.removeprefix("<function=").strip()
    if not (opened and closed and head.startswith("<function=") and name) or after.strip():
        return malformed(body, "expected <function=name>…</function>")
    arguments: dict[str, Any] = {}
    for parameter, finished in opened_blocks(inside, "<parameter=", "</parameter>"):
        key, found, value = parameter.partition(">")
        if not (finished and found and key.strip()):
            return malformed(body, "expected <parameter=name>…</parameter>", name)
        arguments[key.strip()] = WrittenText(value.removeprefix("\n").removesuffix("\n"))
    return ParsedCall(name, arguments, body)
