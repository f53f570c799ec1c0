"""From conversations to token ids, and which of those ids an assistant has to learn.

Three rules hold throughout:

* the text comes from the tokenizer's own chat template, never from a format written down here;
* what a message says never becomes a control token: only the template writes those (``_without_control_tokens``);
* the text is cut where the policy starts and stops to speak, and the pieces are tokenised one by one. That is how
  the ids arise in a rollout (the prompt's and the tool results' ids are appended to sampled ids), so no token ever
  spans the border between what is trained and what is not.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_retool import template_limits
from megatron_retool.errors import InputError
from untrusted import load_json

Message = dict[str, Any]
Tools = Sequence[dict[str, Any]] | None

CHATML_HEADER = "<|im_start|>assistant\n"
CHATML_END = "<|im_end|>"


class ChatTemplateError(InputError):
    """A conversation cannot be rendered, or the assistant's part of the rendered text cannot be told apart.

    Attributes:
        row: the conversation's place among those that were given; None where no single one is at fault.
    """

    def __init__(self, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.row = row


@dataclass(frozen=True)
class TokenizedConversation:
    """Token ids of one conversation.

    ``ids`` int32 [L]; ``loss_mask`` bool [L], true on what the assistant says: content, tool calls and the token that
    ends the turn; ``turn_ids`` int16 [L], the assistant turn (0, 1, …) where ``loss_mask`` is true and -1 elsewhere.
    """

    ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    turn_ids: npt.NDArray[np.int16]


@dataclass(frozen=True)
class _Piece:
    text: str
    turn: int
    """Assistant turn, -1 where the text is not the assistant's."""


def render(
    tokenizer: Any,
    conversations: Sequence[Sequence[Message]],
    tools: Tools = None,
    add_generation_prompt: bool = False,
    **arguments: Any,
) -> list[str]:
    """The chat template's text for each conversation.

    Where a message that is not the assistant's spells a control token (<|im_end|>), a blank behind its first character
    keeps it text: a user, a data set or a tool would else end its own turn and write the next one. An assistant's
    message keeps its control tokens, which a policy may have sampled and a data set may teach.

    Args:
        arguments: of the template, such as enable_thinking.

    Raises:
        ChatTemplateError: the tokenizer has no chat template, or the template refuses a conversation.
    """
    if not conversations:
        return []
    if not getattr(tokenizer, "chat_template", None):
        raise ChatTemplateError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template: use an instruction-tuned model's "
            "tokenizer (model.tokenizer_path) or set chat_template in its tokenizer_config.json"
        )
    template_limits.install()
    try:
        return tokenizer.apply_chat_template(
            [_without_control_tokens(tokenizer, conversation) for conversation in conversations],
            tools=_without_control_tokens(tokenizer, tools) if tools else None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **arguments,
        )
    except template_limits.TemplateTooCostly as error:
        raise ChatTemplateError(f"{tokenizer.name_or_path}: {error}") from error
    except Exception as error:  # Jinja raises many kinds, and templates raise their own.
        raise ChatTemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error


def _without_control_tokens(tokenizer: Any, conversation: Sequence[Message]) -> list[Message]:
    pattern = _control_tokens(tokenizer)
    if pattern is None:
        return list(conversation)
    return [
        message if message.get("role") == "assistant" else _with_texts_split(message, pattern)
        for message in conversation
    ]


