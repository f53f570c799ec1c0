"""Where the gateway's tokens come from in tests: every sampled token has a log-prob that no other one has."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from sglang_rollout.agent.trajectory_state import TrajectoryState
from sglang_rollout.engine.base import GenerateResult
from sglang_rollout.gateway.interface import TurnRequest
from tests.kit.markov_policy import CALL, CALL_BROKEN, CALL_UNKNOWN, WORD, WORDS, single

END = "<|im_end|>"


@dataclass
class Sampled:
    """One answer: the ids that it was sampled after, and itself."""

    context: list[int]
    seed: int | None
    result: GenerateResult


class RandomSampler:
    """Says something random, in a context that it keeps; ``held`` makes calls wait."""

    def __init__(self, tokenizer, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.log: list[Sampled] = []
        self.count = 0
        self.held: asyncio.Event | None = None
        self.started = 0
        self.end = single(tokenizer, END)
        # Ids that no tokeniser makes of their text: "word" letter by letter.
        letters = [tokenizer.convert_tokens_to_ids(letter) for letter in WORD]
        self.parts = [[single(tokenizer, part)] for part in (WORD, WORDS, CALL, CALL_UNKNOWN, CALL_BROKEN)] + [letters]

    async def generate(self, state: TrajectoryState, request: TurnRequest) -> GenerateResult:
        context = [*state.prompt_ids, *state.response_ids]
        parts = self.random.choices(self.parts, k=self.random.randint(0, 3))
        ids = [token for part in parts for token in part]
        reason = "stop" if self.random.random() < 0.85 else "length"
        ids += [self.end] if reason == "stop" or not ids else []
        self.started += 1
        await asyncio.sleep(0)
        if self.held is not None:
            await self.held.wait()
        ids = ids[: request.max_new_tokens]
        log_probs = [-(self.count + place + 1) / 4096 for place in range(len(ids))]
        self.count += len(ids)
        if ids[-1] != self.end:
            reason = "length"
        result = GenerateResult(
            ids, log_probs, [self.count % 7] * len(ids), reason, self.end if reason == "stop" else None
        )
        self.log.append(Sampled(context, state.seed, result))
        return result
