"""The token ids between an assistant turn and the next: end of message, tool results, header of the next turn.

The chat template is rendered once, over dummy messages, and what it writes after the assistant's end of turn is kept
as text around the results (``TurnGlue``). From then on no message is ever rendered again: a result is put into that
text, tokenised once, and its ids are appended to the ids that the engine sampled. So old turns keep their ids, also
with templates that would render them differently later (Qwen3 drops the reasoning of earlier turns).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_retool import template_limits
from megatron_retool.errors import InputError
from sglang_rollout.agent.tool_call_formats import NamesResults, ToolCallFormat
from untrusted import without_surrogates

_ASSISTANT = "\u2039assistant turn\u203a"
_RESULT = "\u2039tool result {}\u203a"
_CHARACTERS_A_TOKEN = 64
"""A result of more than this for each token that it may have is cut before it is tokenised, which would take long."""
_RESULTS_KEPT, _CHARACTERS_KEPT = 1024, 4096
"""Results whose ids are kept, and how long they may be: responses to a prompt often make the same call."""
_CURE = "use a template with tool support (model.tokenizer_path), or rollout.multi_turn.format=retool"


class TurnGlueError(InputError):
    """The tokenizer's chat template cannot express tool results after an assistant turn."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that rollout uses."""

    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Token ids of a text."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str:
        """The text of token ids."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Any:
        """The conversation as the model's template writes it."""

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """The id of a token; None where it has none."""

    def get_added_vocab(self) -> dict[str, int]:
        """Ids of the tokens that were added, by token."""

    def get_vocab(self) -> dict[str, int]:
        """Ids of all tokens, by token."""


@dataclass(frozen=True)
class RenderedResults:
    """Ids that follow an assistant turn, and for each result its tokens and whether its middle was left out."""

    ids: list[int]
    result_tokens: list[int]
    truncated: list[bool]


