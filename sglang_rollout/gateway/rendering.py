"""From messages to token ids, and from sampled ids to what a client reads.

What the built-in loop makes of a conversation this makes too, id for id: the first prompt is the chat template's text,
tokenised once; results of a turn's calls are put into the template's text around them (``TurnGlue``). Known turns are
never rendered: where they lie in a history, their sampled ids take the place of a mark in the rendered text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_retool.config import MultiTurnConfig
from megatron_retool.data.chat_template import ChatTemplateError as RenderError
from megatron_retool.data.chat_template import render
from megatron_retool.registry import ExtensionError
from sglang_rollout.agent.call_positions import call_positions
from sglang_rollout.agent.chosen_format import make_format, parsed_calls
from sglang_rollout.agent.long_texts import LARGE
from sglang_rollout.agent.loop import stop_conditions
from sglang_rollout.agent.tool_call_formats import CallShape, HasCallShape, ToolCallFormat
from sglang_rollout.agent.turn_glue import Tokenizer, TurnGlue, TurnGlueError
from sglang_rollout.agent.written_calls import ParsedCall
from sglang_rollout.engine.base import GenerateResult
from sglang_rollout.gateway.conversation import Constraint, ConversationAnswer, Message, SpokenCall
from sglang_rollout.gateway.errors import invalid
from sglang_rollout.gateway.text_size import characters, message_sizes
from tools.arguments import typed_arguments
from untrusted import without_surrogates

PROMPTS_KEPT = 128
WINDOW = 1 << 14
"""Characters that are tokenised at once of a text that may be far too long."""
"""New histories whose ids are kept: the rollouts of a group begin with the same one."""
REASONING_END = "</think>"
_END_OF_CONTEXT = 16
"""Tokens; those that begin reasoning are fewer."""
_OPENING_TAG = re.compile(r"\s*<[^<>\s]*>\s*\Z")


class ContextRenderer:
    """Renders for one tokenizer and one tool-call format.

    Attributes:
        end_of_turn_id: the token that ends a turn.
        stop: where every turn ends.
        longest_token: characters of the vocabulary's longest token: n tokens hold at most n times as many.
        vocabulary_size: one more than the highest id of a token.

    Raises:
        ExtensionError: rollout.multi_turn.format cannot be used, or writes results outside the chat template.
        ChatTemplateError: the template cannot express tool results.
    """

    def __init__(self, tokenizer: Tokenizer, config: MultiTurnConfig) -> None:
        self._tokenizer = tokenizer
        self._format: ToolCallFormat = make_format(config)
        if not self._format.uses_chat_template:
            raise ExtensionError(
                f"rollout.multi_turn.format={config.format}: its results are no messages of the chat template, which "
                "an API client sends: use hermes, or a format with uses_chat_template=True"
            )
        self._glue = TurnGlue(tokenizer, self._format, config.max_tool_response_tokens)
        self.end_of_turn_id = self._glue.end_of_turn_id
        self.stop = stop_conditions(self._format, tokenizer, self.end_of_turn_id)
        vocabulary = tokenizer.get_vocab()
        self.longest_token = max(map(len, vocabulary), default=1)
        self.vocabulary_size = 1 + max(vocabulary.values(), default=0)
        self._max_result_tokens = config.max_tool_response_tokens
        self._thinking_switches = thinking_switches(getattr(tokenizer, "chat_template", None))
        self._glues: dict[bool | None, TurnGlue] = {}
        self._longest_result = config.max_tool_response_tokens * self.longest_token
        self._prompts: dict[str, list[int]] = {}
        # It cannot be guessed, so no message can hold it.
        self._mark = f"\u2039turn {secrets.token_hex(8)} {{}}\u203a"

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        known: Mapping[int, Sequence[int]] | None = None,
        most: int | None = None,
        thinking: bool | None = None,
    ) -> list[int]:
        """Token ids of a whole history with the header of the next turn.

        Args:
            known: sampled ids of the turns at these places.
            most: tokens that are of use. Of a history with more, only a beginning of more than ``most`` ids is given.
            thinking: of ``Call``.

        Raises:
            ApiError: the template refuses the messages.
        """
        if not known:
            return list(self._new_prompt(messages, tools, most, thinking))
        shown = self._shown(messages)
        for place in known:
            shown[place] = {"role": "assistant", "content": self._mark.format(place)}
        text = self._rendered(shown, tools, thinking)
        ids: list[int] = []
        for place, sampled in known.items():
            before, result, text = text.partition(self._mark.format(place))
            if not result or not text.startswith(self._glue.end_of_turn_text):
                # This template shows such a turn differently, or not at all: then it is text like any other.
                return self.prompt(messages, tools, None, most, thinking)
            text = text[len(self._glue.end_of_turn_text) :]
            ids += [*self._encode(before, most), *self._ended(sampled)]
        return [*ids, *self._encode(text, most)]

    def sizes(self, messages: Sequence[Message]) -> list[int]:
        """[len(messages)] characters of each message that the chat template may show."""
        return message_sizes(messages, self._longest_result)

    def _new_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        most: int | None,
        thinking: bool | None,
    ) -> list[int]:
        """Of a history without known turns."""
        if characters([messages, tools]) > LARGE:
            # Keeping these would fill the memory; and threads of the session come here.
            return self._encode(self._rendered(self._shown(messages), tools, thinking), most)
        key = json.dumps([messages, tools, thinking])
        ids = self._prompts.get(key)
        if ids is None:
            while len(self._prompts) >= PROMPTS_KEPT:
                del self._prompts[next(iter(self._prompts))]
            ids = self._prompts[key] = self._encode(self._rendered(self._shown(messages), tools, thinking))
        return ids

    def after_turn(
        self,
        sampled: Sequence[int],
        messages: Sequence[Message],
        most: int | None = None,
        thinking: bool | None = None,
    ) -> list[int]:
        """Token ids of ``messages`` that follow a turn of ids ``sampled``, with the header of the next turn.

        Args:
            most, thinking: as for ``prompt``.

        Raises:
            ApiError: the template refuses the messages.
        """
        missing = self._ended(sampled)[len(sampled) :]
        if messages and all(message["role"] == "tool" for message in messages):
            return [*missing, *self._glue_of(thinking).render([message["content"] for message in messages]).ids]
        mark = self._mark.format("")
        before = [{"role": "user", "content": "question"}, {"role": "assistant", "content": mark}]
        _, _, text = self._rendered([*before, *self._shown(messages)], None, thinking).partition(mark)
        if not text.startswith(self._glue.end_of_turn_text):
            raise invalid("messages", "the chat template cannot show these messages after an assistant's turn")
        return [*missing, *self._encode(text[len(self._glue.end_of_turn_text) :], most)]

    def result_size(self, text: str) -> tuple[int, bool]:
        """The tokens of a tool's result as the model reads it, and whether its middle is left out."""
        return self._glue.size(text)

    def positions(self, sampled: Sequence[int], calls: Sequence[SpokenCall]) -> list[int]:
        """Tokens of a turn before each of its ``calls``; -1 where one is not found."""
        return call_positions(self._tokenizer, sampled, [call.raw for call in calls])

    def answer(
        self,
        result: GenerateResult,
        stop: Sequence[str],
        prompt_tokens: int,
        with_tokens: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        constraint: Constraint | None = None,
    ) -> ConversationAnswer:
        """What a client reads of a turn.

        Args:
            stop: the call's own stop texts.
            tools: whose schemas say what arguments written as text are.
            with_tokens: fill ``ConversationAnswer.tokens``.
            constraint: of the call.
        """
        ids = result.output_ids
        ends = {self.end_of_turn_id}
        if constraint is not None:
            # A grammar ends with any of the tokens at which the engine's model stops.
            ends.add(result.matched_stop if isinstance(result.matched_stop, int) else self.end_of_turn_id)
        ended = result.finish_reason == "stop" and bool(ids) and ids[-1] in ends
        visible = ids[:-1] if ids and (ended or ids[-1] in self.stop.token_ids) else ids
        text = self.text_of(visible)
        of_schema = constraint is not None and constraint.schema is not None
        if of_schema:
            # A client reads JSON: reasoning that the prompt began is no part of it.
            text = text.rpartition(REASONING_END)[2].strip()
        may_call = ended and (bool(tools) or not of_schema)
        parsed = parsed_calls(self._format, text, lambda: _names(tools or ())) if may_call else []
        matched = None
        if not ended and result.finish_reason == "stop":
            text, matched = _until(text, stop)
        calls = tuple(_spoken(call, tools or ()) for call in parsed)
        reason = "tool_calls" if calls else "length" if result.finish_reason != "stop" else "stop"
        return ConversationAnswer(
            content=_before_calls(text, parsed),
            calls=calls,
            finish_reason=reason,
            prompt_tokens=prompt_tokens,
            cached_tokens=result.cached_tokens,
            sampled_tokens=len(ids),
            matched_stop=matched,
            tokens=[
                (self._tokenizer.decode([token], skip_special_tokens=False), log_prob)
                for token, log_prob in zip(ids, result.log_probs, strict=True)
            ]
            if with_tokens
            else [],
        )

    @property
    def call_shape(self) -> CallShape | None:
        """How calls are written, for a grammar; None: the format has none."""
        return self._format.call_shape if isinstance(self._format, HasCallShape) else None

    def is_reasoning(self, ids: Sequence[int]) -> bool:
        """Whether a context ends in the middle of the model's reasoning, which its template has begun."""
        return self.text_of(ids[-_END_OF_CONTEXT:]).rstrip().endswith("<think>")

    def text_prompt(self, text: str) -> list[int]:
        """Token ids of a text without a chat template, as the tokenizer begins a text."""
        return self._tokenizer.encode(without_surrogates(text), add_special_tokens=True)

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of token ids, control tokens included."""
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""

    def continuation(self, result: GenerateResult, stop: Sequence[str]) -> str:
        """What follows a text, without the token or the text of ``stop`` that ended it."""
        ids = result.output_ids
        return _until(self.text_of(ids[:-1] if ids and ids[-1] in self.stop.token_ids else ids), stop)[0]

    def _ended(self, sampled: Sequence[int]) -> list[int]:
        """``sampled`` with the end of turn, which is missing where the turn ended otherwise."""
        ids = list(sampled)
        return ids if ids and ids[-1] == self.end_of_turn_id else [*ids, self.end_of_turn_id]

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        """With tool results as the model may read them: limited, and without control tokens."""
        return [
            {**message, "content": self._glue.limited(message["content"])} if message["role"] == "tool" else message
            for message in messages
        ]

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, thinking: bool | None
    ) -> str:
        schemas = [dict(tool) for tool in tools] if tools else None
        switched = self._switched(thinking)
        try:
            return render(self._tokenizer, [messages], schemas, add_generation_prompt=True, **switched)[0]
        except (RenderError, TurnGlueError) as error:
            raise invalid("messages", str(error)) from error

    def _switched(self, thinking: bool | None) -> dict[str, bool]:
        """Arguments of the chat template; none where it has no such switch."""
        return {} if thinking is None else dict.fromkeys(self._thinking_switches, thinking)

    def _glue_of(self, thinking: bool | None) -> TurnGlue:
        switched = self._switched(thinking)
        if not switched:
            return self._glue
        if thinking not in self._glues:
            self._glues[thinking] = TurnGlue(self._tokenizer, self._format, self._max_result_tokens, switched)
        return self._glues[thinking]

    def _encode(self, text: str, most: int | None = None) -> list[int]:
        text = without_surrogates(text)
        if most is not None and len(text) > max(WINDOW, 2 * most):
            begun: list[int] = []
            for number, start in enumerate(range(0, len(text), WINDOW), start=1):
                begun += self._tokenizer.encode(text[start : start + WINDOW], add_special_tokens=False)
                # A token that a seam cuts becomes at most one for each of its characters.
                if len(begun) > most + number * self.longest_token:
                    return begun
        return self._tokenizer.encode(text, add_special_tokens=False)


def thinking_switches(template: Any) -> list[str]:
    """The arguments that tell a chat template whether the model thinks."""
    statements = " ".join(re.findall(r"{[{%].*?[%}]}", template, re.DOTALL)) if isinstance(template, str) else ""
    code = re.sub(r"'[^']*'|\"[^\"]*\"", "", statements)
    return [name for name in ("enable_thinking", "thinking") if re.search(rf"(?<![.\w]){name}\b", code)]


def _spoken(call: ParsedCall, tools: Sequence[Mapping[str, Any]]) -> SpokenCall:
    identifier = f"call_{secrets.token_hex(12)}"
    if call.error:
        return SpokenCall(identifier, call.name, call.raw, call.raw, call.error)
    functions = (tool.get("function") or {} for tool in tools)
    schema = next((each.get("parameters") or {} for each in functions if each.get("name") == call.name), {})
    arguments = typed_arguments(call.arguments, schema)
    return SpokenCall(identifier, call.name, json.dumps(arguments, ensure_ascii=False), call.raw)


def _names(tools: Sequence[Mapping[str, Any]]) -> set[Any]:
    return {(tool.get("function") or {}).get("name") for tool in tools}


def _until(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """``text`` before the first of the texts in ``stop``, and that one."""
    result = [(text.find(each), each) for each in stop if each in text]
    if not result:
        return text, None
    place, matched = min(result)
    return text[:place], matched


def _before_calls(text: str, calls: Sequence[ParsedCall]) -> str:
    """What a turn says before its first call, without the tags that open the call."""
    if not calls:
        return text
    if calls[0].start is not None:
        return text[: calls[0].start].rstrip()
    # A format of one's own does not say where. Calls end the turn; before them, text may quote the same call.
    place = len(text)
    for call in reversed(calls):
        place = text.rfind(call.raw, 0, place)
        if place < 0:
            return text
    return _OPENING_TAG.sub("", text[:place])
