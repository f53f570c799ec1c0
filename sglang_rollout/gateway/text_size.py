"""How much text a request holds, counted before work is spent on it. Nothing here knows of tokenizers or networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_rollout.gateway.conversation import Message

MOST_JSON_VALUES = 400_000
"""Values in a body. Python's decoder stops all threads for tens of milliseconds at this number."""
BYTES_A_CHARACTER = 12
"""At most, in JSON: a character beyond the basic plane is two escapes of six bytes."""
SMALLEST_BODY_LIMIT = 1 << 20
"""Bytes that a body may have however short the context is: results of tools are cut only after they were read."""


def characters(value: Any) -> int:
    """Characters of all texts in ``value``, JSON's lists and objects, keys included."""
    total, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            total += len(each)
        elif isinstance(each, Mapping):
            waiting.extend(each)
            waiting.extend(each.values())
        elif isinstance(each, (list, tuple)):
            waiting.extend(each)
        else:
            total += 1
    return total


def message_sizes(messages: Sequence[Message], longest_result: int) -> list[int]:
    """[len(messages)] characters of each message that the chat template may show.

    Args:
        longest_result: characters of a tool's result; what is beyond is cut before the template sees it.
    """
    sizes = []
    for message in messages:
        if message["role"] == "tool":
            sizes.append(min(len(message["content"]), longest_result))
        else:
            sizes.append(sum(characters(message.get(name, "")) for name in _SHOWN))
    return sizes


def too_many_values(body: bytes, most: int = MOST_JSON_VALUES) -> bool:
    """Whether ``body``, JSON, has more than ``most`` values, found without decoding it."""
    if len(body) <= most:
        return False
    # Without escaped quotes, those that are left begin and end texts by turns.
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') > 2 * most:
        return True
    outside = b"".join(bare.split(b'"')[::2])
    return outside.count(b",") + outside.count(b"[") + outside.count(b"{") > most


_SHOWN = ("content", "reasoning_content", "tool_calls")
