"""Every process sees the GPUs of its slot, and a process that reads another's memory sees that one's too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megatron_retool.cluster import engine_group, learner_worker
from megatron_retool.cluster.placement import check_weight_sync, plan_placement
from megatron_retool.config import Config, ConfigError, load_config
from megatron_retool.config.cluster import visible_devices
from megatron_retool.registry import ExtensionError
from sglang_rollout.engine import sglang_engine
from sglang_rollout.engine.configured import check_engine

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("gpus", "inherited", "devices"),
    [
        ((4, 5), None, ["4", "5"]),
        ((1, 2), "4,5, 6,7", ["5", "6"]),
        ((1, 0), "GPU-a,GPU-b", ["GPU-b", "GPU-a"]),
        ((), "", []),
    ],
)
def test_places_among_the_nodes_visible_gpus(gpus: tuple[int, ...], inherited: str | None, devices: list[str]) -> None:
    assert visible_devices(gpus, inherited) == devices


@pytest.mark.parametrize("inherited", ["0,1", ""])
def test_fewer_visible_gpus_than_planned_is_said(inherited: str) -> None:
    with pytest.raises(ConfigError, match="GPU 2 of the node.*cluster.gpus_per_node"):
        visible_devices((2,), inherited)


def test_colocated_engines_and_ranks_are_on_the_planned_gpus() -> None:
    placement = plan_placement(load_config(CONFIGS / "retool_qwen2.5_32b_8xh200.yaml"))
    assert [placement.gpus("learner", rank) for rank in range(8)] == [(gpu,) for gpu in range(8)]
    assert [placement.gpus("engine", index) for index in range(2)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    # Ray would give two learner ranks half of one GPU each, and an engine of four GPUs two of them.
    assert placement.learner_options(3)["num_gpus"] == placement.engine_options(1)["num_gpus"] == 0


def test_cuda_ipc_needs_the_sending_ranks_gpu_to_be_visible() -> None:
    config = CONFIGS / "retool_qwen2.5_32b_8xh200.yaml"
    placement = plan_placement(load_config(config))
    # Colocated, each engine's sender is on its own first GPU.
    assert [placement.engine_gpus(index, "tensor") for index in range(2)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    apart = ["cluster.placement=disaggregated", "learner.world_size=4", "learner.context_parallel_size=1"]
    placement = plan_placement(load_config(config, [*apart, "rollout.engine.count=1"]))
    assert placement.engine_gpus(0, "tensor") == (4, 5, 6, 7, 0)
    assert placement.engine_gpus(0, "disk") == (4, 5, 6, 7)


def test_places_are_those_of_the_node() -> None:
    placement = plan_placement(load_config(CONFIGS / "retool_qwen3_30b_a3b_2x8h100.yaml"))
    assert placement.gpus("learner", 9) == (1,)
    assert placement.engine_gpus(3, "disk") == (4, 5, 6, 7)


APART = ["cluster.nodes=4", "cluster.gpus_per_node=8", "cluster.placement=disaggregated"]
TWO_NODES = [*APART, "rollout.engine.count=1", "rollout.engine.tensor_parallel_size=16", "learner.world_size=16"]


def test_an_engine_larger_than_a_node_has_whole_nodes() -> None:
    placement = plan_placement(load_config(None, TWO_NODES))
    assert [(part.node, part.part, len(part.gpus)) for part in placement.parts(0)] == [(2, 0, 8), (3, 1, 8)]
    assert [placement.engine_gpus(0, "distributed", part) for part in (0, 1)] == [tuple(range(8))] * 2
    assert placement.slot("engine", 0).node == 2, "the first one serves"
    assert placement.without_engine(0).nodes_of("engine") == set()
    grown = placement.without_engine(0).with_engine(7, 16, [0, 1, 3, 4])
    assert [part.node for part in grown.parts(7)] == [3, 4]
    with pytest.raises(ConfigError, match="16 GPUs of 2 nodes that no other process is on"):
        grown.with_engine(8, 16, [0, 1, 2, 3, 4])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            ["rollout.engine.tensor_parallel_size=12"],
            "engine 0 would have GPUs 16 to 27, 8 a node.*multiple of cluster",
        ),
        (["learner.world_size=4"], "engine 0 would have GPUs 4 to 19, 8 a node.* and learner.world_size too"),
    ],
)
def test_an_engine_that_cuts_a_node_is_refused(changes: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_placement(load_config(None, [*TWO_NODES, *changes]))


@pytest.mark.parametrize(("placement", "advice"), [("disaggregated", "distributed"), ("colocated", "disk")])
def test_memory_is_not_shared_with_an_engine_on_two_nodes(placement: str, advice: str) -> None:
    config = load_config(None, [*TWO_NODES, f"cluster.placement={placement}", "weight_sync.method=tensor"])
    with pytest.raises(ConfigError, match=f"8 GPUs on each of 2 nodes: set weight_sync.method={advice}"):
        check_weight_sync(config.weight_sync, config.rollout, plan_placement(config))


class EngineOnOneNode(sglang_engine.SGLangEngine):
    """An engine of somebody's own, which says nothing about several nodes."""

    spans = False


