"""Engines of a run whose Ray gets a second node, and loses it again."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from rich.console import Console

from megatron_retool.cluster.engine_group import EngineGroup
from megatron_retool.cluster.engine_weights import EngineWeights
from megatron_retool.cluster.gpu_phases import GpuPhases
from megatron_retool.cluster.placement import plan_placement
from megatron_retool.config import load_config
from megatron_retool.monitor.metrics import StepTimer

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


def test_an_engine_goes_to_a_node_that_joined_and_ends_with_it(nodes: Cluster, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = [
        "rollout.engine.backend=transformers", "rollout.engine.count=1", "weight_sync.method=distributed",
        "cluster.gpus_per_node=0", f"trainer.runs_dir={tmp_path}",
    ]  # fmt: skip
    config = load_config(None, settings)
    said = io.StringIO()

    async def node_of(group: EngineGroup, number: int) -> str:
        worker: Any = group._workers[number]
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


async def _nothing(url: str, new_url: str) -> None:
    return None
