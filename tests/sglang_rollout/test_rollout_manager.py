"""The manager's decisions when engines fail, against servers that fail on purpose; real servers: test_real_engine."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter

import pytest
from aiohttp import web

from megatron_retool.config import SamplingConfig, ValSamplingConfig, load_config
from megatron_retool.errors import OperationError
from megatron_retool.trajectory import FinishReason
from sglang_rollout.engine.base import GenerateResult
from sglang_rollout.engine.client import SGLangClient
from sglang_rollout.engine.sglang_engine import SGLangEngine
from sglang_rollout.groups import Changes
from sglang_rollout.rollout_manager import RolloutManager
from sglang_rollout.session import MAX_ENGINE_FAILURES, RolloutError
from tests.kit import traced_rows
from tests.kit.abortable_engine import AbortableEngine
from tests.kit.markov_policy import ANSWER, CALL
from tests.kit.scripted import Prompt, ScriptedTools


class ScriptedEngine:
    """Calls a tool in the first turn and answers in the second; ``fail`` decides which requests fail."""

    def __init__(self, tokenizer, fail=lambda count: None) -> None:
        self.tokenizer, self.fail = tokenizer, fail
        self.requests = 0
        self.running = self.most_running = 0
        self.url = ""

    async def generate(self, request: web.Request) -> web.Response:
        self.requests += 1
        body = await request.json()
        failure = self.fail(self.requests)
        if failure == "die":
            asyncio.create_task(self.stop())
        if failure in ("die", "drop"):
            request.transport.abort()
            return web.Response()
        if failure is not None:
            return web.json_response({"message": "out of luck"}, status=failure)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0.002)
        self.running -= 1
        # The prompt has two tokens.
        text = CALL if len(body["input_ids"]) < 3 else ANSWER
        ids = self.tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)
        meta = {
            "finish_reason": {"type": "stop", "matched": ids[-1]},
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "weight_version": "1",
            **traced_rows.meta_info(body, ids, version=1),
        }
        return web.json_response({"output_ids": ids, "meta_info": meta})

    async def start(self) -> ScriptedEngine:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", lambda request: asyncio.sleep(0, web.Response()))
        app.router.add_get("/health_generate", lambda request: asyncio.sleep(0, web.Response()))
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        return self

    async def stop(self) -> None:
        await self.runner.cleanup()


def make_config(*overrides: str):
    common = ["rollout.request_retries=1", "rollout.engine.health_timeout_seconds=1", *traced_rows.OVERRIDES]
    return load_config(None, [*common, *overrides])


PROMPTS = [Prompt([1, 2], group_id, {"row": group_id}) for group_id in range(6)]
TWO = SamplingConfig(n=2)


def assert_complete(groups) -> None:
    trajectories = [trajectory for group in groups for trajectory in group]
    assert [(t.group_id, t.index) for t in trajectories] == [(g, i) for g in range(6) for i in range(2)]
    assert all(t.finish_reason is FinishReason.STOP and len(t.tool_calls) == 1 for t in trajectories)
    assert all(t.extra_info["row"] == t.group_id for t in trajectories)
    # Whatever engine a request was repeated on, every token but the last has its row.
    assert all(traced_rows.check(t) == [len(t.routed_experts) - 1] for t in trajectories)


def test_the_only_engine_dies_and_comes_back_while_others_wait_for_a_place(tokenizer):
    restarts = []

    async def scenario():
        first = await ScriptedEngine(tokenizer, lambda count: "die" if count == 5 else None).start()

        async def restart(url):
            restarts.append(url)
            await asyncio.sleep(0.05)
            return (await ScriptedEngine(tokenizer).start()).url

        config = make_config("rollout.max_concurrent_trajectories=3")
        async with RolloutManager(config, tokenizer, [first.url], ScriptedTools(), restart_engine=restart) as manager:
            groups = await manager.generate_groups(PROMPTS, TWO)
            assert restarts == [first.url]
            return groups, manager.statistics

    groups, statistics = asyncio.run(scenario())
    assert_complete(groups)
    assert statistics.engines_lost == 1


def test_waiting_for_a_dead_engines_successor_is_not_the_trajectorys_time(tokenizer):
    """The whole step would be aborted, and be trained on as such."""

    async def scenario():
        first = await ScriptedEngine(tokenizer, lambda count: "die" if count == 5 else None).start()

        async def restart(url):
            await asyncio.sleep(1.2)
            return (await ScriptedEngine(tokenizer).start()).url

        config = make_config("rollout.multi_turn.max_wall_seconds=1")
        async with RolloutManager(config, tokenizer, [first.url], ScriptedTools(), restart_engine=restart) as manager:
            return await manager.generate_groups(PROMPTS, TWO)

    groups = asyncio.run(scenario())
    assert_complete(groups)
    slowest = max((t.timing for group in groups for t in group), key=lambda timing: timing.waiting)
    assert slowest.waiting > max(1.2, slowest.generation)


def test_a_restart_that_fails_leaves_the_other_engine(tokenizer):
    async def scenario():
        dying = await ScriptedEngine(tokenizer, lambda count: "die" if count == 3 else None).start()
        steady = await ScriptedEngine(tokenizer).start()

        async def restart(url):
            raise RuntimeError("no GPU left")

        config = make_config()
        engines = [dying.url, steady.url]
        async with RolloutManager(config, tokenizer, engines, ScriptedTools(), restart_engine=restart) as manager:
            return await manager.generate_groups(PROMPTS, TWO)

    assert_complete(asyncio.run(scenario()))


def test_engines_come_and_go_while_trajectories_are_under_way(tokenizer):
    """What is sampled is what each seed says, wherever it was sampled, and nothing of it counts as a failure."""

    async def scenario():
        async with AbortableEngine(tokenizer) as first, AbortableEngine(tokenizer) as second:
            config = make_config("rollout.engine.random_seed=7")
            async with RolloutManager(config, tokenizer, [first.url], ScriptedTools(seconds=0.05)) as manager:
                with pytest.raises(OperationError, match="engine 0 is the only one that serves"):
                    await manager.engines.retire(0)
                with pytest.raises(OperationError, match="no engine 4 serves just now; there are 0"):
                    await manager.engines.retire(4)
                generating = asyncio.create_task(manager.generate_groups(PROMPTS, TWO))
                await asyncio.sleep(0.1)
                manager.engines.add(second.url, 1)
                under_way = len(manager.engines.router.engines[0].requests)
                await manager.engines.retire(0)
                seeds = manager.group_factory.seed
                return await generating, under_way, seeds, manager.statistics, first, manager.engines.router.engines

    groups, under_way, seeds, statistics, engine, left = asyncio.run(scenario())
    assert_complete(groups)
    for trajectory in (trajectory for group in groups for trajectory in group):
        ids, log_probs = engine.answer(seeds(trajectory.group_id, trajectory.index))
        assert trajectory.response_ids[trajectory.loss_mask].tolist() == ids
        assert trajectory.rollout_log_probs[trajectory.loss_mask].tolist() == pytest.approx(log_probs)
    assert under_way and statistics.engine_failures == statistics.engines_lost == 0
    assert [each.number for each in left] == [1]
    assert 1 in {trajectory.timing.engine for group in groups for trajectory in group}


def test_an_engine_that_fails_now_and_then_loses_nothing(tokenizer):
    async def scenario():
        engines = [await ScriptedEngine(tokenizer, lambda count: 500 if count % 3 == 0 else None).start()]
        engines.append(await ScriptedEngine(tokenizer, lambda count: "drop" if count % 4 == 0 else None).start())
        urls = [engine.url for engine in engines]
        async with RolloutManager(make_config(), tokenizer, urls, ScriptedTools()) as manager:
            groups = await manager.generate_groups(PROMPTS, TWO)
            loads = [(engine.trajectories, engine.tokens) for engine in manager.engines.router.engines]
            return groups, manager.statistics, loads

    groups, statistics, loads = asyncio.run(scenario())
    assert_complete(groups)
    assert statistics.engine_failures > 0 and statistics.engines_lost == 0
    assert loads == [(0, 0), (0, 0)]


def test_a_request_that_always_fails_on_a_healthy_engine_ends_the_run(tokenizer):
    async def scenario():
        engine = await ScriptedEngine(tokenizer, lambda count: 500).start()
        async with RolloutManager(make_config(), tokenizer, [engine.url], ScriptedTools()) as manager:
            try:
                await manager.generate_groups(PROMPTS[:1], SamplingConfig(n=1))
            finally:
                assert engine.requests == MAX_ENGINE_FAILURES + 1

    with pytest.raises(RolloutError, match=r"trajectory 0/0 failed .* out of luck"):
        asyncio.run(scenario())


def test_concurrency_limit_and_order(tokenizer):
    async def scenario():
        engine = await ScriptedEngine(tokenizer).start()
        config = make_config("rollout.max_concurrent_trajectories=4")
        async with RolloutManager(config, tokenizer, [engine.url], ScriptedTools()) as manager:
            groups = await manager.generate_groups(PROMPTS, TWO)
        return groups, engine.most_running

    groups, most_running = asyncio.run(scenario())
    assert_complete(groups)
    assert most_running <= 4
    timings = [trajectory.timing for group in groups for trajectory in group]
    # Two requests of 2 ms each; four trajectories have a place at once, the others wait for one of them at least.
    assert all(timing.generation >= 0.004 for timing in timings)
    assert all(timing.ended - timing.started >= timing.generation - 1e-3 for timing in timings)
    assert {timing.engine for timing in timings} == {0}
    assert sum(timing.waiting >= 0.004 for timing in timings) >= 8


def test_leaving_a_stream_ends_what_it_started(tokenizer):
    async def scenario():
        engine = await ScriptedEngine(tokenizer).start()
        tools = ScriptedTools(seconds=30.0)
        async with RolloutManager(make_config(), tokenizer, [engine.url], tools) as manager:
            stream = manager.stream(PROMPTS, TWO)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.3)
            before = asyncio.get_running_loop().time()
            await stream.aclose()
            seconds = asyncio.get_running_loop().time() - before
            return seconds, manager.statistics.dropped_trajectories, tools.running

    seconds, dropped, running = asyncio.run(scenario())
    assert seconds < 3 and dropped == 12 and running == 0


def test_a_stream_takes_further_prompts_and_drops_groups_on_its_way(tokenizer):
    """Of two places each group takes both; what is dropped gives its own back, or its place in the queue."""

    async def scenario():
        engine = await ScriptedEngine(tokenizer).start()
        config = make_config("rollout.max_concurrent_trajectories=2")
        async with RolloutManager(config, tokenizer, [engine.url], ScriptedTools()) as manager:
            stream = manager.stream(PROMPTS[:3], TWO)
            found = [await anext(stream)]
            found.append(await stream.asend(Changes(PROMPTS[3:5], {3: 1}, abort=[1, 4, 0, 99])))
            found.append(await stream.asend(None))
            with pytest.raises(StopAsyncIteration):
                await stream.asend(None)
            loads = [(each.trajectories, each.tokens) for each in manager.engines.router.engines]
            with pytest.raises(ValueError, match="distinct, and 2 is there twice"):
                again = manager.stream(PROMPTS[2:3], TWO)
                await anext(again)
                await again.asend(Changes(PROMPTS[2:3]))
            return found, loads, manager.statistics.dropped_trajectories

    found, loads, dropped = asyncio.run(scenario())
    assert [[(t.group_id, t.index) for t in group] for group in found] == [[(0, 0), (0, 1)], [(2, 0), (2, 1)], [(3, 0)]]
    assert loads == [(0, 0)] and dropped == 4


def test_group_ids_must_be_distinct(tokenizer):
    async def scenario():
        async with RolloutManager(make_config(), tokenizer, ["http://127.0.0.1:9"], ScriptedTools()) as manager:
            await manager.generate_groups([PROMPTS[0], PROMPTS[0]], TWO)

    with pytest.raises(ValueError, match="distinct"):
        asyncio.run(scenario())


def test_group_sizes_may_differ(tokenizer):
    async def scenario():
        engine = await ScriptedEngine(tokenizer).start()
        async with RolloutManager(make_config(), tokenizer, [engine.url], ScriptedTools()) as manager:
            return [group async for group in manager.stream(PROMPTS[:2], TWO, group_sizes={1: 5})]

    assert Counter(t.group_id for group in asyncio.run(scenario()) for t in group) == {0: 2, 1: 5}


def test_validation_beside_training_is_not_counted_as_training(tokenizer):
    async def scenario():
        engine = await ScriptedEngine(tokenizer).start()
        async with RolloutManager(make_config(), tokenizer, [engine.url], ScriptedTools()) as manager:
            groups, _ = await asyncio.gather(
                manager.generate_groups(PROMPTS, TWO),
                manager.generate_groups(PROMPTS[:3], ValSamplingConfig(n=2), "validation"),
            )
        await engine.stop()
        return groups, manager.statistics

    groups, statistics = asyncio.run(scenario())
    assert_complete(groups)
    assert statistics.requests == 2 * 12
    assert statistics.sampled_tokens == sum(int(t.loss_mask.sum()) for group in groups for t in group)


class RecordingEngine(SGLangEngine):
    """Ends every request at once, and remembers it with the functions that lead to it from the trajectory's task."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.requests, self.callers = [], []

    def client(self, base_url):
        engine = self

        class Client(SGLangClient):
            async def generate(self, request, **options):
                engine.requests.append(request)
                # Below the task stands the event loop, which the test runs in.
                names = [frame.function for frame in inspect.stack(0)[1:]]
                engine.callers.append(names[: names.index("run_forever") - 2])
                return GenerateResult([7], [-0.5], [1], "length")

        return Client(base_url)


