"""An engine that samples a token every few milliseconds and gives back what it has when a request is aborted.

What a trajectory will say is a function of its seed alone: a tool call, then some words. So it can be told afterwards
whether one that was interrupted went on where it had been.
"""

from __future__ import annotations

import asyncio
import random

from aiohttp import web

from tests.kit import traced_rows
from tests.kit.markov_policy import CALL, WORD, WORDS, single


class AbortableEngine:
    def __init__(self, tokenizer, seconds_per_token: float = 0.004, longest: int = 80) -> None:
        self.call, self.end = single(tokenizer, CALL), single(tokenizer, "<|im_end|>")
        self.words = [single(tokenizer, WORD), single(tokenizer, WORDS)]
        self.seconds_per_token, self.longest = seconds_per_token, longest
        self.version = 0
        self.url = ""
        self._aborted: set[str] = set()

    def answer(self, seed: int) -> tuple[list[int], list[float]]:
        """Ids and log-probs that a trajectory with this seed samples, in both turns together."""
        chance = random.Random(seed)
        length = chance.choice([3, self.longest // 4, self.longest])
        ids = [self.call, self.end, *chance.choices(self.words, k=length), self.end]
        return ids, [-chance.random() for _ in ids]

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids, log_probs = self.answer(body["sampling_params"]["sampling_seed"])
        context = body["input_ids"]
        # The prompts of these tests hold no such tokens.
        place = context.count(self.call) + sum(context.count(word) for word in self.words)
        place += self.call in context
        sampled: list[int] = []
        reason = {"type": "abort"}
        while body["rid"] not in self._aborted:
            await asyncio.sleep(self.seconds_per_token)
            sampled.append(ids[place + len(sampled)])
            if sampled[-1] == self.end:
                reason = {"type": "stop", "matched": self.end}
                break
        pairs = [[log_probs[place + offset], token, None] for offset, token in enumerate(sampled)]
        meta = {"finish_reason": reason, "output_token_logprobs": pairs, "weight_version": str(self.version)}
        # A request that is aborted while it is held has no rows.
        if reason["type"] != "abort" or len(sampled) % 2:
            meta |= traced_rows.meta_info(body, sampled, self.version)
        return web.json_response({"output_ids": sampled, "meta_info": meta})

    async def abort(self, request: web.Request) -> web.Response:
        self._aborted.add((await request.json())["rid"])
        return web.Response()

    async def __aenter__(self) -> AbortableEngine:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._runner.cleanup()
