"""Calls are held while engines are paused or dead, and go on from the tokens that they have."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from megatron_retool.config import RolloutConfig
from megatron_retool.routed_experts import missing_rows
from sglang_rollout.engine.base import EngineUnavailable, GenerateResult
from sglang_rollout.engine.pool import EnginePool
from sglang_rollout.engine.rollout_statistics import RolloutStatistics
from sglang_rollout.gateway.conversation import ConversationCall
from sglang_rollout.gateway.errors import ApiError
from sglang_rollout.gateway.sampler import PoolSampler
from sglang_rollout.session import RolloutError

LENGTH = 30


class SlowClient:
    """Samples 100 + the number of tokens before, one every few milliseconds; ends after LENGTH of them."""

    def __init__(self, url: str, engine: SlowEngine) -> None:
        self.base_url, self.engine = url, engine
        self.aborted: set[str] = set()

    async def generate(self, request, *, on_start=None, deadline_seconds=None):
        self.engine.requests.append(request)
        identifier, began = f"{self.base_url}/{len(self.engine.requests)}", time.monotonic()
        on_start(identifier)
        ids, reason = [], "length"
        most = self.engine.ends_itself.get(len(self.engine.requests))
        while len(ids) < min(request.max_new_tokens, LENGTH):
            if len(ids) == most:
                reason = "abort"
                break
            if self.base_url in self.engine.dead:
                raise EngineUnavailable(self.base_url, "nobody answers")
            if identifier in self.aborted or time.monotonic() - began > deadline_seconds:
                reason = "abort"
                break
            await asyncio.sleep(0.003)
            ids.append(100 + len(request.input_ids) + len(ids))
        rows = None
        if request.routed_experts_start is not None and ids:
            count = len(request.input_ids) + len(ids) - 1 - request.routed_experts_start
            rows = np.full((count, 2, 2), len(self.engine.requests), np.uint8)
        version = self.engine.version
        return GenerateResult(ids, [-1.0] * len(ids), [version] * len(ids), reason, routed_experts=rows)

    async def abort(self, request_id):
        self.aborted.add(request_id)

    async def healthy(self, timeout_seconds=10.0):
        return self.base_url not in self.engine.dead

    async def weight_version(self):
        return self.engine.version

    async def close(self):
        pass


class SlowEngine:
    def __init__(self) -> None:
        self.requests, self.dead, self.version = [], set(), 1
        self.ends_itself = {}

    def client(self, url: str) -> SlowClient:
        return SlowClient(url, self)


def make_sampler(engine, restart=None, **settings):
    statistics = RolloutStatistics()
    return PoolSampler(EnginePool(engine, ["one"], RolloutConfig(), statistics, restart), statistics, **settings)


CALL = ConversationCall([{"role": "user", "content": "question"}], max_tokens=LENGTH)


async def until_it_samples(engine) -> None:
    while not engine.requests:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)


def test_a_pause_is_not_noticed(open_session):
    async def run():
        engine = SlowEngine()
        sampler = make_sampler(engine, routed_experts=True)
        session = open_session(sampler, max_wall_seconds=1.0)
        call = asyncio.create_task(session.answer(CALL))
        await until_it_samples(engine)
        await sampler.pause()
        held = asyncio.create_task(
            session.answer(ConversationCall([{"role": "user", "content": "later"}], max_tokens=3))
        )
        await asyncio.sleep(1.2)  # longer than the session may live
        assert len(engine.requests) == 1 and not call.done() and not held.done()
        engine.version = 2
        sampler.resume()
        ((answer,), _) = await asyncio.gather(call, held)
        assert answer.sampled_tokens == LENGTH and answer.finish_reason == "length"
        segment = min(await session.close(), key=lambda each: -len(each.response_ids))
        start = len(segment.prompt_ids)
        assert segment.response_ids.tolist() == list(range(100 + start, 100 + start + LENGTH))
        versions = segment.weight_versions.tolist()
        assert versions == sorted(versions) and set(versions) == {1, 2}
        rows = segment.routed_experts
        assert len(rows) == start + LENGTH
        np.testing.assert_array_equal(rows[-1:], missing_rows(1, rows))

    asyncio.run(run())


def test_what_an_engine_ends_by_itself_is_sampled_on(open_session):
    """The time of the session is not over, so no client is told that it is."""

    async def run():
        engine = SlowEngine()
        engine.ends_itself = {1: 4, 2: 0, 3: 7}
        session = open_session(make_sampler(engine))
        (answer,) = await session.answer(CALL)
        assert (answer.sampled_tokens, answer.finish_reason) == (LENGTH, "length")
        assert [request.max_new_tokens for request in engine.requests] == [LENGTH, LENGTH - 4, LENGTH - 4, LENGTH - 11]
        (segment,) = await session.close()
        start = len(segment.prompt_ids)
        assert segment.response_ids.tolist() == list(range(100 + start, 100 + start + LENGTH))
        engine.ends_itself = dict.fromkeys(range(100), 0)
        session = open_session(make_sampler(engine))
        with pytest.raises(ApiError, match="4 times without a token"):
            await session.answer(CALL)
        assert isinstance(session.failure, RolloutError) and await session.close() == []

    asyncio.run(run())


def test_time_in_which_a_call_was_held_is_given_back_also_where_it_is_given_up(open_session):
    async def run():
        sampler = make_sampler(SlowEngine())
        session = open_session(sampler, max_wall_seconds=2.0)
        await sampler.pause()
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.answer(CALL), 0.6)
        assert session.seconds_left() > 1.2
        sampler.resume()
        (answer,) = await session.answer(CALL)
        assert answer.sampled_tokens == LENGTH

    asyncio.run(run())


def test_an_engine_that_dies_is_waited_for(open_session):
    async def run():
        engine = SlowEngine()

        async def restart(url):
            await asyncio.sleep(1.2)
            return "two"

        session = open_session(make_sampler(engine, restart), max_wall_seconds=1.0)
        call = asyncio.create_task(session.answer(CALL))
        await until_it_samples(engine)
        engine.dead.add("one")
        (answer,) = await call
        assert answer.sampled_tokens == LENGTH and len(engine.requests) == 2
        assert len(await session.close()) == 1

    asyncio.run(run())
