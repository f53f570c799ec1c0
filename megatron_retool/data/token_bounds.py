"""How few tokens a text can have, known without tokenising it: megabytes of text take a tokenizer a minute.

A byte-level BPE token stands for the bytes that it spells, and each byte of the (normalised) text is in one token. So
a text has at least its bytes / the longest token's bytes. Of other tokenizers nothing is said: some leave white space
out, or make one token of whatever they do not know.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from typing import Any

from tokenizers import pre_tokenizers


class TokenBound:
    """A lower bound of the tokens of a text.

    Args:
        tokenizer: a Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._longest: int | None = None

    def fewest(self, text: str) -> int:
        """At least so many tokens has ``text``; 0 where nothing is known."""
        if self._longest is None:
            # Only a run with an enormous text pays for this.
            backend = getattr(self._tokenizer, "backend_tokenizer", None)
            self._longest = 0 if backend is None else _longest_token(json.loads(backend.to_str()))
        if not self._longest:
            return 0
        # Tokenizers of this kind normalise by NFC or not at all, whichever leaves fewer bytes.
        size = min(len(each.encode()) for each in (text, unicodedata.normalize("NFC", text)))
        return -(-size // self._longest)


def _longest_token(state: Mapping[str, Any]) -> int:
    """Bytes of the longest token; 0 where tokens do not spell the whole text."""
    model, added = state["model"], state["added_tokens"]
    vocabulary = model.get("vocab")
    exact = (
        model.get("type") == "BPE"
        and not model.get("dropout")
        and state["truncation"] is None
        and (state["normalizer"] or {"type": "NFC"})["type"] == "NFC"
        and _keeps_bytes(state["pre_tokenizer"])
        # A byte without a token would be left out, and white space may be a part of tokens that strip it.
        and set(pre_tokenizers.ByteLevel.alphabet()) <= set(vocabulary)
        and not any(token["lstrip"] or token["rstrip"] for token in added)
    )
    if not exact:
        return 0
    # In the vocabulary a character stands for a byte; an added token is text.
    return max([*map(len, vocabulary), *(len(token["content"].encode()) for token in added)])


def _keeps_bytes(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Whether a pre-tokenizer ends in bytes and drops nothing."""
    if pre_tokenizer is None:
        return False
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    kinds = [step["type"] for step in steps]
    return kinds[-1] == "ByteLevel" and all(
        kind in ("ByteLevel", "Digits") or (kind == "Split" and step["behavior"] != "Removed")
        for kind, step in zip(kinds, steps, strict=True)
    )
