"""Rollout on real SGLang servers: ids, log-probs, weights, interruptions and deaths."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import os
import signal
import time
from collections import Counter
from contextlib import aclosing, closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from transformers import Qwen2ForCausalLM

from code_interpreter.process import SandboxServerProcess
from megatron_retool.cluster.log_prob_check import LogProbMismatch, fixed_text
from megatron_retool.config import (
    CodeInterpreterConfig,
    MultiTurnConfig,
    SamplingConfig,
    ValSamplingConfig,
    load_config,
)
from megatron_retool.data.chat_template import render
from megatron_retool.serving.front import OpenDoor
from megatron_retool.trajectory import FinishReason
from sglang_rollout.engine.base import EngineFailed, EngineRejected, GenerateRequest, StopConditions
from sglang_rollout.engine.client import SGLangClient
from sglang_rollout.engine.pool import EnginePool
from sglang_rollout.engine.process import SGLangServer
from sglang_rollout.engine.rollout_statistics import RolloutStatistics
from sglang_rollout.engine.sglang_engine import SGLangEngine
from sglang_rollout.engine.transformers_engine import TransformersEngine
from sglang_rollout.engine.weight_sync import distributed
from sglang_rollout.engine.weight_sync.distributed import DistributedWeightSync
from sglang_rollout.engine.weight_sync.errors import WeightSyncError
from sglang_rollout.engine.weight_sync.push import disconnect, make_weight_sync, push_weights
from sglang_rollout.engine.weight_sync.quantization import round_to_integers
from sglang_rollout.engine.weight_sync.tensor import TensorWeightSync
from sglang_rollout.gateway.sampler import PoolSampler
from sglang_rollout.gateway.server import Gateway
from sglang_rollout.rollout_manager import RolloutManager
from sglang_rollout.session import RolloutError
from tests.kit import markov_policy
from tests.kit.markov_policy import ENDLESS_POLICY, TOOL_POLICY, table_model
from tests.kit.scripted import FaultyTools, Prompt, ScriptedTools
from tests.sglang_rollout.scored_text import compare
from tests.sglang_rollout.unreliable_proxy import UnreliableProxy
from tools.registry import ToolRegistry
from untrusted.process_tree import descendants

CONTEXT = 4096
"""The model's own, so that SGLang is told of a longer one."""
GREEDY = SamplingConfig(n=1, temperature=0.0)


def make_config(*overrides: str):
    return load_config(
        None,
        [
            "rollout.engine.device=cpu",
            "rollout.engine.dtype=float32",
            "rollout.engine.max_total_tokens=65536",
            "rollout.engine.max_running_requests=256",
            "rollout.multi_turn.max_tool_response_tokens=48",
            "data.max_response_length=600",
            *overrides,
        ],
    )


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory, tokenizer):
    directory = tmp_path_factory.mktemp("real") / "model"
    return markov_policy.save(markov_policy.random_model(tokenizer, seed=1), tokenizer, directory)


@pytest.fixture(scope="module")
def engine(model_directory, tmp_path_factory):
    config = make_config("rollout.engine.random_seed=7", f"rollout.engine.context_length={CONTEXT}").rollout.engine
    process = SGLangServer(
        config, model_path=model_directory, log_file=tmp_path_factory.mktemp("logs") / "engine.log", tokenizer=True
    )
    process.start()
    yield process
    process.stop()


versions = itertools.count(1)


def serve(engine: SGLangServer, model) -> int:
    """Put ``model`` into the engine; its version."""
    version = next(versions)
    with TensorWeightSync([engine.base_url], timeout_seconds=30) as sync:
        sync.push(markov_policy.buckets(model), version)
    return version


def shared_memory() -> list[str]:
    """This process's mappings that a weight sync shares with engines."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:weight_sync" in line]


def on_client(engine: SGLangServer, scenario):
    async def run():
        async with SGLangClient(engine.base_url) as client:
            return await scenario(client)

    return asyncio.run(run())


def hf_log_probs(model, prompt: list[int], response: list[int], temperature: float = 1.0) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0].float() / temperature
    positions = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
    return torch.log_softmax(logits, -1)[positions, torch.tensor(response)].numpy()


def make_prompts(tokenizer, count: int) -> list[Prompt]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 6*7?"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [Prompt(ids, group_id, {"data_source": "test"}) for group_id in range(count)]


def test_the_last_id_of_the_vocabulary_is_scored_as_any_other(engine, model_directory):
    """SGLang itself gives the first id's log-prob in its place."""
    model = Qwen2ForCausalLM.from_pretrained(model_directory, dtype=torch.float32).eval()
    serve(engine, model)
    last = model.config.vocab_size - 1
    ids = [1, 5, last, 7, 2, last, 9]
    found = on_client(engine, lambda client: client.score(ids))
    np.testing.assert_allclose(found, hf_log_probs(model, ids[:1], ids[1:]), atol=1e-5)


def check(trajectories, tokenizer) -> None:
    """What every trajectory must satisfy, whatever happened on the way."""
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for trajectory in trajectories:
        trajectory.check()
        assert isinstance(trajectory.finish_reason, FinishReason)
        sampled = trajectory.loss_mask
        assert np.all(trajectory.rollout_log_probs[sampled] <= 0) and np.all(trajectory.weight_versions[sampled] >= 0)
        turns = trajectory.turn_ids[sampled]
        assert np.all(np.diff(turns) >= 0) and (len(turns) == 0 or set(turns) == set(range(turns.max() + 1)))
        # A sampled end of turn closes each turn but perhaps the last, and never stands inside one.
        for turn in range(int(turns.max()) + 1 if len(turns) else 0):
            ids = trajectory.response_ids[trajectory.turn_ids == turn]
            assert end not in ids[:-1]
            assert ids[-1] == end or turn == turns.max()


