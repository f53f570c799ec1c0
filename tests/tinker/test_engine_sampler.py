"""Requests to the engines: seeds, stops and places as clients mean them, adapters loaded where they are used."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from megatron_retool.config import RolloutConfig
from megatron_retool.target_sequences import RequestRefused
from megatron_retool.tinker.engine_sampler import EngineSampler
from megatron_retool.tinker.sample_requests import SampleRequest
from megatron_retool.tinker.wire import MASKED
from sglang_rollout.engine.base import (
    EngineFailed,
    EngineRejected,
    EngineUnavailable,
    GenerateResult,
    ScoredText,
    StopConditions,
)
from sglang_rollout.engine.pool import EnginePool
from sglang_rollout.engine.rollout_statistics import RolloutStatistics

PROMPT = np.array([5, 6, 7, 8])


class ScriptedClient:
    """Answers with the request's seed as its token."""

    def __init__(self, url: str) -> None:
        self.base_url = url
        self.requests, self.scores, self.adapters = [], [], []
        self.error: Exception | None = None
        self.is_healthy = True

    async def generate(self, request):
        await asyncio.sleep(0)
        self.requests.append(request)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        top = {"top_log_probs": [[-0.5, -1.0]], "top_ids": [[3, 4]]} if request.top_log_probs else {}
        return GenerateResult([(request.seed or 0) % 97], [-0.5], [0], "stop", cached_tokens=2, **top)

    async def score_text(self, request):
        self.scores.append(request)
        count = len(request.input_ids) - request.start
        return ScoredText(
            log_probs=[-float(request.start + place) for place in range(count)],
            likeliest=[[(1, -0.25)]] * count if request.likeliest else [],
            targets=[[-float(each) for each in row] for row in request.targets or []],
        )

    async def load_adapter(self, name, directory):
        await asyncio.sleep(0)
        self.adapters.append(f"+{name} {directory}")

    async def unload_adapter(self, name):
        self.adapters.append(f"-{name}")

    async def healthy(self, timeout_seconds=0.0):
        return self.is_healthy

    async def close(self): ...


class ScriptedEngine:
    def __init__(self, clients) -> None:
        self.clients = {each.base_url: each for each in clients}

    def client(self, url):
        return self.clients[url]


def run(work, count: int = 1, restart=None):
    """``work(sampler, clients, pool)`` with this many engines."""

    async def main():
        clients = [ScriptedClient(f"http://engine{number}") for number in range(count)]
        urls = [each.base_url for each in clients]
        pool = EnginePool(ScriptedEngine(clients), urls, RolloutConfig(), RolloutStatistics(), restart)
        try:
            return await work(EngineSampler(pool, [2], 64), clients, pool)
        finally:
            await pool.close()

    return asyncio.run(main())


def test_samples_of_one_seed_differ_and_come_back():
    async def work(sampler, clients, pool):
        wanted = SampleRequest(PROMPT, samples=3, max_tokens=4, seed=11, temperature=0.5, top_k=9, top_p=0.8)
        once, again = await sampler.sample(None, wanted), await sampler.sample(None, wanted)
        seeds = [each.seed for each in clients[0].requests]
        assert len(set(seeds)) == 3
        assert seeds[:3] == seeds[3:]
        assert [each.tokens.tolist() for each in once.sequences] == [each.tokens.tolist() for each in again.sequences]
        sent = clients[0].requests[0]
        assert (sent.sampling.temperature, sent.sampling.top_k, sent.sampling.top_p) == (0.5, 9, 0.8)
        assert (sent.max_new_tokens, sent.input_ids, sent.adapter) == (4, [5, 6, 7, 8], None)
        assert (once.cached_tokens, once.prompt_log_probs) == (2, None)

    run(work)


