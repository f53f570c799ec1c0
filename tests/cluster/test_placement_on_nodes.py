"""Which node each process of a run is bound to."""

from __future__ import annotations

from pathlib import Path

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_retool.cluster.placement import plan_placement
from megatron_retool.config import load_config

CONFIGS = Path(__file__).parents[2] / "configs"


def test_hosts_without_gpus_get_equal_shares() -> None:
    overrides = ["cluster.nodes=2", "learner.world_size=4", "rollout.engine.count=2"]
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