def test_an_engine_records_what_it_does(engine, tmp_path):
    async def scenario(client):
        for name in ("step_000001_engine0", "step_000002_engine0"):
            await client.start_profile(tmp_path, name, record_shapes=False, with_stack=False)
            await client.generate(GenerateRequest([5, 6, 7, 8], 4, GREEDY))
            await client.stop_profile()
        with pytest.raises(EngineFailed, match="/stop_profile"):
            await client.stop_profile()

    on_client(engine, scenario)
    first, second = sorted(tmp_path.glob("*.json.gz"))
    assert first.name.startswith("step_000001_engine0") and second.name.startswith("step_000002_engine0")
    with gzip.open(first) as packed:
        assert any(event.get("name", "").startswith("aten::") for event in json.load(packed)["traceEvents"])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_those_of_the_model(engine, tokenizer, temperature):
    model = markov_policy.random_model(tokenizer, seed=1)
    version = serve(engine, model)
    prompts = [[5, 6, 7, 8], list(range(3, 203)), [9] * 40]

    async def scenario(client):
        sampling = SamplingConfig(n=1, temperature=temperature)
        requests = [GenerateRequest(prompt, 48, sampling) for prompt in prompts]
        return await asyncio.gather(*(client.generate(request) for request in requests))

    for prompt, result in zip(prompts, on_client(engine, scenario), strict=True):
        assert result.weight_versions == [version] * len(result.output_ids)
        expected = hf_log_probs(model, prompt, result.output_ids, temperature)
        assert np.abs(np.array(result.log_probs) - expected).max() < 2e-5


def test_log_probs_of_a_filtered_distribution_are_those_of_what_was_sampled(engine, tokenizer):
    model = markov_policy.random_model(tokenizer, seed=1)
    serve(engine, model)

    async def scenario(client):
        sampling = SamplingConfig(n=1, top_p=0.5, top_k=20)
        return await client.generate(GenerateRequest([5, 6, 7], 24, sampling, filtered_log_probs=True))

    result = on_client(engine, scenario)
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7, *result.output_ids]])).logits[0, 2:-1].float()
    for row, token, log_prob in zip(logits, result.output_ids, result.log_probs, strict=True):
        probabilities, order = torch.softmax(row, -1).sort(descending=True)
        kept = (probabilities.cumsum(0) - probabilities <= 0.5) & (torch.arange(len(order)) < 20)
        assert token in order[kept].tolist()
        position = order.tolist().index(token)
        expected = (probabilities[position] / probabilities[kept].sum()).log().item()
        assert abs(log_prob - expected) < 1e-4


def test_the_reference_engine_says_the_same_of_the_same_weights(engine, tokenizer, model_directory, tmp_path):
    model = markov_policy.random_model(tokenizer, seed=3)
    version = serve(engine, model)
    config = make_config(f"model.path={model_directory}", f"trainer.runs_dir={tmp_path}")
    reference = TransformersEngine(config)
    url = f"transformers://engine-0{model_directory}"
    reference.weight_sync([url]).push(markov_policy.buckets(model), version)
    stop = StopConditions((9,))
    requests = [
        GenerateRequest(prompt, 32, GREEDY, stop, top_log_probs=5, filtered_log_probs=True)
        for prompt in ([5, 6, 7, 8], list(range(3, 103)), [9] * 40)
    ]

    async def scenario(client):
        return await asyncio.gather(*(client.generate(request) for request in requests))

    there = on_client(engine, scenario)
    here = asyncio.run(scenario(reference.client(url)))
    for sglang, transformers in zip(there, here, strict=True):
        assert sglang.output_ids == transformers.output_ids
        assert sglang.weight_versions == transformers.weight_versions
        assert (sglang.finish_reason, sglang.matched_stop) == (transformers.finish_reason, transformers.matched_stop)
        np.testing.assert_allclose(sglang.log_probs, transformers.log_probs, atol=2e-5)
        np.testing.assert_allclose(sglang.top_log_probs, transformers.top_log_probs, atol=2e-5)


def test_multi_turn_log_probs_and_ids(engine, tokenizer, monkeypatch):
    """Ids in the trajectory are the ids of the engine's answers, and the model gives each the recorded log-prob."""
    model = table_model(tokenizer, TOOL_POLICY)
    version = serve(engine, model)
    answers: dict[tuple[int, ...], list[int]] = {}
    original = SGLangClient.generate

    async def recording(self, request, **kwargs):
        result = await original(self, request, **kwargs)
        answers[(request.seed, len(request.input_ids))] = result.output_ids
        return result

    monkeypatch.setattr(SGLangClient, "generate", recording)
    config = make_config("rollout.engine.random_seed=7")
    tools = ScriptedTools()

    async def scenario():
        async with RolloutManager(config, tokenizer, [engine.base_url], tools) as manager:
            groups = await manager.generate_groups(make_prompts(tokenizer, 6), SamplingConfig(n=4))
            return groups, manager.statistics

    groups, statistics = asyncio.run(scenario())
    trajectories = [trajectory for group in groups for trajectory in group]
    assert [(t.group_id, t.index) for t in trajectories] == [(g, i) for g in range(6) for i in range(4)]
    check(trajectories, tokenizer)
    calls = [call for trajectory in trajectories for call in trajectory.tool_calls]
    assert {"ok", "parse_error", "unknown_tool"} <= {call.status for call in calls}
    assert any(trajectory.num_turns >= 4 for trajectory in trajectories)
    assert statistics.cached_tokens > 0.5 * statistics.prompt_tokens
    from_engine = Counter(token for ids in answers.values() for token in ids)
    in_trajectories = Counter(
        token for trajectory in trajectories for token in trajectory.response_ids[trajectory.loss_mask].tolist()
    )
    assert from_engine == in_trajectories
    for trajectory in trajectories:
        mask = trajectory.loss_mask
        assert set(trajectory.weight_versions[mask].tolist()) == {version}
        expected = hf_log_probs(model, trajectory.prompt_ids.tolist(), trajectory.response_ids.tolist())
        assert np.abs(trajectory.rollout_log_probs[mask] - expected[mask]).max() < 2e-5