def _with_texts_split(value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return pattern.sub(lambda token: f"{token[0][0]} {token[0][1:]}", value)
    if isinstance(value, Mapping):
        return {key: _with_texts_split(each, pattern) for key, each in value.items()}
    return [_with_texts_split(each, pattern) for each in value] if isinstance(value, (list, tuple)) else value


_PATTERNS: weakref.WeakKeyDictionary[Any, re.Pattern[str] | None] = weakref.WeakKeyDictionary()


def _control_tokens(tokenizer: Any) -> re.Pattern[str] | None:
    """What finds the tokenizer's special tokens in a text; not other added tokens (<think>), which prompts explain."""
    if tokenizer not in _PATTERNS:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = {token.content for token in added if token.special} | set(
            getattr(tokenizer, "all_special_tokens", ())
        )
        longest_first = sorted((token for token in special if len(token) > 1), key=len, reverse=True)
        _PATTERNS[tokenizer] = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
    return _PATTERNS[tokenizer]


def tokenize(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts that already hold their special tokens."""
    if not texts:
        return []
    return tokenizer(list(texts), add_special_tokens=False, verbose=False, return_attention_mask=False)["input_ids"]


def normalize_messages(messages: Sequence[Message]) -> list[Message]:
    """Messages as chat templates expect them.

    Columns of nested Arrow structs hold None for every field that another row has; those keys are dropped. Tool-call
    arguments that came as a JSON string (the wire format of chat APIs) become the object they encode, because
    templates such as Qwen2.5's would quote the string a second time.
    """
    return [_normalize_message(message) for message in messages]


def _normalize_message(message: Message) -> Message:
    message = {key: value for key, value in message.items() if value is not None}
    message.setdefault("content", "")
    calls = message.get("tool_calls")
    if calls is None:
        return message
    if not calls:
        del message["tool_calls"]
        return message
    normalized = []
    for call in calls:
        call = drop_none(call)
        function = call.get("function", call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                decoded = load_json(arguments)
            except ValueError:
                decoded = arguments
            if isinstance(decoded, dict):
                function["arguments"] = decoded
        normalized.append(call)
    message["tool_calls"] = normalized
    return message


def drop_none(value: Any) -> Any:
    """``value`` without the keys whose value is None, at every depth."""
    if isinstance(value, dict):
        return {key: drop_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [drop_none(item) for item in value]
    return value


class ConversationTokenizer:
    """Tokenises conversations and marks the assistant's tokens, for any chat template.

    The assistant's text is found by rendering each conversation up to every assistant turn, with the header that
    asks the assistant to speak, and up to and including the turn: what the second text has beyond the first is the
    turn. That needs a template that only ever appends. Where a template rewrites earlier turns (Qwen3 removes the
    reasoning of turns before the last question) the two texts are no prefixes of each other; then the turns are
    taken from the whole text by ChatML's marks, and their number has to agree with the conversation's.

    After the turn's last special token (the end-of-turn token) only white space may follow, and it is not trained.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special_ids = special | set(tokenizer.all_special_ids)
        vocabulary = tokenizer.get_vocab()
        self._is_chatml = "<|im_start|>" in vocabulary and CHATML_END in vocabulary

    def encode(self, messages: Sequence[Message], tools: Tools = None) -> TokenizedConversation:
        """``encode_batch`` for one conversation."""
        return self.encode_batch([messages], tools)[0]

    def encode_batch(
        self, conversations: Sequence[Sequence[Message]], tools: Tools = None
    ) -> list[TokenizedConversation]:
        """Token ids and loss mask of each conversation, up to its last assistant turn.

        Raises:
            ChatTemplateError: a conversation has no assistant turn or starts with one, the template refuses it, or
                its assistant turns cannot be told apart. its ``row`` is the place in ``conversations``.
        """
        pieces = self._split(conversations, tools)
        flat = [piece for conversation in pieces for piece in conversation]
        # Most prompts share their first piece's system part but few are equal; the assistant's set phrases are many.
        unique = {text: place for place, text in enumerate(dict.fromkeys(piece.text for piece in flat))}
        ids = [np.asarray(i, dtype=np.int32) for i in tokenize(self.tokenizer, list(unique))]
        trained_lengths: dict[str, int] = {}
        encoded = []
        for conversation in pieces:
            parts, lengths, turns = [], [], []
            for piece in conversation:
                part = ids[unique[piece.text]]
                parts.append(part)
                if piece.turn < 0:
                    lengths.append(len(part))
                    turns.append(-1)
                    continue
                trained = trained_lengths.get(piece.text)
                if trained is None:
                    trained = trained_lengths[piece.text] = self._trained_length(part)
                lengths += [trained, len(part) - trained]
                turns += [piece.turn, -1]
            turn_ids = np.repeat(np.array(turns, dtype=np.int16), lengths)
            encoded.append(TokenizedConversation(np.concatenate(parts), turn_ids >= 0, turn_ids))
        return encoded

    def _trained_length(self, ids: npt.NDArray[np.int32]) -> int:
        """How many tokens of an assistant turn are its own: all but the white space after the end-of-turn token."""
        tail = ids.tolist()
        for end in range(len(tail), 0, -1):
            if tail[end - 1] in self._special_ids:
                return end
            if self.tokenizer.decode(tail[end - 1]).strip():
                break
        return len(tail)

    def _split(self, conversations: Sequence[Sequence[Message]], tools: Tools) -> list[list[_Piece]]:
        before: list[Sequence[Message]] = []
        through: list[Sequence[Message]] = []
        counts = []
        for row, messages in enumerate(conversations):
            places = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
            if not places:
                raise ChatTemplateError("no assistant message: there is nothing to learn from it", row)
            if places[0] == 0:
                raise ChatTemplateError(
                    "it starts with an assistant message: a user, system or tool message has to come first", row
                )
            before += [messages[:place] for place in places]
            through += [messages[: place + 1] for place in places]
            counts.append(len(places))
        texts_before = self._render_all(before, counts, tools, add_generation_prompt=True)
        texts_through = self._render_all(through, counts, tools, add_generation_prompt=False)
        pieces = []
        start = 0
        for row, count in enumerate(counts):
            turns = slice(start, start + count)
            start += count
            split = _split_by_prefixes(texts_before[turns], texts_through[turns])
            if split is None:
                split = self._split_by_marks(row, conversations[row], count, tools)
            pieces.append(split)
        return pieces

    def _render_all(
        self, prefixes: Sequence[Sequence[Message]], counts: Sequence[int], tools: Tools, add_generation_prompt: bool
    ) -> list[str]:
        try:
            return render(self.tokenizer, prefixes, tools, add_generation_prompt)
        except ChatTemplateError:
            # Find the row that the template refuses, so that the message can name it.
            start = 0
            for row, count in enumerate(counts):
                try:
                    render(self.tokenizer, prefixes[start : start + count], tools, add_generation_prompt)
                except ChatTemplateError as error:
                    raise ChatTemplateError(str(error), row) from error
                start += count
            raise

    def _split_by_marks(self, row: int, messages: Sequence[Message], count: int, tools: Tools) -> list[_Piece]:
        if not self._is_chatml:
            raise ChatTemplateError(
                "the chat template rewrites earlier turns and is not ChatML, so the assistant's tokens cannot be told "
                "apart: use a template that only appends",
                row,
            )
        text = render(self.tokenizer, [messages], tools)[0]
        pieces = []
        position = 0
        for turn in range(count):
            header = text.find(CHATML_HEADER, position)
            end = text.find(CHATML_END, header + len(CHATML_HEADER)) if header >= 0 else -1
            if end < 0:
                raise ChatTemplateError(
                    f"{count} assistant messages, but the rendered text shows only {turn} of them", row
                )
            start, end = header + len(CHATML_HEADER), end + len(CHATML_END)
            pieces += [_Piece(text[position:start], -1), _Piece(text[start:end], turn)]
            position = end
        if text.find(CHATML_HEADER, position) >= 0:
            raise ChatTemplateError(
                f"{count} assistant messages, but the rendered text shows more: some message holds ChatML's marks", row
            )
        return pieces


def _split_by_prefixes(before: Sequence[str], through: Sequence[str]) -> list[_Piece] | None:
    """Pieces of the last text of ``through``, or None where one text is not the beginning of the next."""
    pieces = []
    position = 0
    last = through[-1]
    for turn, (asked, answered) in enumerate(zip(before, through, strict=True)):
        if len(asked) <= position or not answered.startswith(asked) or not last.startswith(answered):
            return None
        pieces += [_Piece(last[position : len(asked)], -1), _Piece(answered[len(asked) :], turn)]
        position = len(answered)
    return pieces
