"""Which node each process of a run is bound to."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from megatron_retool.cluster.placement import check_weight_sync, plan_placement
from megatron_retool.config import ConfigError, load_config

CONFIGS = Path(__file__).parents[2] / "configs"


def test_hosts_without_gpus_get_equal_shares() -> None:
    overrides = ["cluster.nodes=2", "learner.world_size=4", "rollout.engine.count=2", "weight_sync.method=distributed"]
    placement = plan_placement(load_config(CONFIGS / "demo_cpu.yaml", overrides))
    nodes = {(slot.role, slot.rank): slot.node for slot in placement.slots}
    assert [nodes["learner", rank] for rank in range(4)] == [0, 0, 1, 1]
    assert [nodes["engine", index] for index in range(2)] == [0, 1]


def test_processes_are_bound_to_the_nodes_of_their_slots() -> None:
    config = load_config(CONFIGS / "retool_qwen3_30b_a3b_2x8h100.yaml")
    plan = plan_placement(config)
    assert "scheduling_strategy" not in plan.learner_options(0)
    first, second = "0a" * 28, "0b" * 28  # Ray checks the form of an id
    placement = plan.on_nodes([first, second])
    for options, node in (
        (placement.learner_options(7), first),
        (placement.learner_options(8), second),
        (placement.engine_options(1), first),
        (placement.engine_options(2), second),
    ):
        strategy = options["scheduling_strategy"]
        assert isinstance(strategy, NodeAffinitySchedulingStrategy)
        assert (strategy.node_id, strategy.soft) == (node, False)


def test_every_node_has_a_sandbox_that_the_table_shows() -> None:
    plan = plan_placement(load_config(CONFIGS / "retool_qwen3_30b_a3b_2x8h100.yaml"))
    placement = plan.on_nodes(["0a" * 28, "0b" * 28])
    for node in (0, 1):
        options = placement.sandbox_options(node)
        assert options["scheduling_strategy"].node_id == placement.node_ids[node] and not options["num_gpus"]
    output = io.StringIO()
    Console(file=output).print(placement.table())
    rows = [line.split() for line in output.getvalue().splitlines() if "sandbox" in line]
    assert [(row[3], row[5]) for row in rows] == [("0", "0"), ("1", "1")]


@pytest.mark.parametrize(
    "override", ["tools.code_interpreter.url=http://elsewhere:8080", "rollout.multi_turn.tools=[]"]
)
def test_no_sandbox_is_started_where_none_is_needed(override: str) -> None:
    assert plan_placement(load_config(CONFIGS / "retool_qwen3_30b_a3b_2x8h100.yaml", [override])).sandboxes == ()


@pytest.mark.parametrize(
    ("overrides", "advice"),
    [
        (["weight_sync.method=tensor", "learner.world_size=8", "learner.expert_model_parallel_size=4"],
         "engine 2 would be on node 1, where no learner rank is.*weight_sync.method=disk"),
        (["weight_sync.method=distributed"], "no two processes on one GPU.*weight_sync.method=tensor"),
        (["weight_sync.method=tensor", "cluster.placement=disaggregated", "cluster.nodes=4"],
         "engine 0 would be on node 2.*weight_sync.method=distributed"),
    ],
)  # fmt: skip
def test_weight_sync_that_cannot_reach_an_engine_is_refused(overrides: list[str], advice: str) -> None:
    config = load_config(CONFIGS / "retool_qwen3_30b_a3b_2x8h100.yaml", overrides)
    with pytest.raises(ConfigError, match=advice):
        check_weight_sync(config.weight_sync, config.rollout, plan_placement(config))


@pytest.mark.parametrize("path", [CONFIGS / "demo_cpu.yaml", *sorted(CONFIGS.glob("retool_*.yaml"))])
def test_weight_sync_of_shipped_configurations_reaches_every_engine(path: Path) -> None:
    config = load_config(path)
    check_weight_sync(config.weight_sync, config.rollout, plan_placement(config))


@pytest.mark.parametrize(
    ("overrides", "senders"),
    [
        # Colocated, two engines of four GPUs on each of two nodes: the rank on each engine's first GPU.
        ([], [0, 4, 8, 12]),
        # Side by side on one node: the first rank of that node.
        (["cluster.placement=disaggregated", "cluster.nodes=1", "learner.world_size=4", "rollout.engine.count=1",
          "learner.pipeline_model_parallel_size=1", "learner.expert_model_parallel_size=4"], [0]),
        # Without GPUs: the first rank of the engine's node.
        (["cluster.gpus_per_node=0", "learner.world_size=4", "learner.expert_model_parallel_size=2",
          "learner.context_parallel_size=1", "rollout.engine.tensor_parallel_size=1"], [0, 0, 2, 2]),
    ],
)  # fmt: skip
def test_an_engine_gets_its_weights_from_a_rank_beside_it(overrides: list[str], senders: list[int]) -> None:
    config = load_config(CONFIGS / "retool_qwen3_30b_a3b_2x8h100.yaml", overrides)
    placement = plan_placement(config)
    assert [placement.sender(index, "tensor") for index in range(len(senders))] == senders
    assert {placement.sender(index, "disk") for index in range(len(senders))} == {0}


def test_an_added_engine_takes_gpus_that_are_free() -> None:
    settings = ["cluster.placement=disaggregated", "cluster.nodes=3", "weight_sync.method=distributed"]
    config = load_config(CONFIGS / "retool_qwen3_30b_a3b_2x8h100.yaml", [*settings, "rollout.engine.count=1"])
    plan = plan_placement(config)
    size = len(plan.slot("engine", 0).gpus)
    count = sum(slot.role == "engine" for slot in plan.slots)
    grown, number = plan, count
    while True:
        try:
            grown = grown.with_engine(number, size, [0, 1, 2, 3])
        except ConfigError as error:
            assert "the nodes that weight_sync.method reaches (4 of 8 GPUs) do not have them free" in str(error)
            break
        number += 1
    taken = [gpu for slot in grown.slots for gpu in slot.gpus]
    assert sorted(taken) == list(range(32)) and number > count
    assert all(slot.gpus[0] // 8 == slot.gpus[-1] // 8 == slot.node for slot in grown.slots)
    freed = grown.without_engine(0).with_engine(99, size, [0, 1, 2, 3])
    assert freed.slot("engine", 99).gpus == plan.slot("engine", 0).gpus


def test_an_engine_on_a_host_without_gpus_goes_where_the_fewest_are() -> None:
    settings = ["cluster.nodes=2", "learner.world_size=2", "rollout.engine.count=1", "weight_sync.method=distributed"]
    plan = plan_placement(load_config(CONFIGS / "demo_cpu.yaml", settings))
    grown = plan.with_engine(1, 1, [0, 1, 2]).with_engine(2, 1, [0, 1, 2])
    assert [grown.slot("engine", number).node for number in range(3)] == [0, 1, 2]
    assert grown.nodes_of("learner") == {0, 1}


def test_engines_that_share_the_learners_gpus_stay_as_they_are() -> None:
    plan = plan_placement(load_config(CONFIGS / "retool_qwen3_30b_a3b_2x8h100.yaml"))
    with pytest.raises(ConfigError, match=r"take turns on the same GPUs \(cluster.placement=colocated\)"):
        plan.with_engine(9, 1, [0, 1])