def test_the_same_seed_gives_the_same_tokens(engine, tokenizer):
    serve(engine, table_model(tokenizer, TOOL_POLICY))

    def generate(seed: int) -> list[list[int]]:
        async def scenario():
            config = make_config(f"rollout.engine.random_seed={seed}")
            async with RolloutManager(config, tokenizer, [engine.base_url], ScriptedTools()) as manager:
                groups = await manager.generate_groups(make_prompts(tokenizer, 3), SamplingConfig(n=4))
                return [trajectory.response_ids.tolist() for group in groups for trajectory in group]

        return asyncio.run(scenario())

    first = generate(7)
    assert generate(7) == first
    assert generate(8) != first
    assert len({tuple(ids) for ids in first}) > 3


def test_an_agent_on_the_plain_client_is_given_the_built_in_loops_tokens(engine, tokenizer):
    """Its requests come at other times, in other company: ids and log-probs of the same seeds are equal to the bit."""
    serve(engine, table_model(tokenizer, TOOL_POLICY))

    def generate(*overrides: str):
        limits = ("rollout.multi_turn.max_assistant_turns=4", "rollout.multi_turn.max_tool_calls=3")
        config = make_config("rollout.engine.random_seed=7", "data.max_prompt_length=1000", *limits, *overrides)
        prompts = make_prompts(tokenizer, 4)
        messages = [{"role": "user", "content": "What is 6*7?"}]
        (text,) = render(tokenizer, [messages], ScriptedTools().schemas(), add_generation_prompt=True)
        for prompt in prompts:
            prompt.prompt_ids, prompt.messages = tokenizer.encode(text, add_special_tokens=False), messages

        async def scenario():
            async with RolloutManager(config, tokenizer, [engine.base_url], ScriptedTools()) as manager:
                return await manager.generate_groups(prompts, SamplingConfig(n=4))

        return [trajectory for group in asyncio.run(scenario()) for trajectory in group]

    example = Path(__file__).parents[2] / "examples" / "run_tools_agent.py"
    built_in = generate()
    assert len({t.response_ids.tobytes() for t in built_in}) > 8 and max(t.num_turns for t in built_in) > 2
    for mine, theirs in zip(built_in, generate(f"rollout.agent={example}:run"), strict=True):
        assert theirs.reward_info["agent"]["outcome"] == "finished" and theirs.segment == 0
        for column in ("prompt_ids", "response_ids", "loss_mask", "rollout_log_probs", "turn_ids", "weight_versions"):
            np.testing.assert_array_equal(getattr(theirs, column), getattr(mine, column), column)


def test_company_and_cache_change_no_bit_of_a_request(engine, tokenizer):
    """A run is repeated only where the same seed gives the same bits, whenever requests happen to arrive."""
    serve(engine, markov_policy.random_model(tokenizer, seed=1))
    random = np.random.default_rng(0)
    prompts = [random.integers(5, 50, size=size).tolist() for size in (3, 17, 40, 200, 600)]
    requests = [GenerateRequest(p, 24, SamplingConfig(n=1), seed=seed) for seed, p in enumerate(prompts)]

    async def flush(client):
        while True:  # Until the scheduler has put away the request that it just answered.
            with suppress(EngineRejected):
                return await client.flush_cache()
            await asyncio.sleep(0.01)

    async def scenario(client):
        alone = []
        for request in requests:
            await flush(client)
            alone.append(await client.generate(request))
        # What the next turn of each would ask, on a cache that this turn filled, and on none.
        further = [
            replace(request, input_ids=[*request.input_ids, *first.output_ids, 7, 8])
            for request, first in zip(requests, alone, strict=True)
        ]
        cached = await asyncio.gather(*map(client.generate, further))
        await flush(client)
        company = [GenerateRequest([n + 9] * n, 40, SamplingConfig(n=1), seed=n) for n in (1, 5, 30)]
        neighbours = [asyncio.create_task(client.generate(request)) for request in company]
        together = await asyncio.gather(*map(client.generate, requests[::-1]))
        await asyncio.gather(*neighbours)
        await flush(client)
        return alone, together[::-1], cached, [await client.generate(request) for request in further[::-1]][::-1]

    alone, together, cached, fresh = on_client(engine, scenario)
    assert sum(result.cached_tokens for result in cached) > 500
    for one, other in [*zip(alone, together, strict=True), *zip(cached, fresh, strict=True)]:
        assert (one.output_ids, one.log_probs) == (other.output_ids, other.log_probs)


