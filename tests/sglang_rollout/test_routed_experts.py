"""Experts that real engines chose, against those of one fresh forward pass over the whole sequence."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import aclosing

import numpy as np
import pytest

from megatron_retool.config import SamplingConfig, load_config
from megatron_retool.routed_experts import is_missing
from sglang_rollout.engine.base import GenerateRequest, StopConditions
from sglang_rollout.engine.client import SGLangClient
from sglang_rollout.engine.routed_experts import RoutingShape
from sglang_rollout.engine.transformers_engine import TransformersEngine
from sglang_rollout.engine.weight_sync.tensor import TensorWeightSync
from sglang_rollout.rollout_manager import RolloutManager
from tests.kit import markov_policy, moe_policy
from tests.kit.forked_engine import ForkedServer
from tests.kit.markov_policy import ENDLESS_POLICY, RETOOL_POLICY, TOOL_POLICY
from tests.kit.scripted import Prompt, ScriptedTools
from tests.sglang_rollout.unreliable_proxy import UnreliableProxy

SHAPE = RoutingShape(moe_policy.LAYERS, moe_policy.K, moe_policy.EXPERTS)
versions = itertools.count(1)


@pytest.fixture(scope="module")
def models(tokenizer):
    """By their names: the same router under two policies, and another router."""
    seeds = {"tools": (TOOL_POLICY, 1), "endless": (ENDLESS_POLICY, 1), "other": (ENDLESS_POLICY, 2)}
    return {name: moe_policy.moe_model(tokenizer, *policy_and_seed) for name, policy_and_seed in seeds.items()}


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory, tokenizer, models):
    return markov_policy.save(models["tools"], tokenizer, tmp_path_factory.mktemp("moe") / "model")


@pytest.fixture(scope="module")
def make_config(model_directory):
    def make(*overrides: str):
        return load_config(
            None,
            [
                f"model.path={model_directory}",
                "learner.routing_replay=rollout",
                "rollout.engine.device=cpu",
                "rollout.engine.dtype=float32",
                "rollout.engine.random_seed=7",
                "rollout.engine.max_total_tokens=4096",
                "rollout.engine.max_running_requests=64",
                # The prompts are longer: they are read in several passes.
                "rollout.engine.extra_args=[--chunked-prefill-size, '64']",
                "rollout.multi_turn.max_tool_response_tokens=48",
                "data.max_response_length=400",
                *overrides,
            ],
        )

    return make


@pytest.fixture(scope="module")
def engine(make_config, model_directory, tmp_path_factory):
    process = ForkedServer(
        make_config().rollout.engine,
        model_path=model_directory,
        log_file=tmp_path_factory.mktemp("logs") / "engine.log",
        routed_experts=True,
    )
    process.start()
    yield process
    process.stop()


@pytest.fixture
def serve(engine, models, tmp_path):
    """Puts a model into the engine; its version."""

    def put(name: str) -> int:
        version = next(versions)
        with TensorWeightSync([engine.base_url], timeout_seconds=60) as sync:
            sync.push(moe_policy.buckets(models[name], tmp_path / name), version)
        return version

    return put


def check(trajectory, models_by_version) -> np.ndarray:
    """Each row is what the weights that sampled the next token choose in one forward pass; which rows are missing."""
    ids = [*trajectory.prompt_ids.tolist(), *trajectory.response_ids.tolist()]
    token_versions = np.array([-1] * len(trajectory.prompt_ids) + trajectory.weight_versions.tolist())
    missing = is_missing(trajectory.routed_experts)
    for version, model in models_by_version.items():
        following = [next((v for v in token_versions[place + 1 :] if v >= 0), None) for place in range(len(ids))]
        own = (np.array(following, float) == version) & ~missing
        logits = moe_policy.router_logits(model, ids)
        assert not moe_policy.differing(trajectory.routed_experts, logits)[own].any()
        # The comparison is worth something: rows of the token before would not pass.
        shifted = np.roll(trajectory.routed_experts, 1, 0)
        assert own.sum() < 8 or moe_policy.differing(shifted, logits)[own].mean() > 0.5
    return missing


def unsent(trajectory) -> list[int]:
    """The tokens that no engine was given: the last that was sampled, and those after it."""
    last = len(trajectory.prompt_ids) + int(np.flatnonzero(trajectory.weight_versions >= 0)[-1])
    return list(range(last, len(trajectory.prompt_ids) + len(trajectory.response_ids)))


def make_prompts(tokenizer, count: int) -> list[Prompt]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 6*7? " * 6}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [Prompt(ids, group_id, {"data_source": "test"}) for group_id in range(count)]


def on_client(engine, scenario):
    async def run():
        async with SGLangClient(engine.base_url, routing=lambda: SHAPE) as client:
            return await scenario(client)

    return asyncio.run(run())


def generated(config, tokenizer, url: str, groups: int, n: int):
    async def scenario():
        async with (
            UnreliableProxy(url, drop_rate=0.05) as unreliable,
            RolloutManager(config, tokenizer, [unreliable], ScriptedTools()) as manager,
        ):
            found = await manager.generate_groups(make_prompts(tokenizer, groups), SamplingConfig(n=n))
            return [trajectory for group in found for trajectory in group], manager.statistics

    return asyncio.run(scenario())


def test_rows_of_several_turns_are_those_of_one_forward_pass(engine, make_config, tokenizer, models, serve):
    """Prompts in chunks, equal prompts side by side, prefixes from the cache, tool results, connections that drop."""
    version = serve("tools")
    trajectories, statistics = generated(make_config(), tokenizer, engine.base_url, 4, 4)
    assert max(trajectory.turn_ids.max() for trajectory in trajectories) >= 2
    assert len(trajectories[0].prompt_ids) > 64
    assert statistics.cached_tokens > 0.5 * statistics.prompt_tokens
    for trajectory in trajectories:
        missing = check(trajectory, {version: models["tools"]})
        assert np.flatnonzero(missing).tolist() == unsent(trajectory)


def test_forks_have_the_rows_of_their_parents(engine, make_config, tokenizer, models, serve):
    version = serve("tools")
    config = make_config(
        "rollout.branching.enable=true",
        "rollout.branching.initial_rollouts=2",
        "rollout.branching.entropy_tokens=2",
        "rollout.branching.threshold=-1.0",
        "rollout.train.n=6",
    )
    trajectories, statistics = generated(config, tokenizer, engine.base_url, 3, 6)
    assert statistics.forked_trajectories > 0
    for trajectory in trajectories:
        missing = check(trajectory, {version: models["tools"]})
        assert np.flatnonzero(missing).tolist() == unsent(trajectory)


def test_weights_that_change_under_requests_take_their_rows(engine, make_config, tokenizer, models, serve):
    """Held requests are computed again: what the old weights chose for the tokens that they sampled is lost."""
    old = serve("endless")
    config = make_config("data.max_response_length=500")

    async def scenario():
        async with RolloutManager(config, tokenizer, [engine.base_url], ScriptedTools()) as manager:
            prompts = make_prompts(tokenizer, 1)
            call = asyncio.create_task(manager.generate_groups(prompts, SamplingConfig(n=3)))
            while not await held(engine):
                await asyncio.sleep(0.05)
            new = await asyncio.to_thread(serve, "other")
            return new, (await call)[0]

    new, group = asyncio.run(scenario())
    for trajectory in group:
        assert set(trajectory.weight_versions.tolist()) == {old, new}
        missing = check(trajectory, {old: models["endless"], new: models["other"]})
        first = len(trajectory.prompt_ids) + int(np.flatnonzero(trajectory.weight_versions == new)[0])
        # The token before the first of the new weights was their input.
        assert np.flatnonzero(missing).tolist() == [*range(first - 1), *unsent(trajectory)]


async def held(engine) -> bool:
    """Whether the engine's requests hold more than their prompts, which they share."""
    async with SGLangClient(engine.base_url) as client:
        answer = await client.request("/v1/loads")
    return sum(load["num_used_tokens"] for load in answer["loads"]) > 150


