"""The policy's adapter on its way into real engines, against peft; and what its clients sample with meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2ForCausalLM

from megatron_retool.config import Config, load_config
from sglang_rollout.engine.base import EngineRejected, GenerateRequest, StopConditions
from sglang_rollout.engine.client import SGLangClient
from sglang_rollout.engine.policy_adapter import PolicyAdapter
from sglang_rollout.engine.process import SGLangServer
from sglang_rollout.engine.sglang_engine import SGLangEngine
from sglang_rollout.engine.weight_sync import adapter as adapter_module
from sglang_rollout.engine.weight_sync.errors import WeightSyncError
from sglang_rollout.engine.weight_sync.tensor import TensorWeightSync
from tests.kit import markov_policy
from tests.sglang_rollout.engine.test_engine_adapters import BOUND, GREEDY, PROMPT, difference, expected, write_adapter

PREFIX = "base_model.model."


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """base, a model, and adapters of rank 8: one and two."""
    root = tmp_path_factory.mktemp("adapter_sync")
    markov_policy.save(markov_policy.random_model(tokenizer, seed=1), tokenizer, root / "base")
    for seed, name in enumerate(("one", "two")):
        write_adapter(root, name, 8, seed)
    return root


def config_of(directory: Path, *overrides: str) -> Config:
    settings = [
        f"model.path={directory}/base", f"trainer.runs_dir={directory}", "learner.lora.rank=8", "learner.lora.alpha=16",
        "learner.lora.sync=adapter", "rollout.engine.device=cpu", "rollout.engine.dtype=float32",
        "rollout.engine.max_total_tokens=16384", "weight_sync.timeout_seconds=60",
    ]  # fmt: skip
    return load_config(None, [*settings, *overrides])


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[SGLangServer]:
    engine = SGLangEngine(config_of(directory))
    started = engine.server(
        0, model_path=str(directory / "base"), host="127.0.0.1", log_file=directory / "engine.log", tokenizer=False,
        weights_from_sync=True, gpu_ids=None,
    )  # fmt: skip
    with started:
        yield started


def buckets(directory: Path, name: str) -> list[list[tuple[str, torch.Tensor]]]:
    factors = load_file(directory / name / "adapter_model.safetensors")
    return [[(key.removeprefix(PREFIX), factor)] for key, factor in factors.items()]


def push(engine: SGLangEngine, url: str, directory: Path, name: str, version: int) -> Any:
    sync = engine.weight_sync([url])
    try:
        return sync.push(buckets(directory, name), version)
    finally:
        sync.close()


def with_client(engine: SGLangEngine, url: str, scenario: Callable[[SGLangClient], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with engine.client(url) as client:
            return await scenario(client)

    return asyncio.run(run())


@pytest.mark.parametrize(
    "overrides", [["method=tensor"], ["method=disk"], ["method=distributed"], ["method=tensor", "verify=true"]]
)
def test_engines_compute_the_version_that_they_were_sent(
    server: SGLangServer, directory: Path, overrides: list[str]
) -> None:
    engine, url = SGLangEngine(config_of(directory, *(f"weight_sync.{each}" for each in overrides))), server.base_url
    report = push(engine, url, directory, "one", 3)
    assert report.version == 3 and report.tensors == 28
    assert report.bytes == sum(tensor.nbytes for bucket in buckets(directory, "one") for _, tensor in bucket)
    assert report.verified_tensors == (28 if "verify=true" in overrides else 0)
    assert not list(directory.rglob("adapter-*"))

    async def scenario(client: SGLangClient) -> Any:
        before = await client.score(PROMPT)
        await engine.serve(3, [url])
        return before, await client.score(PROMPT), await client.weight_version()

    before, after, version = with_client(engine, url, scenario)
    assert version == 3
    assert difference(before, expected(directory, None, PROMPT)) < BOUND
    assert difference(after, expected(directory, "one", PROMPT)) < BOUND
    # The same version with other factors, as after a learner that went back to an earlier step.
    push(engine, url, directory, "two", 3)
    assert (
        difference(with_client(engine, url, lambda client: client.score(PROMPT)), expected(directory, "two", PROMPT))
        < BOUND
    )
    push(engine, url, directory, "one", 4)
    with_client(engine, url, lambda client: engine.serve(4, [url]))
    with_client(engine, url, lambda client: client.unload_adapter("policy@4"))
    with pytest.raises(EngineRejected, match="policy@3"):
        with_client(engine, url, lambda client: client.score(PROMPT, adapter="policy@3"))


def test_a_request_ends_on_its_version_while_the_next_one_takes_the_newest(
    server: SGLangServer, directory: Path
) -> None:
    engine, url = SGLangEngine(config_of(directory, "weight_sync.method=tensor")), server.base_url
    push(engine, url, directory, "one", 10)
    endless = StopConditions(end_of_sequence=False)

    async def scenario(client: SGLangClient) -> Any:
        await engine.serve(10, [url])
        running = asyncio.create_task(client.generate(GenerateRequest(PROMPT, 1500, GREEDY, endless)))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(push, engine, url, directory, "two", 11)
        await engine.serve(11, [url])
        assert not running.done()
        after = await client.generate(GenerateRequest(PROMPT, 8, GREEDY, endless))
        # In use: it stays.
        await client.score(PROMPT, adapter="policy@10")
        before = await running
        await asyncio.to_thread(push, engine, url, directory, "two", 12)
        await engine.serve(12, [url])
        for version in (10, 11):
            with pytest.raises(EngineRejected, match=f"policy@{version}"):
                await client.score(PROMPT, adapter=f"policy@{version}")
        await client.unload_adapter("policy@12")
        return before, after

    before, after = with_client(engine, url, scenario)
    assert before.weight_versions == [10] * 1500 and after.weight_versions == [11] * 8
    for answer, name in ((before, "one"), (after, "two")):
        wanted = expected(directory, name, [*PROMPT, *answer.output_ids])
        assert difference(answer.log_probs, wanted[len(PROMPT) - 1 :]) < BOUND


def test_an_engine_that_came_back_without_the_adapter_serves_its_model(server: SGLangServer, directory: Path) -> None:
    engine, url = SGLangEngine(config_of(directory)), server.base_url
    with_client(engine, url, lambda client: engine.serve(20, [url]))
    engine.restarted(url)
    answer = with_client(engine, url, lambda client: client.generate(GenerateRequest(PROMPT, 8, GREEDY)))
    assert 20 not in answer.weight_versions
    wanted = expected(directory, None, [*PROMPT, *answer.output_ids])
    assert difference(answer.log_probs, wanted[len(PROMPT) - 1 :]) < BOUND


def test_an_adapter_that_does_not_fit_names_the_engine(server: SGLangServer, directory: Path) -> None:
    for method in ("tensor", "distributed"):
        sync = SGLangEngine(config_of(directory, f"weight_sync.method={method}")).weight_sync([server.base_url])
        wrong = [[(name, tensor[:, 1:])] for ((name, tensor),) in buckets(directory, "one")]
        with pytest.raises(WeightSyncError, match="does not fit the model: .* has shape") as raised:
            sync.push(wrong, 30)
        assert raised.value.engines == (server.base_url,)
        with pytest.raises(WeightSyncError, match="there was no adapter to send"):
            sync.push([], 30)
        sync.close()


def test_files_are_for_engines_of_this_node(
    server: SGLangServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_module, "is_local", lambda url: False)
    engine, url = SGLangEngine(config_of(directory, "weight_sync.method=tensor")), server.base_url
    with pytest.raises(WeightSyncError, match="is on another host: use weight_sync.method=distributed"):
        push(engine, url, directory, "one", 40)


def test_versions_go_when_no_request_uses_them() -> None:
    policy = PolicyAdapter()
    with policy.used_at("a") as version:
        assert version is None
    policy.serve(1, ["a", "b"])
    with policy.used_at("a") as first, policy.used_at("b"):
        assert first == 1
        policy.serve(2, ["a"])
        with policy.used_at("a") as second, policy.used_at("b") as elsewhere:
            # b has not got it.
            assert (second, elsewhere) == (2, None)
        assert policy.take_unused("a") == [] == policy.take_unused("b")
    assert policy.take_unused("a") == [1] and policy.take_unused("a") == []
    policy.serve(2, ["b"])
    assert policy.take_unused("b") == [1]
    policy.restarted("b")
    with policy.used_at("b") as version:
        assert version is None


def test_an_engine_gets_room_for_the_policys_adapter_where_a_learner_sends_it(directory: Path) -> None:
    def command(weights_from_sync: bool, *overrides: str) -> list[str]:
        engine = SGLangEngine(config_of(directory, "cluster.placement=colocated", *overrides))
        server = engine.server(
            0, model_path=str(directory / "base"), host="127.0.0.1", log_file=directory / "log", tokenizer=False,
            weights_from_sync=weights_from_sync, gpu_ids=None,
        )  # fmt: skip
        assert server.weights_stay == (
            "--enable-lora" in server.command() and "learner.lora.sync=merged" not in overrides
        )
        return server.command()

    def rank(arguments: list[str]) -> str:
        return arguments[arguments.index("--max-lora-rank") + 1]

    assert rank(command(True)) == "8" and "--enable-lora" not in command(False)
    assert "--enable-lora" not in command(True, "learner.lora.sync=merged")
    larger = (
        "rollout.engine.adapters.max_rank=32",
        "rollout.engine.adapters.targets=[mlp]",
        "learner.lora.targets=[attention]",
    )
    both = command(True, *larger)
    assert rank(both) == "32" and {"q_proj", "down_proj"} <= set(both)


@pytest.mark.slow
def test_one_message_is_for_all_ranks_of_an_engine(directory: Path, tmp_path: Path) -> None:
    size = "rollout.engine.tensor_parallel_size=2"
    engine = SGLangEngine(config_of(directory, size, "weight_sync.method=distributed", "weight_sync.verify=true"))
    server = engine.server(
        0, model_path=str(directory / "base"), host="127.0.0.1", log_file=tmp_path / "engine.log", tokenizer=False,
        weights_from_sync=True, gpu_ids=None,
    )  # fmt: skip
    with server:
        push(engine, server.base_url, directory, "one", 1)
        with_client(engine, server.base_url, lambda client: engine.serve(1, [server.base_url]))
        found = with_client(engine, server.base_url, lambda client: client.score(PROMPT))
        assert difference(found, expected(directory, "one", PROMPT)) < BOUND
        # Without adapters, weights go to each rank as before.
        with TensorWeightSync([server.base_url], timeout_seconds=60) as sync:
            model = Qwen2ForCausalLM.from_pretrained(directory / "base", dtype=torch.float32)
            sync.push(markov_policy.buckets(model), 2)
