"""Whatever engines and clients do to a call, its tokens are those that its context has, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_retool.config import RolloutConfig
from sglang_rollout.engine.base import EngineUnavailable, GenerateResult
from sglang_rollout.engine.pool import EnginePool
from sglang_rollout.engine.rollout_statistics import RolloutStatistics
from sglang_rollout.gateway.conversation import ConversationCall
from sglang_rollout.gateway.errors import ApiError
from sglang_rollout.gateway.sampler import PoolSampler
from tests.kit.markov_policy import CALL, WORD, WORDS, single

DEEDS = ("go on", "go on", "two at once", "cut", "cut and again", "sync", "sync and cut")
STEPS = 60
"""Turns of the event loop within which a call is cut, or weights are sent."""


class FaultyEngine:
    """Says what follows from a context alone; ends and drops requests as it likes."""

    def __init__(self, tokenizer, seed: int) -> None:
        self.random = random.Random(seed)
        self.version = 1
        self.end = single(tokenizer, "<|im_end|>")
        self.parts = [single(tokenizer, part) for part in (WORD, WORDS, CALL)] + [self.end]

    def client(self, url: str) -> FaultyClient:
        return FaultyClient(url, self)

    def after(self, context: list[int]) -> int:
        digest = hashlib.blake2b(np.array(context, np.int32).tobytes(), digest_size=2).digest()
        return self.parts[int.from_bytes(digest, "big") % len(self.parts)]


class FaultyClient:
    """Of one engine. A token's log-prob is its place."""

    def __init__(self, url: str, engine: FaultyEngine) -> None:
        self.base_url, self.engine = url, engine
        self.requests, self.aborted = 0, set()

    async def generate(self, request, *, on_start=None, deadline_seconds=None):
        engine = self.engine
        self.requests += 1
        identifier = f"{self.base_url}/{self.requests}"
        on_start(identifier)
        context, ids, versions = list(request.input_ids), [], []
        reason = "length"
        while len(ids) < request.max_new_tokens:
            await asyncio.sleep(0)
            chance = engine.random.random()
            if chance < 0.02:
                raise EngineUnavailable(self.base_url, "it hung up")
            if chance < 0.06 or identifier in self.aborted:
                reason = "abort"
                break
            ids.append(engine.after([*context, *ids]))
            versions.append(engine.version)
            if ids[-1] == engine.end:
                reason = "stop"
                break
        log_probs = [-(len(context) + place) / 4096 for place in range(len(ids))]
        return GenerateResult(ids, log_probs, versions, reason, ids[-1] if reason == "stop" else None)

    async def abort(self, request_id):
        self.aborted.add(request_id)

    async def healthy(self, timeout_seconds=10.0):
        return True

    async def weight_version(self):
        return self.engine.version

    async def close(self):
        pass


async def later(draw) -> None:
    for _ in range(draw(st.integers(0, STEPS))):
        await asyncio.sleep(0)


async def done(deed: str, session, sampler, engine, history, draw) -> list:
    """The answers of a deed."""

    def asked() -> asyncio.Task:
        return asyncio.create_task(session.answer(ConversationCall(history, max_tokens=40)))

    if deed == "two at once":
        return [answer for (answer,) in await asyncio.gather(asked(), asked())]
    call = asked()
    if "sync" in deed:
        await later(draw)
        pausing = asyncio.create_task(sampler.pause())
        if "cut" in deed:
            await later(draw)
            call.cancel()
        await pausing
        engine.version += 1
        sampler.resume()
    elif "cut" in deed:
        await later(draw)
        call.cancel()
    calls = [call, asked()] if "again" in deed else [call]
    found = await asyncio.gather(*calls, return_exceptions=True)
    return [answer for each in found if not isinstance(each, asyncio.CancelledError) for answer in each]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), deeds=st.lists(st.sampled_from(DEEDS), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_tokens_of_interrupted_calls_follow_from_their_contexts(tokenizer, open_session, data, deeds, seed):
    async def run() -> None:
        engine, statistics = FaultyEngine(tokenizer, seed), RolloutStatistics()
        pool = EnginePool(engine, ["one", "two"], RolloutConfig(), statistics)
        sampler = PoolSampler(pool, statistics)
        session = open_session(sampler)
        history, answered = [{"role": "user", "content": "question"}], 0
        for number, deed in enumerate(deeds):
            answers = await done(deed, session, sampler, engine, history, data.draw)
            answered += len(answers)
            if answers:
                said = data.draw(st.sampled_from(answers)).message()
                results = [
                    {"role": "tool", "tool_call_id": call["id"], "content": f"{number}"}
                    for call in said.get("tool_calls", ())
                ]
                history = [*history, said, *(results or [{"role": "user", "content": f"go on {number}"}])]
        last = asyncio.create_task(session.answer(ConversationCall(history, max_tokens=40)))
        await later(data.draw)
        answered += last.done() and last.exception() is None
        segments = await session.close()
        with contextlib.suppress(ApiError):
            await last
        assert sum(len(segment.calls) for segment in segments) == answered
        for segment in segments:
            row = [*segment.prompt_ids.tolist(), *segment.response_ids.tolist()]
            for place in np.flatnonzero(segment.loss_mask):
                position = len(segment.prompt_ids) + place
                assert row[position] == engine.after(row[:position])
                assert segment.rollout_log_probs[place] == np.float32(-position / 4096)
            of_turns = [
                segment.weight_versions[segment.turn_ids == turn].tolist() for turn in range(len(segment.calls))
            ]
            assert all(versions == sorted(versions) and versions[0] >= 1 for versions in of_turns)
        # Places at the engines, and requests, are given back.
        assert [(each.trajectories, each.tokens) for each in pool.router.engines] == [(0, 0)] * 2
        await sampler.pause()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
