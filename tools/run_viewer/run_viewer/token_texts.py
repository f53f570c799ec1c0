"""The text of each token, so that all of them together are the text of the response."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_LONGEST_CHARACTER = 4
_BROKEN = "\N{REPLACEMENT CHARACTER}"


def token_texts(ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """A text for each of ``ids``.

    A character may be spread over several tokens: then the last of them has it and the others have "". Tokens are
    decoded after the one before them, since some tokenizers drop a space at the beginning of a text.
    """
    texts: list[str] = []
    start = 0
    while start < len(ids):
        before = list(ids[max(0, start - 1) : start])
        known = len(decode(before)) if before else 0
        end, text = start, ""
        for stop in range(start + 1, min(start + _LONGEST_CHARACTER, len(ids)) + 1):
            read = decode([*before, *ids[start:stop]])[known:]
            # Bytes that are no character are marks: the first token's own, or one of several tokens together.
            if end == start or read == _BROKEN or not read.endswith(_BROKEN):
                end, text = stop, read
            if not read.endswith(_BROKEN):
                break
        texts += [""] * (end - start - 1) + [text]
        start = end
    return texts