@pytest.mark.parametrize("method", ["tensor", "distributed", "disk"])
def test_new_weights_change_what_is_sampled(engine, tokenizer, tmp_path, model_directory, method):
    async def greedy(client):
        return await client.generate(GenerateRequest([5, 6, 7, 8], 12, GREEDY)), await client.weight_version()

    def pushed(sync, model) -> tuple[np.ndarray, np.ndarray]:
        """Log-probs of what the engine samples after a push: its own, and those of ``model``."""
        version = next(versions)
        report = sync.push(markov_policy.buckets(model), version)
        assert report.tensors == len(model.state_dict()) and report.verified_tensors > 10
        assert method != "tensor" or not shared_memory(), "the learner has its memory back"
        result, served = on_client(engine, greedy)
        assert served == version and set(result.weight_versions) == {version}
        return np.array(result.log_probs), hf_log_probs(model, [5, 6, 7, 8], result.output_ids)

    settings = [
        f"weight_sync.method={method}", "weight_sync.verify=true", f"model.path={model_directory}",
        f"trainer.runs_dir={tmp_path}",
    ]  # fmt: skip
    with closing(make_weight_sync(make_config(*settings), [engine.base_url])) as sync:
        for seed in (2, 3):
            sampled, expected = pushed(sync, markov_policy.random_model(tokenizer, seed))
            assert np.abs(sampled - expected).max() < 2e-5
    rounded = make_config(*settings, "weight_sync.round_to=int4")
    with closing(make_weight_sync(rounded, [engine.base_url])) as sync:
        model = markov_policy.random_model(tokenizer, 4)
        sampled, whole = pushed(sync, model)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith("_proj.weight"):
                    weight.copy_(round_to_integers(weight, 4, 32))
        again, expected = pushed(sync, model)
    assert np.abs(sampled - expected).max() < 2e-5 and np.abs(again - expected).max() < 2e-5
    assert np.abs(sampled - whole).max() > 1e-3


def test_push_weights_reuses_its_connection(engine, tokenizer, tmp_path):
    config = load_config(None, ["weight_sync.method=distributed", "rollout.engine.device=cpu"])
    model = markov_policy.random_model(tokenizer, 4)
    for _ in range(2):
        metrics = push_weights(markov_policy.buckets(model), [engine.base_url], next(versions), config).metrics()
    assert metrics["weight_sync/gigabytes"] > 0
    disconnect()


def test_verification_names_the_tensor_that_differs(engine, tokenizer):
    model = markov_policy.random_model(tokenizer, 5)

    class Tampering(TensorWeightSync):
        def _send(self, bucket):
            super()._send([(n, t + 1 if n.endswith("layers.1.mlp.up_proj.weight") else t) for n, t in bucket])

    with (
        Tampering([engine.base_url], timeout_seconds=30, verify=True) as sync,
        pytest.raises(WeightSyncError, match=r"model\.layers\.1\.mlp\.gate_up_proj\.weight"),
    ):
        sync.push(markov_policy.buckets(model), next(versions))
    with (
        TensorWeightSync([engine.base_url], timeout_seconds=30, verify=True) as sync,
        pytest.raises(WeightSyncError, match=r"never sent.*model\.norm\.weight"),
    ):
        weights = [item for item in markov_policy.named_weights(model) if item[0] != "model.norm.weight"]
        sync.push([weights], next(versions))


def test_a_dead_peer_is_a_named_error(engine, tokenizer):
    model = markov_policy.random_model(tokenizer, 5)
    with DistributedWeightSync(["http://127.0.0.1:9", engine.base_url], timeout_seconds=5) as sync:
        began = time.monotonic()
        with pytest.raises(WeightSyncError, match="127.0.0.1:9") as error:
            sync.push(markov_policy.buckets(model), next(versions))
        assert error.value.engines == ("http://127.0.0.1:9",) and time.monotonic() - began < 8


def test_an_engine_left_alone_in_a_rendezvous_serves_again(engine, tokenizer, monkeypatch):
    def fail(*arguments):
        time.sleep(0.5)
        raise RuntimeError("no route to host")

    with monkeypatch.context() as patched:
        patched.setattr(distributed, "_join_group", fail)
        with (
            DistributedWeightSync([engine.base_url], timeout_seconds=60) as sync,
            pytest.raises(WeightSyncError, match="the learner's side: no route to host"),
        ):
            sync.push(markov_policy.buckets(markov_policy.random_model(tokenizer, 5)), next(versions))
    serve(engine, markov_policy.random_model(tokenizer, 5))

    async def greedy(client):
        return await client.generate(GenerateRequest([5, 6, 7], 4, GREEDY))

    assert len(on_client(engine, greedy).output_ids) == 4


def test_weights_may_change_under_a_request(engine, tokenizer):
    """A request in flight is held, goes on with the new weights, and says which token had which."""
    old = serve(engine, table_model(tokenizer, ENDLESS_POLICY))
    prompt = make_prompts(tokenizer, 1)[0].prompt_ids

    async def scenario(client):
        request = GenerateRequest(prompt, 1200, SamplingConfig(n=1))
        call = asyncio.create_task(client.generate(request))
        await asyncio.sleep(0.3)
        new = await asyncio.to_thread(serve, engine, table_model(tokenizer, ENDLESS_POLICY))
        return new, await call

    new, result = on_client(engine, scenario)
    assert len(result.output_ids) == len(result.log_probs) == 1200
    spans = [(version, len(list(run))) for version, run in itertools.groupby(result.weight_versions)]
    assert [version for version, _ in spans] == [old, new] and all(length > 0 for _, length in spans)


