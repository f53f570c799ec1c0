from __future__ import annotations

from pathlib import Path

import pytest

from megatron_retool.cluster.allocation import check_allocation, main
from megatron_retool.config import Config, ConfigError, load_config

CONFIGS = Path(__file__).parents[2] / "configs"
APART = ("cluster.placement=disaggregated", "weight_sync.method=distributed")


def config(*overrides: str) -> Config:
    return load_config(CONFIGS / "retool_qwen2.5_32b_8xh200.yaml", overrides)


def test_colocated_counts_shared_gpus_once() -> None:
    allocation = check_allocation(config(), nodes=1)
    assert (allocation.needed_gpus, allocation.gpus, allocation.warnings) == (8, 8, ())
    assert "learner 8 = TP 4 x PP 1 x CP 2 x DP 1, sharing them with 2 engines x TP 4" in allocation.summary()


def test_disaggregated_adds_the_engines() -> None:
    with pytest.raises(ConfigError, match=r"16 GPUs are needed, the allocation has 1 nodes x 8 = 8.*--nodes 2"):
        check_allocation(config(*APART), nodes=1)
    allocation = check_allocation(config(*APART), nodes=2)
    assert allocation.needed_gpus == 16
    assert allocation.config.cluster.nodes == 2
    assert allocation.placement is not None
    assert {slot.node for slot in allocation.placement.slots if slot.role == "engine"} == {1}


def test_a_critic_needs_gpus_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"24 GPUs are needed.*critic 8.*--nodes 3"):
        check_allocation(config(*APART, "algorithm.advantage=gae", "algorithm.dynamic_sampling.enable=false"), nodes=2)


def test_suggested_nodes_follow_the_size_of_a_node() -> None:
    with pytest.raises(ConfigError, match=r"1 nodes x 4 = 4.*--nodes 4"):
        check_allocation(config(*APART), nodes=1, gpus_per_node=4)


def test_idle_gpus_are_reported() -> None:
    (warning,) = check_allocation(config(), nodes=2).warnings
    assert warning.startswith("8 of 16 GPUs stay idle")


def test_tensor_parallelism_over_nodes_is_reported() -> None:
    overrides = ["learner.world_size=16", "learner.tensor_model_parallel_size=16", "learner.context_parallel_size=1"]
    warnings = check_allocation(config(*overrides), nodes=2).warnings
    assert any("learner.tensor_model_parallel_size=16 crosses nodes of 8 GPUs" in warning for warning in warnings)


def test_engine_over_nodes_is_refused() -> None:
    overrides = ["learner.world_size=12", "learner.tensor_model_parallel_size=4", "learner.context_parallel_size=1",
                 "learner.mini_batch_size=48", "data.train_batch_size=48", "rollout.engine.tensor_parallel_size=8",
                 "rollout.engine.count=1", "cluster.placement=disaggregated"]  # fmt: skip
    with pytest.raises(ConfigError, match="engine 0 would have GPUs 12 to 19, 8 a node"):
        check_allocation(config(*overrides), nodes=3)


def test_fine_tuning_needs_the_learner_alone() -> None:
    allocation = check_allocation(config("cluster.placement=disaggregated"), nodes=1, sft=True)
    assert allocation.needed_gpus == 8
    with pytest.raises(ConfigError, match="8 ranks do not spread evenly over 3 nodes"):
        check_allocation(config(), nodes=3, sft=True)
    with pytest.raises(ConfigError, match=r"8 GPUs are needed.*--nodes 2"):
        check_allocation(config(), nodes=1, gpus_per_node=4, sft=True)


def test_gpus_that_the_allocation_lacks() -> None:
    with pytest.raises(ConfigError, match="asks for GPUs and the allocation has none"):
        check_allocation(config(), nodes=1, gpus_per_node=0)
    demo = load_config(CONFIGS / "demo_cpu.yaml")
    assert check_allocation(demo, nodes=2).needed_gpus == 0
    with pytest.raises(ConfigError, match="must be at least 1"):
        check_allocation(demo, nodes=0)


def test_command_prints_values_alone_on_standard_output(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["--config", str(CONFIGS / "demo_cpu.yaml"), "--nodes", "2", "--print", "run_dir,world_size,nodes"]
    assert main([*arguments, f"trainer.runs_dir={tmp_path}"]) == 0
    output, notes = capsys.readouterr()
    assert output.splitlines() == [str(tmp_path / "demo"), "2", "2"]
    assert "2 nodes without GPUs" in notes
    assert main([*arguments, "learner.world_sise=4"]) == 1
    assert "learner.world_size" in capsys.readouterr().err