class TurnGlue:
    """Renders tool results of one format for one tokenizer.

    Args:
        tokenizer: with a chat template, where the format uses one.
        call_format: see tool_call_formats.
        max_result_tokens: a longer result loses its middle.
        template_arguments: passed to the chat template (enable_thinking, …).

    Attributes:
        end_of_turn_id: token that the model samples at the end of a turn.
        end_of_turn_text: its text.

    Raises:
        ChatTemplateError: the template does not render tool messages, or ends a turn with no single token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        call_format: ToolCallFormat,
        max_result_tokens: int,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._format = call_format
        self._max_result_tokens = max_result_tokens
        self._template_arguments = dict(template_arguments or {})
        self._delta_parts: dict[int, list[str]] = {}
        self._limited_before = functools.lru_cache(_RESULTS_KEPT)(self._limit)
        self._rendered_before = functools.lru_cache(_RESULTS_KEPT)(self._render)
        # Text of a tool that spells a control token would become that token, and end the turn or forge a message.
        added = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
        tokens = [token for token in added if token and not token.isspace()]
        self._forged = re.compile("|".join(re.escape(token) for token in tokens)) if tokens else None
        self._mark = self._encode("\N{REPLACEMENT CHARACTER}")
        # Without the token of what is unknown, which any text may hold.
        self._control_ids = {tokenizer.get_added_vocab()[token] for token in tokens} - set(self._mark)
        if call_format.uses_chat_template:
            self.end_of_turn_text = self._template_end_of_turn()
            identifier = tokenizer.convert_tokens_to_ids(self.end_of_turn_text)
            assert identifier is not None
            self.end_of_turn_id = identifier
        elif tokenizer.eos_token_id is None:
            raise TurnGlueError(
                "the tokenizer has no eos_token, at which a response could end: set it in its tokenizer_config.json"
            )
        else:
            self.end_of_turn_id = tokenizer.eos_token_id
            self.end_of_turn_text = self._decode([tokenizer.eos_token_id])

    def limited(self, result: str) -> str:
        """A tool's result as the model may read it: no longer than it may be, and without control tokens."""
        return self._limited(result)[0]

    def size(self, result: str) -> tuple[int, bool]:
        """The tokens of ``limited``, and whether the result's middle is left out."""
        return self._limited(result)[1:]

    def render(self, results: Sequence[str], names: Sequence[str] = ()) -> RenderedResults:
        """Ids to append after a turn's end-of-turn token, for the results of that turn's calls in order.

        Args:
            names: of the tools that were called; none: the chat template's messages do not show them.
        """
        short = sum(map(len, (*results, *names))) <= _CHARACTERS_KEPT
        render = self._rendered_before if short else self._render
        ids, lengths, truncated = render(tuple(results), tuple(names))
        return RenderedResults(list(ids), list(lengths), list(truncated))

    def _render(self, results: tuple[str, ...], names: tuple[str, ...]) -> tuple[list[int], list[int], list[bool]]:
        texts, lengths, truncated = [], [], []
        for result in results:
            text, length, cut = self._limited(result)
            texts.append(text)
            lengths.append(length)
            truncated.append(cut)
        ids = self._encode(self._text(texts, [self._defused(name)[0] for name in names]))
        return ids, lengths, truncated

    def _text(self, results: Sequence[str], names: Sequence[str]) -> str:
        if names and isinstance(self._format, NamesResults):
            return self._format.render_named_results(names, results)
        if not self._format.uses_chat_template:
            return self._format.render_results(results)
        parts = self._parts(len(results))
        return "".join(part + result for part, result in zip(parts, [*results, ""], strict=True))

    def _limited(self, text: str) -> tuple[str, int, bool]:
        """``text`` as the model may read it, its tokens, and whether its middle is left out."""
        return (self._limited_before if len(text) <= _CHARACTERS_KEPT else self._limit)(text)

    def _limit(self, text: str) -> tuple[str, int, bool]:
        limit = self._max_result_tokens
        half = limit * _CHARACTERS_A_TOKEN // 2
        if len(text) > 2 * half:
            (_, begin), (_, end) = self._defused(text[:half]), self._defused(text[-half:])
        else:
            defused, begin = self._defused(text)
            end = begin
            if len(begin) <= limit:
                return defused, len(begin), False
        # The note that says so counts too; re-tokenising can add a token at each seam, hence the loop.
        keep = limit
        while keep > 0:
            head = self._decode(begin[: (keep + 1) // 2])
            tail = self._decode(end[max(0, len(end) - keep // 2) :])
            if begin is end:
                shortened = _truncate_middle(head, tail, len(begin) - keep)
            else:
                shortened = _truncate_middle(head, tail, len(text) - len(head) - len(tail), "characters")
            length = len(self._encode(shortened))
            if length <= limit:
                return shortened, length, True
            keep -= max(1, length - limit)
        return self._decode(begin[:limit]), min(limit, len(begin)), True

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""

    def _defused(self, text: str) -> tuple[str, list[int]]:
        """``text`` without surrogates, which have no tokens, and without control tokens; and its tokens."""
        text = without_surrogates(text)
        if self._forged is not None:
            text = self._forged.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)
        ids = self._encode(text)
        if not self._control_ids.isdisjoint(ids):
            # Control tokens of one character, and what normalisation makes into one, as full-width letters.
            text = self._decode(
                [kept for each in ids for kept in (self._mark if each in self._control_ids else [each])]
            )
            ids = self._encode(text)
        return text, ids

    def _parts(self, count: int) -> list[str]:
        """The template's text around ``count`` results: before the first, between them, after the last."""
        if count not in self._delta_parts:
            delta = self._template_delta(count)
            parts = []
            for index in range(count):
                before, result, delta = delta.partition(_RESULT.format(index))
                if not result:
                    raise TurnGlueError(f"the chat template does not show the content of tool messages: {_CURE}")
                parts.append(before)
            self._delta_parts[count] = [*parts, delta]
        return self._delta_parts[count]

    def _template_delta(self, results: int) -> str:
        asked = {"role": "user", "content": "question"}
        turn: dict[str, Any] = {"role": "assistant", "content": _ASSISTANT}
        answers = [{"role": "tool", "content": _RESULT.format(index)} for index in range(results)]
        end_of_turn = self.end_of_turn_text
        try:
            after_turn = self._rendered_after_turn([asked, turn, *answers])
        except TurnGlueError:
            # MiniMax-M2's, for one, renders results only after a turn that has calls: their text ends with the turn.
            calls = [{"type": "function", "function": {"name": "tool", "arguments": {}}}] * results
            after_turn = self._rendered_after_turn([asked, {**turn, "tool_calls": calls}, *answers])
            after_turn = after_turn[max(0, after_turn.find(end_of_turn)) :]
        if not after_turn.startswith(end_of_turn):
            raise TurnGlueError(f"the chat template ends an assistant turn differently before a tool message: {_CURE}")
        return after_turn[len(end_of_turn) :]

    def _rendered_after_turn(self, messages: Sequence[Mapping[str, Any]], generation_prompt: bool = True) -> str:
        template_limits.install()
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation_prompt, **self._template_arguments
            )
        except Exception as error:
            # Templates raise what they like: jinja2 errors, or their own through raise_exception.
            raise TurnGlueError(f"the chat template cannot render a tool message ({error}): {_CURE}") from error
        head, result, tail = text.rpartition(_ASSISTANT)
        if not result:
            raise TurnGlueError(f"the chat template does not show the content of assistant messages: {_CURE}")
        return tail

    def _template_end_of_turn(self) -> str:
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ASSISTANT}]
        after = self._rendered_after_turn(messages, generation_prompt=False)
        for token in sorted(self._tokenizer.get_added_vocab(), key=len, reverse=True):
            if token and after.startswith(token):
                return token
        raise TurnGlueError(
            f"the chat template ends an assistant turn with {after!r}, which does not begin with a special token that "
            f"a model could sample to stop: {_CURE}"
        )


def _truncate_middle(head: str, tail: str, removed: int, unit: str = "tokens") -> str:
    """``head`` and ``tail`` of an over-long text with a line between them that says how much is missing."""
    return f"{head}\n[... {removed} {unit} left out ...]\n{tail}"