def test_abort_returns_what_there_is(engine, tokenizer):
    serve(engine, table_model(tokenizer, ENDLESS_POLICY))
    prompt = make_prompts(tokenizer, 1)[0].prompt_ids

    async def scenario(client):
        ids: list[str] = []
        call = asyncio.create_task(
            client.generate(GenerateRequest(prompt, 3000, SamplingConfig(n=1)), on_start=ids.append)
        )
        await asyncio.sleep(0.3)
        await client.abort(ids[0])
        limited = await client.generate(GenerateRequest(prompt, 3000, SamplingConfig(n=1)), deadline_seconds=0.2)
        return await call, limited, await client.healthy()

    aborted, limited, healthy = on_client(engine, scenario)
    for result in (aborted, limited):
        assert result.finish_reason == "abort" and 0 < len(result.output_ids) == len(result.log_probs) < 3000
    assert healthy


def test_stop_token_is_part_of_the_output(engine, tokenizer):
    serve(engine, table_model(tokenizer, TOOL_POLICY))
    prompt = make_prompts(tokenizer, 1)[0].prompt_ids
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    async def scenario(client):
        request = GenerateRequest(prompt, 500, SamplingConfig(n=1), StopConditions((end,)))
        return await client.generate(request)

    result = on_client(engine, scenario)
    assert (result.finish_reason, result.matched_stop, result.output_ids[-1]) == ("stop", end, end)


def test_stop_strings_end_a_turn_and_lose_no_token(engine, tokenizer):
    model = table_model(tokenizer, markov_policy.RETOOL_POLICY)
    serve(engine, model)
    config = make_config("rollout.multi_turn.format=retool", "rollout.multi_turn.max_assistant_turns=6")
    tools = ScriptedTools()

    async def scenario():
        async with RolloutManager(config, tokenizer, [engine.base_url], tools) as manager:
            return await manager.generate_groups(make_prompts(tokenizer, 4), SamplingConfig(n=4))

    trajectories = [trajectory for group in asyncio.run(scenario()) for trajectory in group]
    assert {t.finish_reason for t in trajectories} <= {FinishReason.STOP, FinishReason.TOOL_LIMIT}
    assert set(map(str, tools.calls)) == {str(("code_interpreter", {"code": "print(6*7)"}))}
    for trajectory in trajectories:
        text = tokenizer.decode(trajectory.response_ids.tolist())
        answered = len(trajectory.tool_calls)
        assert text.count("</code>\n\n<interpreter>\n42\n</interpreter>\n") == answered
        assert text.count("</code>") == answered + (trajectory.finish_reason is FinishReason.TOOL_LIMIT)
        mask = trajectory.loss_mask
        expected = hf_log_probs(model, trajectory.prompt_ids.tolist(), trajectory.response_ids.tolist())
        assert np.abs(trajectory.rollout_log_probs[mask] - expected[mask]).max() < 2e-5
    assert max(len(t.tool_calls) for t in trajectories) >= 2


@pytest.mark.parametrize("room", [1, 5])
def test_the_context_can_be_filled_to_its_last_token(engine, tokenizer, room):
    serve(engine, table_model(tokenizer, ENDLESS_POLICY))

    async def scenario(client):
        return await client.generate(GenerateRequest([5] * (CONTEXT - room), room, GREEDY))

    result = on_client(engine, scenario)
    assert (len(result.output_ids), result.finish_reason) == (room, "length")


def test_a_refused_request_is_a_clear_error(engine, tokenizer):
    async def scenario(client):
        with pytest.raises(EngineRejected, match="context length"):
            await client.generate(GenerateRequest([5] * 5000, 4, GREEDY))

    on_client(engine, scenario)

    async def rollout():
        config = make_config("data.max_response_length=20")
        async with RolloutManager(config, tokenizer, [engine.base_url], ScriptedTools()) as manager:
            await manager.generate_groups([Prompt([5] * 5000, 0)], SamplingConfig(n=2))

    with pytest.raises(RolloutError, match="trajectory 0/.*5000 prompt"):
        asyncio.run(rollout())


def test_partial_rollout_pauses_and_continues_with_new_weights(engine, tokenizer):
    """The first complete group ends the step; the rest is kept and finished in the next one under newer weights."""
    endless = {"\n": {"words": 1.0}, "words": {"words": 1.0}, "word": {"<|im_end|>": 1.0}}
    ending = {"\n": {"words": 1.0}, "words": {"words": 0.9, "<|im_end|>": 0.1}}
    old = serve(engine, table_model(tokenizer, endless))
    config = make_config("rollout.partial.enable=true", "rollout.partial.max_age=1", "data.max_response_length=3000")
    prompts = make_prompts(tokenizer, 7)
    quick_prompt = Prompt([*prompts[0].prompt_ids, markov_policy.single(tokenizer, "word")], 0)

    async def scenario():
        async with RolloutManager(config, tokenizer, [engine.base_url], ScriptedTools()) as manager:
            async with aclosing(manager.stream([quick_prompt, *prompts[1:6]], SamplingConfig(n=2))) as stream:
                async for group in stream:
                    first = group
                    await asyncio.sleep(0.2)
                    break
            paused = len(manager.paused_group_ids)
            # Validation in between must not touch what is paused.
            validation_prompt = Prompt(quick_prompt.prompt_ids, 99)
            validation = [
                g async for g in manager.stream([validation_prompt], ValSamplingConfig(n=1, top_p=1.0), "validation")
            ]
            new = await asyncio.to_thread(serve, engine, table_model(tokenizer, ending))
            second = await manager.generate_groups(prompts[6:7], SamplingConfig(n=2))
            return first, paused, validation, new, second, manager.statistics

    first, paused, validation, new, second, statistics = asyncio.run(scenario())
    assert paused == 5 and statistics.paused_trajectories > 0
    assert [group[0].group_id for group in validation] == [99]
    ids = sorted([first[0].group_id, *(group[0].group_id for group in second)])
    assert ids == list(range(7))
    trajectories = [trajectory for group in second for trajectory in group]
    check(trajectories, tokenizer)
    mixed = [t for t in trajectories if {old, new} == set(t.weight_versions[t.loss_mask].tolist())]
    assert len(mixed) == 10
    for trajectory in mixed:
        assert np.all(np.diff(trajectory.weight_versions[trajectory.loss_mask]) >= 0)
        assert np.all(trajectory.turn_ids[trajectory.loss_mask] == 0)