@pytest.mark.parametrize(
    ("stop_ids", "strings", "expected"),
    [
        (None, (), StopConditions((2,))),
        ((), (), StopConditions((), end_of_sequence=False)),
        ((7,), ("x",), StopConditions((7,), ("x",), end_of_sequence=False)),
    ],
)
def test_the_models_own_end_counts_where_a_client_names_none(stop_ids, strings, expected):
    async def work(sampler, clients, pool):
        await sampler.sample(None, SampleRequest(PROMPT, stop_ids=stop_ids, stop_strings=strings))
        assert clients[0].requests[0].stop == expected
        assert clients[0].requests[0].max_new_tokens == 60, "the rest of the context"

    run(work)


def test_log_probs_of_the_prompt_are_at_their_places():
    async def work(sampler, clients, pool):
        targets = np.array([[9, -1], [-1, -1], [3, 4]])
        wanted = SampleRequest(
            PROMPT, max_tokens=1, prompt_log_probs=True, scored_from=2, top_prompt=2, top_sampled=2, targets=targets
        )
        found = await sampler.sample(None, wanted)
        (score,) = clients[0].scores
        assert (score.start, score.likeliest, score.targets) == (1, 2, [[9], [], [3, 4]])
        np.testing.assert_array_equal(found.prompt_log_probs, [np.nan, np.nan, -2, -3])
        np.testing.assert_array_equal(found.target_log_probs, [[-9, np.nan], [np.nan, np.nan], [-3, -4]])
        np.testing.assert_array_equal(found.top_prompt.ids[2:], [[1, 0], [1, 0]])
        np.testing.assert_array_equal(found.top_prompt.log_probs[:2], np.full((2, 2), MASKED))
        np.testing.assert_array_equal(found.top_prompt.log_probs[2:], [[-0.25, MASKED]] * 2)
        np.testing.assert_array_equal(found.sequences[0].top.ids, [[3, 4]])
        await sampler.sample(None, SampleRequest(PROMPT, max_tokens=1, prompt_log_probs=True, scored_from=3))
        assert clients[0].scores[1].start == 3
        single = await sampler.sample(None, SampleRequest(PROMPT[:1], max_tokens=0, prompt_log_probs=True))
        np.testing.assert_array_equal(single.prompt_log_probs, [np.nan])
        assert len(single.sequences[0].tokens) == 0

    run(work)


def test_an_adapter_is_loaded_once_into_each_engine_that_needs_it():
    async def work(sampler, clients, pool):
        await sampler.load_adapter("a", Path("files"))
        await sampler.sample("a", SampleRequest(PROMPT, samples=12, max_tokens=1))
        assert [each.adapters for each in clients] == [["+a files"], ["+a files"]]
        assert all(sent.adapter == "a" for each in clients for sent in each.requests)
        await sampler.unload_adapter("a")
        assert [each.adapters[-1] for each in clients] == ["-a", "-a"]

    run(work, count=2)


def test_an_engine_that_died_is_given_its_adapters_again():
    restarted = []

    async def restart(url):
        restarted[0].forget_engine(url)
        return url

    async def work(sampler, clients, pool):
        restarted.append(sampler)
        await sampler.load_adapter("a", Path("files"))
        await sampler.sample("a", SampleRequest(PROMPT, max_tokens=1))
        clients[0].error, clients[0].is_healthy = EngineUnavailable("http://engine0", "gone"), False
        found = await asyncio.wait_for(sampler.sample("a", SampleRequest(PROMPT, max_tokens=1)), 10)
        assert len(found.sequences) == 1
        assert clients[0].adapters == ["+a files", "+a files"]

    run(work, restart=restart)


def test_what_an_engine_refuses_is_the_users_and_what_fails_is_tried_again():
    async def work(sampler, clients, pool):
        clients[0].error = EngineRejected("http://engine0", "too long")
        with pytest.raises(RequestRefused, match="too long"):
            await sampler.sample(None, SampleRequest(PROMPT, max_tokens=1))
        clients[0].error = EngineFailed("http://engine0", "once")
        await sampler.sample(None, SampleRequest(PROMPT, max_tokens=1))

        async def always(request):
            raise EngineFailed("http://engine0", "always")

        clients[0].generate = always
        with pytest.raises(EngineFailed, match="always"):
            await sampler.sample(None, SampleRequest(PROMPT, max_tokens=1))

    run(work)