def recorded(tokenizer, config, *arguments) -> RecordingEngine:
    async def scenario():
        engine = RecordingEngine(config)
        async with RolloutManager(config, tokenizer, ["http://e"], ScriptedTools(), engine=engine) as manager:
            await manager.generate_groups(PROMPTS[:1], *arguments)
        return engine

    return asyncio.run(scenario())


def test_few_calls_lie_between_a_trajectory_and_its_engine(tokenizer):
    for callers in recorded(tokenizer, make_config("learner.routing_replay=none"), TWO).callers:
        assert callers[0] == "generate" and len(callers) <= 4, callers


@pytest.mark.parametrize(("purpose", "exact", "measured"), [("train", True, 2), ("validation", False, 0)])
def test_what_trajectories_are_for_decides_how_they_are_sampled(tokenizer, purpose, exact, measured):
    config = make_config(
        "rollout.branching.enable=true", "rollout.branching.initial_rollouts=2", "learner.routing_replay=none"
    )
    requests = recorded(tokenizer, config, SamplingConfig(n=3), purpose).requests
    assert {request.filtered_log_probs for request in requests} == {exact}
    # Branching measures the entropy of the first tokens.
    assert sum(request.top_log_probs > 0 for request in requests) == measured


@pytest.mark.parametrize("purpose", ["train", "validation"])
def test_an_engine_without_routed_experts_is_refused_where_they_are_needed(tokenizer, purpose):
    if purpose == "validation":
        assert {
            request.routed_experts_start for request in recorded(tokenizer, make_config(), TWO, purpose).requests
        } == {None}
        return
    with pytest.raises(
        RolloutError, match=r"http://e answered with no routed experts\. learner\.routing_replay=rollout"
    ):
        recorded(tokenizer, make_config(), TWO, purpose)
