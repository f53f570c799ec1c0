"""Where in a turn its tool calls begin, in tokens, although they are parsed from text."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_rollout.agent.turn_glue import Tokenizer

_FIRST_LENGTH = 32
"""Tokens at the end of a turn that are looked at first: that is where calls stand."""


def call_positions(tokenizer: Tokenizer, ids: Sequence[int], texts: Sequence[str]) -> list[int]:
    """Tokens of a turn before the text of each of its calls; -1 where the turn does not have that text.

    Nothing is tokenised again, and little more than the calls is decoded.

    Args:
        ids: the turn's tokens.
        texts: what the calls were parsed from, in order. Of texts that are equal, the last ones are found.
    """
    positions = []
    for text in reversed(texts):
        position = _tokens_before(tokenizer, ids, text)
        positions.append(position)
        if position >= 0:
            ids = ids[:position]
    return positions[::-1]


def _tokens_before(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> int:
    """The largest number of tokens that can be left out in front so that ``text`` is still whole."""

    def whole(start: int) -> bool:
        return text in tokenizer.decode(ids[start:], skip_special_tokens=False)

    low, high = max(0, len(ids) - _FIRST_LENGTH), len(ids) + 1  # whole from low on, not from high on
    while not whole(low):
        if not low:
            return -1
        low, high = max(0, 2 * low - len(ids)), low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if whole(middle) else (low, middle)
    return low
