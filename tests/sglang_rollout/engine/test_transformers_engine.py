"""The second engine against the protocol; that it agrees with SGLang on shared weights is test_real_engine's."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from megatron_retool.config import ConfigError, SamplingConfig, load_config
from megatron_retool.parity.admission.shrink import shrunk
from megatron_retool.parity.admission.tiny_model import random_model, save_model
from megatron_retool.planning.models import MODELS
from megatron_retool.trajectory import FinishReason
from sglang_rollout.engine.base import EngineRejected, GenerateRequest, StopConditions
from sglang_rollout.engine.configured import check_engine
from sglang_rollout.engine.transformers_engine import TransformersEngine
from sglang_rollout.rollout_manager import RolloutManager
from tests.kit import markov_policy, moe_policy
from tests.kit.markov_policy import ANSWER, CODE, CODE_END, ENDLESS_POLICY, TOOL_POLICY, single
from tests.kit.scripted import Prompt, ScriptedTools

SERVER = {"host": "127.0.0.1", "log_file": None, "tokenizer": True, "weights_from_sync": True, "gpu_ids": None}


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory, tokenizer):
    directory = tmp_path_factory.mktemp("transformers") / "model"
    return markov_policy.save(markov_policy.random_model(tokenizer, seed=1), tokenizer, directory)


@pytest.fixture
def engine(model_directory, tmp_path):
    return make_engine(model_directory, tmp_path)


def make_engine(model_directory, tmp_path, *overrides) -> TransformersEngine:
    common = [f"model.path={model_directory}", f"trainer.runs_dir={tmp_path}", "rollout.engine.dtype=float32"]
    return TransformersEngine(load_config(None, [*common, "rollout.engine.device=cpu", *overrides]))


def started(engine: TransformersEngine) -> str:
    server = engine.server(0, model_path=engine.config.model.path, **SERVER)
    server.start()
    return server.base_url


def push(engine: TransformersEngine, url: str, model, version: int):
    return engine.weight_sync([url]).push(markov_policy.buckets(model), version)


async def tokens(client, ids: list[str], count: int) -> None:
    """Wait until ``count`` tokens are sampled for the request whose id will be in ``ids``."""
    while not ids or len(client._sequences[ids[0]].versions) < count:
        await asyncio.sleep(0.005)


def log_probs_of(model, prompt: list[int], response: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1)


def test_log_probs_are_the_models_whoever_shares_the_batch(engine, tokenizer):
    model = markov_policy.random_model(tokenizer, seed=1)
    prompts = [[5, 6, 7, 8], list(range(3, 203)), [9] * 40]

    async def scenario():
        client = engine.client(started(engine))
        requests = [
            GenerateRequest(p, 20 + 9 * i, SamplingConfig(), seed=1 + i, top_log_probs=3) for i, p in enumerate(prompts)
        ]
        return await asyncio.gather(*(client.generate(request) for request in requests))

    for index, (prompt, result) in enumerate(zip(prompts, asyncio.run(scenario()), strict=True)):
        assert (len(result.output_ids), result.finish_reason) == (20 + 9 * index, "length")
        assert set(result.weight_versions) == {0} and result.prompt_tokens == len(prompt)
        expected = log_probs_of(model, prompt, result.output_ids)
        own = expected.gather(-1, torch.tensor(result.output_ids)[:, None])[:, 0]
        np.testing.assert_allclose(result.log_probs, own, atol=2e-5)
        np.testing.assert_allclose(result.top_log_probs, expected.topk(3).values, atol=2e-5)


@pytest.mark.parametrize("name", ["granite-4.0-h-tiny", "nemotron-3-nano-30b-a3b", "qwen3-next-80b-a3b"])
def test_states_in_place_of_attention_are_each_requests_own(name, tokenizer, tmp_path):
    """Requests of other lengths are padded, leave the batch and join it."""
    config = {**shrunk(MODELS[name], 4), "vocab_size": len(tokenizer)}
    model = random_model(config).float().eval()
    save_model(model, tmp_path / "model", config)
    tokenizer.save_pretrained(tmp_path / "model")
    engine = make_engine(tmp_path / "model", tmp_path, "rollout.engine.backend_kwargs={admit_every: 4}")
    prompts = [[5, 6, 7, 8], list(range(3, 63)), [9] * 25]

    async def scenario():
        client = engine.client(started(engine))
        requests = [GenerateRequest(p, 6 + 9 * i, SamplingConfig(), seed=1 + i) for i, p in enumerate(prompts)]
        first = [asyncio.create_task(client.generate(request)) for request in requests[:2]]
        await asyncio.sleep(0.05)
        return [*await asyncio.gather(*first), await client.generate(requests[2])]

    for prompt, result in zip(prompts, asyncio.run(scenario()), strict=True):
        expected = log_probs_of(model, prompt, result.output_ids)
        own = expected.gather(-1, torch.tensor(result.output_ids)[:, None])[:, 0]
        np.testing.assert_allclose(result.log_probs, own, atol=2e-5)


def test_filters_cut_the_distribution_and_the_log_probs_say_so_on_demand(engine, tokenizer):
    model = markov_policy.random_model(tokenizer, seed=1)
    sampling = SamplingConfig(top_p=0.5, top_k=20, min_p=0.02)

    async def scenario():
        client = engine.client(started(engine))
        return await asyncio.gather(
            *(
                client.generate(GenerateRequest([5, 6], 24, sampling, seed=3, filtered_log_probs=filtered))
                for filtered in (False, True)
            )
        )

    plain, filtered = asyncio.run(scenario())
    assert plain.output_ids == filtered.output_ids
    probabilities, order = log_probs_of(model, [5, 6], plain.output_ids).exp().sort(descending=True)
    for row, (token, before, after) in enumerate(
        zip(plain.output_ids, plain.log_probs, filtered.log_probs, strict=True)
    ):
        p = probabilities[row]
        kept = (p.cumsum(0) - p <= 0.5) & (torch.arange(len(p)) < 20) & (p >= 0.02 * p[0])
        place = order[row].tolist().index(token)
        assert kept[place]
        assert before == pytest.approx(p[place].log().item(), abs=2e-5)
        assert after == pytest.approx((p[place] / p[kept].sum()).log().item(), abs=1e-4)


def test_a_seed_and_the_position_decide_what_is_sampled(engine):
    async def scenario():
        client = engine.client(started(engine))

        async def sampled(ids, count, seed):
            return (await client.generate(GenerateRequest(ids, count, SamplingConfig(), seed=seed))).output_ids

        whole = await sampled([5, 6], 12, 1)
        others = await asyncio.gather(sampled([5, 6, *whole[:5]], 7, 1), sampled([5, 6], 12, 2))
        return whole, *others

    whole, rest, other = asyncio.run(scenario())
    assert rest == whole[5:] and other != whole


def test_frequencies_are_the_probabilities(engine, tokenizer):
    model = markov_policy.random_model(tokenizer, seed=1)

    async def scenario():
        client = engine.client(started(engine))
        requests = [GenerateRequest([5, 6], 1, SamplingConfig(temperature=0.5, top_k=4)) for _ in range(2000)]
        return [r.output_ids[0] for r in await asyncio.gather(*(client.generate(request) for request in requests))]

    tokens = asyncio.run(scenario())
    with torch.no_grad():
        logits, likely = (model(torch.tensor([[5, 6]])).logits[0, -1] / 0.5).topk(4)
    for token, probability in zip(likely.tolist(), logits.softmax(-1).tolist(), strict=True):
        assert tokens.count(token) / len(tokens) == pytest.approx(probability, abs=0.05)


def test_turns_end_at_ids_and_strings(engine, tokenizer):
    url = started(engine)
    push(engine, url, markov_policy.table_model(tokenizer, {"word": {CODE: 1.0}, CODE: {CODE_END: 1.0}}), 1)
    start, end = [single(tokenizer, "word")], single(tokenizer, CODE)

    async def scenario():
        client = engine.client(url)
        return [
            await client.generate(GenerateRequest(start, 8, SamplingConfig(), stop))
            for stop in (StopConditions((end,)), StopConditions((), ("</code>",)))
        ]

    by_id, by_string = asyncio.run(scenario())
    assert (by_id.output_ids, by_id.finish_reason, by_id.matched_stop) == ([end], "stop", end)
    assert by_string.output_ids == [end, single(tokenizer, CODE_END)] and by_string.matched_stop == "</code>"


def test_the_models_own_end_stops_only_where_it_may(engine, tokenizer):
    url = started(engine)
    end = tokenizer.eos_token_id
    table = {"word": {tokenizer.eos_token: 1.0}, tokenizer.eos_token: {"word": 1.0}}
    push(engine, url, markov_policy.table_model(tokenizer, table), 1)
    word = single(tokenizer, "word")

    async def scenario():
        client = engine.client(url)
        return [
            await client.generate(GenerateRequest([word], 4, SamplingConfig(), StopConditions(end_of_sequence=may)))
            for may in (True, False)
        ]

    ended, went_on = asyncio.run(scenario())
    assert (ended.output_ids, ended.finish_reason) == ([end], "stop")
    assert (went_on.output_ids, went_on.finish_reason) == ([end, word, end, word], "length")


def test_weights_change_under_a_request_which_says_which_token_had_which(engine, tokenizer):
    url = started(engine)
    word, words = markov_policy.WORD, markov_policy.WORDS
    tables = [ENDLESS_POLICY, ENDLESS_POLICY | {word: {word: 0.2, words: 0.8}}]
    models = [markov_policy.table_model(tokenizer, table) for table in tables]
    assert push(engine, url, models[0], 3).tensors == len(models[0].state_dict())
    prompt = [single(tokenizer, "word")]

    async def scenario():
        client = engine.client(url)
        assert await client.weight_version() == 3
        ids: list[str] = []
        request = GenerateRequest(prompt, 3000, SamplingConfig())
        call = asyncio.create_task(client.generate(request, on_start=ids.append))
        await tokens(client, ids, 5)
        with engine._models[url]._lock:  # however long the files take, the request is not over before them
            push(engine, url, models[1], 4)
        assert await client.weight_version() == 4
        while 4 not in client._sequences[ids[0]].versions:
            await asyncio.sleep(0.01)
        await client.abort(ids[0])
        return await call

    result = asyncio.run(scenario())
    assert result.finish_reason == "abort" and sorted(set(result.weight_versions)) == [3, 4]
    assert result.weight_versions == sorted(result.weight_versions)
    versions = np.array(result.weight_versions)
    for version, model in zip((3, 4), models, strict=True):
        expected = log_probs_of(model, prompt, result.output_ids)
        own = expected.gather(-1, torch.tensor(result.output_ids)[:, None])[:, 0].numpy()
        np.testing.assert_allclose(np.array(result.log_probs)[versions == version], own[versions == version], atol=5e-5)


def test_experts_are_those_of_the_weights_that_the_request_ended_with(tokenizer, tmp_path):
    """Other requests join the batch, which makes its cache again, and weights change under the first one."""
    models = [moe_policy.moe_model(tokenizer, ENDLESS_POLICY, seed) for seed in (1, 2)]
    directory = markov_policy.save(models[0], tokenizer, tmp_path / "model")
    engine = make_engine(directory, tmp_path, "learner.routing_replay=rollout")
    url = started(engine)
    prompts = [list(range(3, 3 + length)) for length in (4, 30, 9)]

    async def scenario():
        client = engine.client(url)
        ids: list[str] = []

        def request(prompt, count, start):
            return GenerateRequest(prompt, count, SamplingConfig(), seed=1, routed_experts_start=start)

        calls = [asyncio.create_task(client.generate(request(prompts[0], 3000, 2), on_start=ids.append))]
        await tokens(client, ids, 3)
        calls += [asyncio.create_task(client.generate(request(prompt, 30, 5))) for prompt in prompts[1:]]
        old = await asyncio.gather(*calls[1:])
        with engine._models[url]._lock:
            engine.weight_sync([url]).push(moe_policy.buckets(models[1], tmp_path / "new"), 1)
        while 1 not in client._sequences[ids[0]].versions:
            await asyncio.sleep(0.01)
        await client.abort(ids[0])
        without = await client.generate(GenerateRequest(prompts[0], 2, SamplingConfig()))
        return await calls[0], *old, without

    *results, without = asyncio.run(scenario())
    assert without.routed_experts is None and set(results[0].weight_versions) == {0, 1}
    for result, prompt, start, model in zip(
        results, prompts, (2, 5, 5), [models[1], models[0], models[0]], strict=True
    ):
        logits = moe_policy.router_logits(model, [*prompt, *result.output_ids])
        assert len(result.routed_experts) == len(logits) - 1 - start
        assert not moe_policy.differing(result.routed_experts, logits[start:-1]).any()


def test_a_deadline_and_an_abort_give_back_what_there_is(engine, tokenizer):
    url = started(engine)
    push(engine, url, markov_policy.table_model(tokenizer, ENDLESS_POLICY), 1)

    async def scenario():
        client, ids = engine.client(url), []
        request = GenerateRequest([single(tokenizer, "word")], 3000, SamplingConfig())
        assert await client.healthy(60)  # the model is loaded
        limited = await client.generate(request, deadline_seconds=0.5)
        call = asyncio.create_task(client.generate(request, on_start=ids.append))
        await tokens(client, ids, 1)
        await client.abort(ids[0])
        cancelled = asyncio.create_task(client.generate(request))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        return limited, await call, await client.healthy(60)

    limited, aborted, healthy = asyncio.run(scenario())
    for result in (limited, aborted):
        assert result.finish_reason == "abort" and 0 < len(result.output_ids) == len(result.log_probs) < 3000
    assert healthy


def test_what_does_not_fit_is_refused_and_what_grows_out_of_it_ends(model_directory, tmp_path):
    engine = make_engine(model_directory, tmp_path, "rollout.engine.context_length=32")

    async def scenario():
        client = engine.client(started(engine))
        with pytest.raises(EngineRejected, match="the input of 40 tokens fills the context of 32"):
            await client.generate(GenerateRequest([5] * 40, 4, SamplingConfig()))
        return await client.generate(GenerateRequest([5] * 30, 4, SamplingConfig()))

    result = asyncio.run(scenario())
    assert (len(result.output_ids), result.finish_reason) == (2, "length")


@pytest.mark.parametrize("setting", ["quantization=fp8", "tensor_parallel_size=2", "extra_args=[--x]"])
def test_what_it_cannot_do_is_said(model_directory, tmp_path, setting):
    with pytest.raises(ConfigError, match=f"rollout.engine.{setting.split('=')[0]}.*backend=transformers"):
        make_engine(model_directory, tmp_path, f"rollout.engine.{setting}")


def test_the_rollout_manager_speaks_to_it_as_to_any_engine(model_directory, tmp_path, tokenizer):
    """Turns, tools and branching, with exact log-probs, over an engine that has no HTTP."""
    overrides = [
        "rollout.engine.backend=transformers", "rollout.branching.enable=true", "rollout.branching.initial_rollouts=2",
        "rollout.branching.entropy_tokens=3", "rollout.train.n=4", "rollout.engine.random_seed=7",
        "data.max_response_length=300", "rollout.multi_turn.max_tool_response_tokens=48",
    ]  # fmt: skip
    engine = make_engine(model_directory, tmp_path, *overrides)
    check_engine(engine.config)
    url, model = started(engine), markov_policy.table_model(tokenizer, TOOL_POLICY)
    push(engine, url, model, 2)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "6*7?"}], tokenize=False, add_generation_prompt=1)
    prompts = [Prompt(tokenizer.encode(text, add_special_tokens=False), group) for group in range(3)]

    async def scenario():
        async with RolloutManager(engine.config, tokenizer, [url], ScriptedTools(), engine=engine) as manager:
            return await manager.generate_groups(prompts, SamplingConfig(n=4))

    trajectories = [trajectory for group in asyncio.run(scenario()) for trajectory in group]
    assert [(t.group_id, t.index) for t in trajectories] == [(g, i) for g in range(3) for i in range(4)]
    assert {t.finish_reason for t in trajectories} <= {FinishReason.STOP, FinishReason.TOOL_LIMIT, FinishReason.LENGTH}
    assert any(t.tool_calls for t in trajectories) and any(
        ANSWER in tokenizer.decode(t.response_ids) for t in trajectories
    )
    for t in trajectories:
        assert set(t.weight_versions[t.loss_mask]) == {2}
        ids = torch.tensor(t.response_ids.astype(np.int64))
        own = log_probs_of(model, t.prompt_ids.tolist(), ids.tolist()).gather(-1, ids[:, None])[:, 0].numpy()
        np.testing.assert_allclose(t.rollout_log_probs[t.loss_mask], own[t.loss_mask], atol=5e-5)
