"""Engines of a run whose Ray gets a second node, and loses it again; and an engine that is on two nodes."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from rich.console import Console

from megatron_retool.cluster.engine_group import EngineGroup
from megatron_retool.cluster.engine_weights import EngineWeights
from megatron_retool.cluster.gpu_phases import GpuPhases
from megatron_retool.cluster.placement import Placement, Slot, plan_placement
from megatron_retool.config import load_config
from megatron_retool.runs.step_timer import StepTimer
from sglang_rollout.engine.client import SGLangClient
from sglang_rollout.engine.weight_sync.push import make_weight_sync
from tests.kit.tiny_models import hf_model

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    cluster = Cluster()
    try:
        soon = {
            "health_check_initial_delay_ms": 500,
            "health_check_period_ms": 500,
            "health_check_failure_threshold": 4,
        }
        cluster.add_node(num_cpus=4, node_name="first", _system_config=soon, include_dashboard=False)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
def test_an_engine_goes_to_a_node_that_joined_and_ends_with_it(nodes: Cluster, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = [
        "rollout.engine.backend=transformers", "rollout.engine.count=1", "weight_sync.method=distributed",
        "cluster.gpus_per_node=0", f"trainer.runs_dir={tmp_path}",
    ]  # fmt: skip
    config = load_config(None, settings)
    said = io.StringIO()

    async def node_of(group: EngineGroup, number: int) -> str:
        worker: Any = group._workers[number][0]
        return str(await worker.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))

    async def scenario() -> None:
        group = EngineGroup(config, plan_placement(config))
        weights = EngineWeights(
            group,
            str(tmp_path),
            None,
            GpuPhases(False, list, list),
            _nothing,
            StepTimer(),
            Console(file=said, width=300),
        )
        try:
            await group.start(str(tmp_path))
            assert await weights.add() == 1
            own = ray.get_runtime_context().get_node_id()
            assert [await node_of(group, number) for number in (0, 1)] == [own, own]
            second = nodes.add_node(num_cpus=4, node_name="second")
            assert await weights.add() == 2
            assert group.place(2).node == 1 and await node_of(group, 2) != own
            await weights.remove(0)
            assert sorted(group.by_number) == [1, 2]
            nodes.remove_node(second)
            assert await weights.restart(group.url(2)) is None
            assert list(group.by_number) == [1]
            assert await weights.add() == 3 and await node_of(group, 3) == own
        finally:
            await group.stop()

    asyncio.run(scenario())
    assert "does not start again, the run continues with 1 engine" in said.getvalue()


@pytest.mark.rare
def test_an_engine_on_two_nodes_computes_takes_weights_and_comes_back(nodes: Cluster, tmp_path: Path) -> None:
    second = nodes.add_node(num_cpus=4, node_name="second")
    ids = [ray.get_runtime_context().get_node_id(), second.node_id]
    model = hf_model("qwen2", tie_word_embeddings=False, intermediate_size=128)
    model.save_pretrained(tmp_path / "model")
    config = load_config(None, [
        f"model.path={tmp_path / 'model'}", "rollout.engine.count=1", "rollout.engine.tensor_parallel_size=2",
        "rollout.engine.dtype=float32", "rollout.engine.max_total_tokens=2048", "cluster.nodes=2",
        "weight_sync.method=distributed", "weight_sync.verify=true", f"trainer.runs_dir={tmp_path}",
    ])  # fmt: skip
    slots = tuple(Slot("engine", 0, node, (), node) for node in (0, 1))
    group = EngineGroup(config, Placement(slots, 0, False).on_nodes(ids))
    tokens = torch.arange(3, 40)

    async def scored() -> list[float]:
        async with SGLangClient(group.url(0)) as client:
            return await client.score(tokens.tolist())

    def expected() -> torch.Tensor:
        log_probs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        return log_probs.gather(-1, tokens[1:, None])[:, 0].detach()

    async def scenario() -> None:
        try:
            await group.start(config.model.path)
            assert group.place(0).node == 0
            torch.testing.assert_close(torch.tensor(await scored()), expected(), atol=1e-4, rtol=0)
            for version, method in enumerate(("distributed", "sharded", "disk"), start=1):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.1)
                changed = replace(config, weight_sync=replace(config.weight_sync, method=method))
                with closing(make_weight_sync(changed, group.urls)) as sync:
                    await asyncio.to_thread(sync.push, [list(model.state_dict().items())], version)
                torch.testing.assert_close(torch.tensor(await scored()), expected(), atol=1e-4, rtol=0)
            other = group._workers[0][1]
            await other.stop.remote()
            for _ in range(100):
                if not await group._workers[0][0].is_alive.remote():
                    break
                await asyncio.sleep(0.2)
            else:
                raise AssertionError("the engine's first part waits for the second one")
            await group.restart(0, config.model.path)
            assert len(await scored()) == len(tokens) - 1
        finally:
            await group.stop()

    asyncio.run(scenario())


async def _nothing(url: str, new_url: str) -> None:
    return None