def test_groups_paused_too_long_are_dropped(engine, tokenizer):
    serve(engine, table_model(tokenizer, ENDLESS_POLICY))
    config = make_config("rollout.partial.enable=true", "rollout.partial.max_age=0", "data.max_response_length=3000")

    async def scenario():
        async with RolloutManager(config, tokenizer, [engine.base_url], ScriptedTools()) as manager:
            stream = manager.stream(make_prompts(tokenizer, 3), SamplingConfig(n=2))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.5)
            await stream.aclose()
            assert len(manager.paused_group_ids) == 3
            assert manager.finish_step() == []
            assert await manager.generate_groups([], SamplingConfig(n=2)) == []
            return len(manager.paused_group_ids), manager.statistics.dropped_trajectories

    assert asyncio.run(scenario()) == (0, 6)


def kill_tree(process: SGLangServer) -> None:
    for pid in [*descendants(process.pid), process.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_no_trajectory_is_lost_when_everything_fails(engine, tokenizer, model_directory, tmp_path):
    """512 trajectories, up to 8 turns: engine and sandbox are killed, connections drop, tools time out or raise."""
    policy = table_model(tokenizer, TOOL_POLICY)
    version = serve(engine, policy)
    config = make_config("rollout.multi_turn.max_assistant_turns=8", "rollout.engine.health_timeout_seconds=5")
    victim = SGLangServer(config.rollout.engine, model_path=model_directory, log_file=tmp_path / "victim.log")
    restarted: list[str] = []

    async def restart(url: str) -> str:
        def bring_back() -> None:
            victim.stop()
            victim.start()
            with TensorWeightSync([victim.base_url], timeout_seconds=30) as sync:
                sync.push(markov_policy.buckets(policy), version)

        await asyncio.to_thread(bring_back)
        restarted.append(victim.base_url)
        return victim.base_url

    async def kill_sandbox(sandbox: SandboxServerProcess, tools: FaultyTools) -> int:
        """Kill it under its calls, and start it again on its port, as a deployment does; the calls on its hands."""
        while tools.answered < 100 or tools.running < 2:
            await asyncio.sleep(0.002)
        unanswered = tools.running
        os.kill(sandbox.pid, signal.SIGKILL)
        while sandbox.is_running():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        sandbox.start()
        return unanswered

    async def scenario(sandbox: SandboxServerProcess):
        victim.start()
        with TensorWeightSync([victim.base_url], timeout_seconds=30) as sync:
            sync.push(markov_policy.buckets(policy), version)
        proxy = UnreliableProxy(engine.base_url, drop_rate=0.05)
        settings = make_config(f"tools.code_interpreter.url={sandbox.url}").tools
        async with (
            proxy as steady,
            ToolRegistry.from_config(settings, ["code_interpreter"]) as registry,
            RolloutManager(
                config,
                tokenizer,
                [steady, victim.base_url],
                tools := FaultyTools(registry, timeout_rate=0.1, error_rate=0.02),
                restart_engine=restart,
            ) as manager,
        ):
            sandbox_death = asyncio.create_task(kill_sandbox(sandbox, tools))
            groups, killed = [], False
            async for group in manager.stream(make_prompts(tokenizer, 64), SamplingConfig(n=8)):
                groups.append(group)
                if not killed and len(groups) >= 2:
                    killed = True
                    kill_tree(victim)
                await asyncio.sleep(0)
            while not restarted:
                await asyncio.sleep(0.1)
            again = await manager.generate_groups(make_prompts(tokenizer, 4), SamplingConfig(n=8))
            alive = [e.url for e in manager.engines.router.engines if e.alive]
            return groups, again, manager.statistics, proxy.dropped, alive, await sandbox_death

    interpreter = CodeInterpreterConfig(workers=4, memory_limit_mb=256, preimport=["math"])
    try:
        with SandboxServerProcess(interpreter, log_file=tmp_path / "sandbox.log") as sandbox:
            groups, again, statistics, dropped, alive, unanswered = asyncio.run(scenario(sandbox))
    finally:
        victim.stop()
    trajectories = [trajectory for group in groups for trajectory in group]
    assert sorted((t.group_id, t.index) for t in trajectories) == [(g, i) for g in range(64) for i in range(8)]
    check(trajectories, tokenizer)
    assert {t.finish_reason for t in trajectories} <= {FinishReason.STOP, FinishReason.TOOL_LIMIT, FinishReason.LENGTH}
    statuses = Counter(call.status for t in trajectories for call in t.tool_calls)
    assert statuses["timeout"] > 10 and statuses["ok"] > 200
    # The calls that the sandbox died under were made again: what failed is what was made to fail.
    assert unanswered >= 2 and 0 < statuses["error"] < 0.05 * sum(statuses.values())
    assert statistics.engines_lost == 1 and dropped > 10
    assert restarted and restarted[0] in alive and len(alive) == 2 and len(again) == 4
    for trajectory in trajectories[:64]:
        expected = hf_log_probs(policy, trajectory.prompt_ids.tolist(), trajectory.response_ids.tolist())
        mask = trajectory.loss_mask
        assert np.abs(trajectory.rollout_log_probs[mask] - expected[mask]).max() < 2e-5


@pytest.mark.slow
def test_tensor_parallel_engine_takes_and_verifies_weights(tokenizer, model_directory, tmp_path):
    config = make_config("rollout.engine.tensor_parallel_size=2").rollout.engine
    with SGLangServer(config, model_path=model_directory, log_file=tmp_path / "engine.log") as process:
        for version, kind in ((1, TensorWeightSync), (2, DistributedWeightSync)):
            model = markov_policy.random_model(tokenizer, 10 + version)
            with kind([process.base_url], timeout_seconds=60, verify=True) as sync:
                assert sync.push(markov_policy.buckets(model), version).verified_tensors > 20

            async def greedy(client):
                return await client.generate(GenerateRequest([5, 6, 7, 8], 12, GREEDY))

            result = on_client(process, greedy)
            expected = hf_log_probs(model, [5, 6, 7, 8], result.output_ids)
            assert np.abs(np.array(result.log_probs) - expected).max() < 2e-5


def test_all_engines_dead_is_an_error_not_a_hang(tokenizer):
    config = make_config("rollout.request_retries=0", "rollout.engine.health_timeout_seconds=1")

    async def scenario():
        async with RolloutManager(config, tokenizer, ["http://127.0.0.1:9"], ScriptedTools()) as manager:
            await manager.generate_groups(make_prompts(tokenizer, 2), SamplingConfig(n=2))

    with pytest.raises(Exception, match="all engines are dead: http://127.0.0.1:9"):
        asyncio.run(scenario())


@pytest.mark.parametrize("timing", ["after_tool_result", "before_tool_result"])
def test_branching_fills_the_budget_with_forks_and_fresh_trajectories(engine, tokenizer, timing):
    # After a tool result the policy hesitates between many words; at first it is sure to call the tool.
    call = markov_policy.CALL
    unsettled = {
        "\n": {call: 0.9, "word": 0.05, "words": 0.05},
        "word": {"word": 0.4, "words": 0.3, "\\boxed{42}": 0.2, call: 0.1},
        "words": {"word": 0.5, "\\boxed{42}": 0.5},
        call: {"<|im_end|>": 1.0},
        "\\boxed{42}": {"<|im_end|>": 1.0},
    }
    version = serve(engine, table_model(tokenizer, unsettled))
    config = make_config(
        "rollout.branching.enable=true",
        "rollout.branching.initial_rollouts=3",
        "rollout.branching.beam_size=2",
        "rollout.branching.entropy_tokens=4",
        f"rollout.branching.timing={timing}",
        "rollout.train.n=8",
        "rollout.engine.random_seed=7",
    )

    async def scenario():
        async with RolloutManager(config, tokenizer, [engine.base_url], ScriptedTools()) as manager:
            groups = await manager.generate_groups(make_prompts(tokenizer, 4), SamplingConfig(n=8))
            validation = await manager.generate_groups(
                make_prompts(tokenizer, 1), ValSamplingConfig(n=2, top_p=1.0), "validation"
            )
            return groups, validation, manager.statistics.forked_trajectories

    groups, validation, forked = asyncio.run(scenario())
    assert [[t.index for t in group] for group in groups] == [list(range(8))] * 4
    assert [len(group) for group in validation] == [2]
    check([t for group in groups for t in group], tokenizer)
    forks = [(group, t) for group in groups for t in group if "branch" in t.reward_info]
    assert len(forks) == forked > 0
    for group, fork in forks:
        branch = fork.reward_info["branch"]
        parent, shared = group[branch["parent"]], branch["shared_tokens"]
        assert parent.index < fork.index and shared > 0
        assert fork.response_ids[:shared].tolist() == parent.response_ids[:shared].tolist()
        assert fork.rollout_log_probs[:shared].tolist() == parent.rollout_log_probs[:shared].tolist()
        assert set(fork.weight_versions[fork.loss_mask].tolist()) == {version}


def probe_config(model_directory):
    return make_config(f"model.path={model_directory}", "learner.dtype=float32")


def test_the_first_sync_s_check_passes_and_leaves_no_trace(engine, tokenizer, model_directory):
    model = markov_policy.random_model(tokenizer, seed=1)
    serve(engine, model)
    metrics = compare(probe_config(model_directory), tokenizer, engine.base_url, model)
    assert metrics["weight_sync/log_prob_difference_max"] < 2e-5

    async def scenario(client):
        text = fixed_text(tokenizer, markov_policy.VOCABULARY, 100)
        return await client.generate(GenerateRequest(text, 1, GREEDY)), await client.score([5, 6])

    after, shortest = on_client(engine, scenario)
    assert after.cached_tokens == 0 and len(shortest) == 1


def test_a_text_is_ranked_as_transformers_does(engine, tokenizer):
    model = markov_policy.random_model(tokenizer, seed=1)
    serve(engine, model)
    text = fixed_text(tokenizer, markov_policy.VOCABULARY, 50)
    ranked = on_client(engine, lambda client: client.rank(text, 3))
    assert ranked.log_probs == pytest.approx(hf_log_probs(model, text[:1], text[1:]).tolist(), abs=2e-5)
    with torch.no_grad():
        expected = model(torch.tensor([text])).logits[0].float().log_softmax(-1).topk(3)
    assert [[token for token, _ in place] for place in ranked.likeliest] == expected.indices.tolist()
    assert np.allclose([[value for _, value in place] for place in ranked.likeliest], expected.values, atol=2e-5)


def test_answers_of_a_form_and_penalties_on_an_engine(engine, tokenizer):
    """Through a served model's gateway: JSON of a schema, a forced call, what the engine refuses, and penalties."""
    serve(engine, markov_policy.random_model(tokenizer, seed=1))
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["n"],
    }
    schema |= {"additionalProperties": False}
    function = {"name": "count", "parameters": schema}
    tools = [{"type": "function", "function": function}, {"type": "function", "function": {"name": "other"}}]
    config = make_config("rollout.val.temperature=1.0", "rollout.val.top_p=1.0")

    async def run():
        pool = EnginePool(SGLangEngine(config), [engine.base_url], config.rollout, RolloutStatistics())
        sampler, door = PoolSampler(pool, RolloutStatistics()), OpenDoor(config, context_length=CONTEXT)
        async with (
            Gateway(sampler, tokenizer, MultiTurnConfig(), door=door, steers=SGLangEngine.steers) as gateway,
            openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="-", max_retries=0) as client,
        ):
            asked = {"model": "m", "messages": [{"role": "user", "content": "How many?"}], "max_tokens": 200}
            form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
            said = await client.chat.completions.create(**asked, response_format=form, n=4, logprobs=True)
            for choice in said.choices:
                if choice.finish_reason == "stop":
                    assert 0 <= json.loads(choice.message.content)["n"] <= 99
                # Log-probs are of the distribution that was sampled: where one token is possible its own is 0.
                assert choice.logprobs.content[0].logprob > -1e-3 or choice.logprobs.content[0].token.strip() == ""
            assert any(choice.finish_reason == "stop" for choice in said.choices)
            for choice in ("required", {"type": "function", "function": {"name": "count"}}):
                said = await client.chat.completions.create(**asked, tools=tools, tool_choice=choice, n=3)
                called = [each.message.tool_calls for each in said.choices if each.finish_reason == "tool_calls"]
                assert called
                if choice != "required":
                    assert all(len(calls) == 1 and calls[0].function.name == "count" for calls in called)
            form["json_schema"]["schema"] = {"type": "object", "properties": 3}
            with pytest.raises(openai.BadRequestError, match="response_format: the engine cannot hold to it"):
                await client.chat.completions.create(**asked, response_format=form)
            texts = []
            for penalty in (0, 2):
                greedy = {"model": "m", "prompt": "word", "max_tokens": 40, "temperature": 0}
                answer = await client.completions.create(**greedy, frequency_penalty=penalty, logprobs=0)
                texts.append(Counter(token for token in answer.choices[0].logprobs.tokens if token))
            assert max(texts[1].values()) < max(texts[0].values())
        await pool.close()

    asyncio.run(run())