def test_an_engine_of_another_kind_says_whether_it_can_be_on_two_nodes() -> None:
    check_engine(load_config(None, TWO_NODES))
    with pytest.raises(ExtensionError, match="above cluster.gpus_per_node=8: lower it"):
        check_engine(load_config(None, [*TWO_NODES, "rollout.engine.backend=tests.cluster.test_gpus:EngineOnOneNode"]))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(learner_worker, "redirect_output", lambda path: None)
    monkeypatch.setattr(engine_group, "redirect_output", lambda path: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    for name in learner_worker.GPU_ENVIRONMENT | learner_worker.BROADCAST_ENVIRONMENT:
        # Set and removed again, so that the test's end removes what the worker sets.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return load_config(None, [f"trainer.runs_dir={tmp_path}"])


def test_a_rank_sees_its_gpu_and_speaks_nccl_as_engines_do(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")  # the user's own setting
    learner_worker.LearnerWorker(config, "learner", 2, (2,))
    expected = {"CUDA_VISIBLE_DEVICES": "6", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "1"}
    assert {name: os.environ[name] for name in expected} == expected
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_a_rank_that_shares_no_group_with_engines_keeps_nvlink_sharp(tmp_path: Path, config: Config) -> None:
    tensor = load_config(None, [f"trainer.runs_dir={tmp_path}", "weight_sync.method=tensor"])
    learner_worker.LearnerWorker(tensor, "learner", 2, (2,))
    assert "NCCL_NVLS_ENABLE" not in os.environ and "NCCL_CUMEM_ENABLE" not in os.environ
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_a_rank_whose_gpu_is_not_there_does_not_turn_to_the_cpu(config: Config) -> None:
    worker = learner_worker.LearnerWorker(config, "learner", 2, (2,))
    with pytest.raises(ConfigError, match="rank 2 is planned on GPU 2.*CUDA_VISIBLE_DEVICES=6"):
        worker.setup(("127.0.0.1", 1), 1)


def test_a_rank_without_gpus_leaves_the_environment_alone(config: Config) -> None:
    learner_worker.LearnerWorker(config, "learner", 0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6,7" and "NCCL_CUMEM_ENABLE" not in os.environ


def test_an_engine_gets_its_gpus_by_name(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, Any] = {}

    class Process:
        base_url = "http://127.0.0.1:1"

        def __init__(self, settings: Any, **options: Any) -> None:
            started.update(options)

        def start(self) -> None: ...

    monkeypatch.setattr(sglang_engine, "SGLangServer", Process)
    engine_group.EngineWorker(config, 1, False, True, (2, 3, 0)).start("model")
    assert started["gpu_ids"] == ["6", "7", "4"]
    engine_group.EngineWorker(config, 1, False, True).start("model")
    assert started["gpu_ids"] is None
