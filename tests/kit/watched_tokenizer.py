"""A tokenizer that is slow with much text, and how long the event loop was busy meanwhile."""

from __future__ import annotations

import asyncio
import time

from tests.kit.markov_policy import build_tokenizer


class WatchedTokenizer:
    """Keeps the lengths of what is tokenised; ``seconds`` makes much text slow, as a fast tokenizer's own code is."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.inner, self.seconds = build_tokenizer(), seconds
        self.lengths: list[int] = []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def encode(self, text, **settings):
        self.lengths.append(len(text))
        if len(text) > 4096:
            time.sleep(self.seconds)
        return self.inner.encode(text, **settings)


async def largest_gap(done: asyncio.Event) -> float:
    """The longest time, in seconds, that the event loop was busy with one task."""
    largest, last = 0.0, time.monotonic()
    while not done.is_set():
        await asyncio.sleep(0.001)
        now = time.monotonic()
        largest, last = max(largest, now - last), now
    return largest