def test_a_paused_trajectory_keeps_the_rows_of_the_weights_that_sampled_it(
    engine, make_config, tokenizer, models, serve
):
    old = serve("endless")
    config = make_config("rollout.partial.enable=true", "data.max_response_length=300")

    async def scenario():
        async with RolloutManager(config, tokenizer, [engine.base_url], ScriptedTools()) as manager:
            async with aclosing(manager.stream(make_prompts(tokenizer, 3), SamplingConfig(n=2))) as stream:
                first = asyncio.ensure_future(anext(stream))
                while not await held(engine):
                    await asyncio.sleep(0.05)
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
            new = await asyncio.to_thread(serve, "other")
            return new, await manager.generate_groups([], SamplingConfig(n=2))

    new, groups = asyncio.run(scenario())
    mixed = 0
    for trajectory in (trajectory for group in groups for trajectory in group):
        missing = check(trajectory, {old: models["endless"], new: models["other"]})
        assert np.flatnonzero(missing).tolist() == unsent(trajectory)
        mixed += {old, new} <= set(trajectory.weight_versions.tolist())
    assert mixed >= 4


def test_rows_change_nothing_in_what_is_sampled(engine, tokenizer, models, serve):
    """Seeds, filters, stop tokens, deadlines: with rows and without; on the wire an expert is one byte."""
    serve("tools")
    prompt = make_prompts(tokenizer, 1)[0].prompt_ids
    stop = StopConditions((tokenizer.eos_token_id,))

    async def scenario(client):
        async def both(sampling, stop=stop, **options):
            return [
                await client.generate(
                    GenerateRequest(prompt, 60, sampling, stop, routed_experts_start=start, **options)
                )
                for start in (None, 5)
            ]

        pairs = [
            await both(SamplingConfig(), seed=3),
            await both(SamplingConfig(top_p=0.9, top_k=20), seed=4, filtered_log_probs=True, top_log_probs=3),
            await both(SamplingConfig(temperature=0.0)),
        ]
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}, "return_routed_experts": True}
        answer = await client.request("/generate", body)
        return pairs, len(answer["meta_info"]["routed_experts"])

    pairs, characters = on_client(engine, scenario)
    assert characters == -(-len(prompt) * SHAPE.layers * SHAPE.k // 3) * 4
    for without, with_rows in pairs:
        assert without.routed_experts is None
        assert (without.output_ids, without.finish_reason) == (with_rows.output_ids, with_rows.finish_reason)
        np.testing.assert_allclose(without.log_probs, with_rows.log_probs, atol=1e-5)
        logits = moe_policy.router_logits(models["tools"], [*prompt, *with_rows.output_ids])
        assert not moe_policy.differing(with_rows.routed_experts, logits[5:-1]).any()


def test_an_aborted_request_has_the_rows_of_what_it_returns(engine, tokenizer, models, serve):
    serve("endless")
    prompt = make_prompts(tokenizer, 1)[0].prompt_ids

    async def scenario(client):
        request = GenerateRequest(prompt, 2000, SamplingConfig(), routed_experts_start=0)
        return await client.generate(request, deadline_seconds=1.0)

    result = on_client(engine, scenario)
    assert result.finish_reason == "abort" and result.output_ids
    logits = moe_policy.router_logits(models["endless"], [*prompt, *result.output_ids])
    assert not moe_policy.differing(result.routed_experts, logits[:-1]).any()


def test_the_reference_engine_chooses_the_same_experts(engine, make_config, tokenizer, models, serve, tmp_path):
    version = serve("tools")
    config = make_config(f"trainer.runs_dir={tmp_path}", "rollout.engine.extra_args=[]")
    reference = TransformersEngine(config)
    url = f"transformers://engine-0{config.model.path}"
    reference.weight_sync([url]).push(moe_policy.buckets(models["tools"], tmp_path / "weights"), version)
    prompt = make_prompts(tokenizer, 1)[0].prompt_ids
    requests = [
        GenerateRequest(prompt[:length], 24, SamplingConfig(temperature=0.0), routed_experts_start=length // 2)
        for length in (5, 40, len(prompt))
    ]

    async def scenario(client):
        return await asyncio.gather(*(client.generate(request) for request in requests))

    there, here = on_client(engine, scenario), asyncio.run(scenario(reference.client(url)))
    for request, sglang, transformers in zip(requests, there, here, strict=True):
        assert sglang.output_ids == transformers.output_ids
        ids = [*request.input_ids, *sglang.output_ids]
        logits = moe_policy.router_logits(models["tools"], ids)[request.routed_experts_start : -1]
        for result in (sglang, transformers):
            assert result.routed_experts.dtype == np.uint8
            assert not moe_policy.differing(result.routed_experts, logits).any()


@pytest.mark.slow
def test_rows_of_an_engine_that_has_the_tokenizer(make_config, model_directory, tokenizer, tmp_path):
    """Stop strings: SGLang's detokenizer then writes the answer."""
    config = make_config("rollout.multi_turn.format=retool")
    model = moe_policy.moe_model(tokenizer, RETOOL_POLICY, seed=3)
    server = ForkedServer(
        config.rollout.engine,
        model_path=markov_policy.save(model, tokenizer, tmp_path / "model"),
        log_file=tmp_path / "engine.log",
        tokenizer=True,
        routed_experts=True,
    )
    with server:
        trajectories, _ = generated(config, tokenizer, server.base_url, 3, 2)
    assert any(trajectory.tool_calls for trajectory in trajectories)
    for trajectory in trajectories:
        missing = check(trajectory, {0: model})
        assert np.flatnonzero(missing).tolist() == unsent(trajectory)
