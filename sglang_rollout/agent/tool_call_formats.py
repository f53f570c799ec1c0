"""How a policy writes tool calls and how results come back. Pure text, no tokenizer state.

| format | of | a call |
|---|---|---|
| hermes | Qwen2.5, Qwen3 | ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` |
| qwen3_coder | Qwen3-Coder, Qwen3.5, Nemotron 3 | ``<tool_call><function=…><parameter=…>…</parameter>…`` |
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

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from megatron_retool.registry import Registry
from sglang_rollout.agent.tagged_calls import TaggedTurn, TagGrammar
from sglang_rollout.agent.written_calls import (
    ParsedCall,
    StringAware,
    call_of_json,
    calls_in,
    calls_of_json,
    json_call,
    malformed,
    tagged_blocks,
    without_fence,
)
from untrusted import load_json


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


@dataclass(frozen=True)
class CallShape:
    """How calls are written, for engines that hold a turn to it (XGrammar's structural tags).

    Attributes:
        begin, end: around a call's arguments; ``begin`` has NAME for the tool's name.
        style: of the arguments, as XGrammar calls it.
        between: two calls; None: a turn has one.
        opening, closing: around all of a turn's calls.
    """

    begin: str
    end: str
    style: str = "json"
    between: str | None = "\n"
    opening: str = ""
    closing: str = ""

    def grammar(self, functions: Sequence[Mapping[str, Any]], several: bool) -> dict[str, Any]:
        """A turn that is one call of ``functions`` (name and JSON schema of the parameters), or several."""
        tags = [
            {
                "type": "tag",
                "begin": self.begin.replace("NAME", function["name"]),
                "content": {
                    "type": "json_schema",
                    "json_schema": {"type": "object", **(function.get("parameters") or {})},
                    "style": self.style,
                },
                "end": self.end,
            }
            for function in functions
        ]
        calls = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": self.between or "",
            "at_least_one": True,
            "stop_after_first": not several or self.between is None,
        }
        if not self.opening:
            return calls
        around = [{"type": "const_string", "value": text} for text in (self.opening, self.closing)]
        return {"type": "sequence", "elements": [around[0], calls, around[1]]}


@runtime_checkable
class HasCallShape(Protocol):
    """A format whose calls an engine can be made to write. One's own may leave it out: tool_choice is refused then."""

    call_shape: CallShape


_ANGLED = TagGrammar(
    opening="<tool_call>",
    closing="</tool_call>",
    function=re.compile(r"<function=\s*([^<>\s]+)\s*>"),
    function_end="</function>",
    parameter_start="<parameter=",
    parameter=re.compile(r"<parameter=\s*([^<>\s]+)\s*>"),
    value_end="</parameter>",
    several=True,
    line_breaks=True,
    tags=re.compile(r"</?tool_call>|<function=|</function>|<parameter=|</parameter>"),
    wants_call="expected <function=name>…</function>",
    wants_parameter="expected <parameter=name>…</parameter>",
    wants_end="expected <function=name>…</function>",
)
_SEED = replace(
    _ANGLED,
    opening="<seed:tool_call>",
    closing="</seed:tool_call>",
    tags=re.compile(r"</?seed:tool_call>|<function=|</function>|<parameter=|</parameter>"),
)
_INVOKED = TagGrammar(
    opening="<minimax:tool_call>",
    closing="</minimax:tool_call>",
    function=re.compile(r"<invoke\s+name=[\"']?([^\"'<>\s]+)[\"']?\s*>"),
    function_end="</invoke>",
    parameter_start="<parameter",
    parameter=re.compile(r"<parameter\s+name=[\"']?([^\"'<>\s]+)[\"']?\s*>"),
    value_end="</parameter>",
    several=True,
    line_breaks=False,
    tags=re.compile(r"</?minimax:tool_call>|<invoke\s|</invoke>|<parameter\s|</parameter>"),
    wants_call='expected <invoke name="…">…</invoke>',
    wants_parameter='expected <parameter name="…">…</parameter>',
    wants_end='expected <invoke name="…">…</invoke>',
)
_KEYS_AND_VALUES = TagGrammar(
    opening="<tool_call>",
    closing="</tool_call>",
    function=re.compile(r"([^<\s][^<]*)(?=<arg_key>|</tool_call>)"),
    function_end="",
    parameter_start="<arg_key>",
    parameter=re.compile(r"<arg_key>\s*([^<\s][^<]*)</arg_key>\s*<arg_value>"),
    value_end="</arg_value>",
    several=False,
    line_breaks=False,
    tags=re.compile(r"</?tool_call>|</?arg_key>|</?arg_value>"),
    wants_call="expected the name of a function",
    wants_parameter="expected <arg_key>…</arg_key><arg_value>…</arg_value>",
    wants_end="expected <arg_key>…</arg_key><arg_value>…</arg_value>",
)


@formats.register("hermes")
class HermesFormat(_ResultsByChatTemplate):
    """JSON in <tool_call> tags, as Qwen2.5 and Qwen3 are trained to write."""

    call_shape = CallShape('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>")

    def parse(self, text: str) -> list[ParsedCall]:
        """The calls in an assistant's turn, in order."""
        return calls_of_json(text, "<tool_call>", "</tool_call>", json_call)


@formats.register("qwen3_coder")
class Qwen3CoderFormat(_ResultsByChatTemplate):
    """Functions and parameters in tags within <tool_call>, as Qwen3-Coder and Qwen3.5 are trained to write.

    Values are texts where the tool's schema takes one, else JSON.
    """

    call_shape = CallShape("<tool_call>\n<function=NAME>\n", "\n</function>\n</tool_call>", "qwen_xml")

    def parse(self, text: str) -> list[ParsedCall]:
        """The calls in an assistant's turn, in order."""
        return calls_in(text, _ANGLED.opening, TaggedTurn(text, _ANGLED).read)


@formats.register("seed_oss")
class SeedOssFormat(_ResultsByChatTemplate):
    """As ``Qwen3CoderFormat``, in Seed-OSS's own tags."""

    call_shape = CallShape("<seed:tool_call>\n<function=NAME>\n", "\n</function>\n</seed:tool_call>", "qwen_xml")

    def parse(self, text: str) -> list[ParsedCall]:
        """The calls in an assistant's turn, in order."""
        return calls_in(text, _SEED.opening, TaggedTurn(text, _SEED).read, tag="seed:think")


@formats.register("minimax_m2")
class MiniMaxM2Format(_ResultsByChatTemplate):
    """<invoke> tags in <minimax:tool_call>, as MiniMax-M2 is trained to write; values as in ``Qwen3CoderFormat``."""

    call_shape = CallShape(
        '<invoke name="NAME">\n',
        "\n</invoke>",
        "minimax_xml",
        opening="<minimax:tool_call>\n",
        closing="\n</minimax:tool_call>",
    )

    def parse(self, text: str) -> list[ParsedCall]:
        """The calls in an assistant's turn, in order."""
        return calls_in(text, _INVOKED.opening, TaggedTurn(text, _INVOKED).read)


@formats.register("deepseek_v3")
class DeepSeekV3Format(_ResultsByChatTemplate):
    """Names and JSON between control tokens, as DeepSeek-V3, R1 and V3.1 are trained to write; several in a turn.

    V3 and R1 write the kind of tool before its name and put the JSON in a Markdown fence, V3.1 does neither.
    """

    def parse(self, text: str) -> list[ParsedCall]:
        """The calls in an assistant's turn, in order."""
        begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
        return calls_of_json(text, begin, end, self._read, wrapper="<｜tool▁calls▁begin｜>")

    def _read(self, body: str) -> ParsedCall:
        head, result, rest = body.partition("<｜tool▁sep｜>")
        fenced = head.strip() == "function" and "```" in rest
        name, _, written = rest.partition("\n") if fenced else (head, "", rest)
        if not (result and name.strip()):
            return malformed(body, "expected name<｜tool▁sep｜>{…}")
        return call_of_json(name.strip(), without_fence(written), body)


@formats.register("llama3")
class Llama3Format(_ResultsByChatTemplate):
    """A turn that is one JSON object with a name and parameters, as Llama 3.1 to 3.3 are trained to write."""

    call_shape = CallShape('{"name": "NAME", "parameters": ', "}", between=None)

    def parse(self, text: str) -> list[ParsedCall]:
        """The call that follows <|python_tag|>, or that is the whole turn."""
        body = text.strip()
        if body.startswith("{"):
            call = json_call(body)
            # It may also be the answer.
            return [replace(call, start=0, certain=False)] if _is_written_as_a_call(body) else []
        before, tagged, body = text.partition("<|python_tag|>")
        if not tagged:
            return []
        if not body.strip().startswith("{"):
            return [malformed(body.strip(), "expected an object after <|python_tag|>", start=len(before))]
        return [replace(json_call(body.strip()), start=len(before))]


def _is_written_as_a_call(body: str) -> bool:
    """Whether ``body`` is an object of a name and parameters, and of nothing else."""
    try:
        written = load_json(body, strict=False)
    except ValueError:
        return False
    return (
        isinstance(written, dict)
        and written.keys() <= {"type", "name", "parameters", "arguments"}
        and isinstance(written.get("name"), str)
        and isinstance(written.get("parameters", written.get("arguments")), dict)
    )


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
        """The calls in an assistant's turn, in order."""
        if not text.endswith(self.closing_tags):
            return []
        spoken = text.removesuffix(self.closing_tags[0])
        return calls_in(spoken, _KEYS_AND_VALUES.opening, TaggedTurn(spoken, _KEYS_AND_VALUES).read)

    def render_results(self, results: Sequence[str]) -> str:
        """The results as the model's template writes them, up to where the assistant speaks again."""
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
    _ENDS = StringAware("<|end|>")

    def parse(self, text: str) -> list[ParsedCall]:
        """The calls in an assistant's turn, in order."""
        if not text.endswith("<|call|>"):
            return []
        whole, position = text.removesuffix("<|call|>"), 0
        while (begun := whole.find("<|message|>", position)) >= 0:
            header = whole[position:begun].rpartition("<|start|>")
            recipient = self._RECIPIENT.search(header[2])
            body = begun + len("<|message|>")
            # What a call carries is JSON, whose strings may hold any tag.
            end = self._ENDS.find(whole, body)[0] if recipient else whole.find("<|end|>", body)
            if recipient and end == len(whole):
                name = recipient[1].rpartition(".")[2]
                if not self._NAME.fullmatch(name):
                    break
                call = call_of_json(name, whole[body:].strip() or "{}", whole[body:])
                return [replace(call, start=position + len(header[0]))]
            if end < 0:
                break
            position = end + len("<|end|>")
        return [
            malformed(whole[position:], "expected to=functions.name and <|message|> before <|call|>", start=position)
        ]

    def render_results(self, results: Sequence[str]) -> str:
        """The results as the model's template writes them, up to where the assistant speaks again."""
        return self.render_named_results([""] * len(results), results)

    def render_named_results(self, names: Sequence[str], results: Sequence[str]) -> str:
        """The results with the tools' names, up to where the assistant speaks again."""
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
        """The calls in an assistant's turn, in order."""
        return [
            ParsedCall(self.code_tool, {"code": without_fence(body)}, body)
            if body is not None
            else malformed("", f"</{tag}> without <{tag}>")
            for tag, body in tagged_blocks(text, ("code",))
        ]

    def render_results(self, results: Sequence[str]) -> str:
        """The results as the model's template writes them, up to where the assistant speaks again."""
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
        """The calls in an assistant's turn, in order."""
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
        """The results as the model's template writes them, up to where the assistant speaks again."""
        return "".join(f" <result>\n{result}\n</result>" for result in results)