def test_the_first_sync_s_check_finds_one_tensor_of_other_weights(engine, tokenizer, model_directory):
    config, model = probe_config(model_directory), markov_policy.random_model(tokenizer, seed=2)
    for name in ("layers.1.mlp.up_proj", "layers.0.self_attn.q_proj", "layers.1.input_layernorm"):
        stale = markov_policy.random_model(tokenizer, seed=1)
        with torch.no_grad():
            stale.model.layers[1].input_layernorm.weight.fill_(0.9)
        serve(engine, stale)
        weights = [item for item in markov_policy.named_weights(model) if name not in item[0]]
        with TensorWeightSync([engine.base_url], timeout_seconds=30) as sync:
            sync.push([weights], next(versions))
        with pytest.raises(LogProbMismatch, match="All of the text is concerned"):
            compare(config, tokenizer, engine.base_url, model)


@pytest.mark.parametrize(("name", "words"), [("lm_head", "output layer"), ("embed_tokens", "embedding")])
def test_the_first_sync_s_check_finds_rows_of_the_vocabulary(engine, tokenizer, model_directory, name, words):
    model, damaged = (markov_policy.random_model(tokenizer, seed=2) for _ in range(2))
    with torch.no_grad():
        for tensor_name, tensor in damaged.named_parameters():
            if name in tensor_name:
                tensor[280:] = 0
    serve(engine, damaged)
    with pytest.raises(LogProbMismatch, match=rf"ids from about 2[78]\d to 318 .* rows of the {words}"):
        compare(probe_config(model_directory), tokenizer, engine.base_url, model)


def test_the_first_sync_s_check_finds_other_rotary_frequencies(engine, tokenizer, model_directory):
    model = markov_policy.random_model(tokenizer, seed=2)
    serve(engine, model)
    config = markov_policy.build_config(tokenizer)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 100_000.0}
    other = Qwen2ForCausalLM(config).eval()
    other.load_state_dict(model.state_dict())
    with pytest.raises(LogProbMismatch, match="It grows with the position|All of the text"):
        compare(probe_config(model_directory), tokenizer, engine.base_url, other)
