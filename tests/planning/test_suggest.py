"""What does not fit is named with a cure that works, and suggestions are configurations that run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_retool.cluster.allocation import check_allocation
from megatron_retool.cluster.placement import plan_placement
from megatron_retool.config import Config, load_config
from megatron_retool.planning.hardware import GIB, parse_machines
from megatron_retool.planning.memory_plan import SLEEPING_ENGINE_BYTES, MemoryPlan, plan_memory
from megatron_retool.planning.models import resolve_architecture
from megatron_retool.planning.suggest import HEADROOM, Planner, overrides_of, vary
from megatron_retool.planning.workload import workload_of

DENSE = "configs/retool_qwen2.5_32b_8xh200.yaml"
EXPERTS = "configs/retool_qwen3_30b_a3b_2x8h100.yaml"

RECOMPUTING_ALL = (
    "learner.max_tokens_per_micro_batch=36864",
    "learner.recompute.method=uniform",
    "learner.recompute.num_layers=1",
)


def planner(file: str, gpus: str, *overrides: str) -> Planner:
    config = load_config(file, overrides)
    _, architecture = resolve_architecture(config.model, config.demo)
    return Planner(config, architecture, parse_machines(gpus), workload_of(config))


def memory(plan: Planner, config: Config | None = None) -> MemoryPlan:
    config = config or plan.config
    layout = config.learner.layout(plan.architecture)
    return plan_memory(config, plan.architecture, layout, plan.machines, plan.workload)


RECIPES = {
    "qwen3_0.6b_1x24gb": ["RTX4090x1", "L4x1"],
    "qwen3_1.7b_1x80gb": ["H100x1", "A100x1"],
    "qwen3_4b_lora_1x24gb": ["RTX4090x1"],
    "qwen2.5_32b_lora_2x80gb": ["H100x2", "A100x2"],
    "qwen3_14b_8x80gb": ["H100x8", "A100x8"],
    "qwen3_30b_a3b_8x80gb": ["H100x8", "A100x8"],
    "qwen2.5_32b_8xh200": ["H200x8"],
    "qwen2.5_32b_2x8h100": ["H100x16"],
    "qwen3_30b_a3b_2x8h100": ["H100x16"],
    "qwen3_30b_a3b_64k_2x8h100": ["H100x16"],
    "qwen3_4b_128k_8xh200": ["H200x8"],
    "qwen2.5_72b_16x8h100": ["H100x128"],
    "qwen3_235b_a22b_16x8h100": ["H100x128"],
}


@pytest.mark.parametrize(("name", "machines"), RECIPES.items())
def test_the_recipes_fit_the_machines_they_are_for(name: str, machines: list[str]) -> None:
    file = f"configs/retool_{name}.yaml"
    plan_placement(load_config(file))
    for gpus in machines:
        plan = planner(file, gpus)
        assert check_allocation(plan.config, plan.machines.nodes).gpus == plan.machines.count
        found = memory(plan)
        assert found.problems == () and found.fits
        assert found.learner_needed < 0.92 * found.capacity  # what a plan cannot know has room
        assert found.concurrent >= min(64, plan.config.rollout.max_concurrent_trajectories)
        # States wait in host memory while the colocated engine works.
        assert found.host_bytes_per_node < 800 * GIB


def test_the_engines_graphs_and_routed_experts_have_their_places() -> None:
    plan = planner(EXPERTS, "H100x16")
    found, alone = memory(plan), memory(plan, vary(plan.config, learner__routing_replay="none"))
    assert found.learner_needed - found.learner.total == SLEEPING_ENGINE_BYTES + found.engine_graphs
    # 1.47 M tokens of cache on each of 8 GPUs of a node.
    assert found.experts_host_bytes_per_node == found.cache_tokens * 48 * 8 * 4 * 8
    assert found.experts_host_bytes_per_node == pytest.approx(16.8 * GIB, rel=0.01)
    assert alone.experts_host_bytes_per_node == 0


def test_every_recipe_is_planned() -> None:
    planned = {f"retool_{name}.yaml" for name in RECIPES}
    assert planned == {path.name for path in Path("configs").glob("retool_*.yaml")}


def test_the_dense_recipe_does_not_fit_smaller_gpus_and_every_cure_makes_it_fit() -> None:
    plan = planner(DENSE, "H100x16", *RECOMPUTING_ALL)
    found = memory(plan)
    assert not found.fits
    assert "the learner does not fit" in str(found.problems[0])
    assert "97.4 GiB needed, 79.6 GiB available" in str(found.problems[0])
    cures = plan.cures()
    assert cures
    assert [cure.seconds for cure in cures] == sorted(cure.seconds for cure in cures)
    for cure in cures:
        overrides = overrides_of(cure.changes)
        assert memory(plan, load_config(DENSE, [*RECOMPUTING_ALL, *overrides])).fits
    texts = [" ".join(overrides_of(cure.changes)) for cure in cures]
    assert "learner.optimizer.cpu_offload=true learner.optimizer.use_precision_aware_optimizer=false" in texts
    assert any("learner.world_size=16" in text and "pipeline" in text for text in texts)
    few = planner(DENSE, "H200x8", "learner.max_tokens_per_micro_batch=36864", "learner.recompute.num_layers=1")
    assert not memory(few).fits
    again = {"learner__recompute__method": "uniform", "learner__recompute__num_layers": 1}
    assert any(again.items() <= cure.changes.items() for cure in few.cures())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["learner.max_tokens_per_micro_batch=16384"], "less than the longest sequence of 18,432 tokens"),
        (["weight_sync.bucket_bytes=60000000000"], "do not fit beside the engine's weights"),
        (["learner.recompute.num_layers=65"], "num_layers=65 is more than the 64 layers of a pipeline stage"),
        (["rollout.engine.mem_fraction_static=0.1"], "weights do not fit into mem_fraction_static"),
        (["rollout.engine.mem_fraction_static=0.112"], "less than one longest trajectory"),
        (["rollout.engine.mem_fraction_static=0.99"], "no room for the sleeping learner"),
        (["rollout.engine.count=3"], "12 GPUs are needed (colocated), 8 are there"),
        (["cluster.placement=disaggregated"], "8 learner + 8 engine GPUs = 16 are needed, 8 are there"),
        (
            ["rollout.engine.tensor_parallel_size=12", "rollout.engine.count=1"],
            "neither inside a node of 8 GPUs",
        ),
    ],
)
def test_every_kind_of_misfit_is_named(overrides: list[str], message: str) -> None:
    found = memory(planner(DENSE, "H200x8", *overrides))
    assert any(message in str(problem) for problem in found.problems), found.problems


@pytest.mark.parametrize(("file", "gpus"), [(DENSE, "H200x8"), (DENSE, "H100x16"), (EXPERTS, "H100x16")])
def test_suggestions_are_valid_fit_and_are_no_slower_than_the_recipe(file: str, gpus: str) -> None:
    plan = planner(file, gpus)
    found = plan.suggestions()
    assert len(found) == 5
    assert [candidate.seconds for candidate in found] == sorted(candidate.seconds for candidate in found)
    for candidate in found:
        config = load_config(file, overrides_of(candidate.changes))
        assert memory(plan, config).fits
        assert memory(plan, config).learner_needed <= (1 - HEADROOM) * plan.machines.accelerator.memory_bytes
        layout = config.learner.layout(plan.architecture)
        assert layout == candidate.layout
        # What the cluster would make of it.
        assert len(plan_placement(config).slots) == config.learner.world_size + config.rollout.engine.count
    own = plan.candidate({})
    if own is not None:
        assert found[0].seconds <= own.seconds * 1.02


@pytest.mark.slow
def test_a_model_that_no_node_holds_gets_engines_of_several() -> None:
    file = "configs/retool_qwen3_235b_a22b_16x8h100.yaml"
    config = load_config(file)
    _, architecture = resolve_architecture(config.model, config.demo)
    plan = Planner(config, architecture, parse_machines("H100x128", per_node=4), workload_of(config))
    found = plan.suggestions()
    assert len(found) == 5
    for candidate in found:
        config = load_config(file, overrides_of(candidate.changes))
        engine = config.rollout.engine
        assert engine.tensor_parallel_size in (8, 16, 32) and config.weight_sync.method != "tensor"
        assert len(plan_placement(config).parts(0)) == engine.tensor_parallel_size // 4


def test_a_suggestion_computes_no_more_layers_again_than_it_must() -> None:
    plan = planner(DENSE, "H200x8", *RECOMPUTING_ALL)
    methods = set()
    for candidate in plan.suggestions(20):
        changes = candidate.changes
        if changes["learner__recompute__granularity"] != "full":
            continue
        again = changes["learner__recompute__num_layers"]
        if changes["learner__recompute__method"] == "uniform":
            again = plan.architecture.num_layers // candidate.layout.pipeline
        fewer = {"learner__recompute__method": "block", "learner__recompute__num_layers": again - 1}
        assert again == 1 or plan.candidate({**changes, **fewer}) is None
        methods.add(changes["learner__recompute__method"])
    assert "block" in methods


CLUSTERS = [("H200x8", 8), ("H100x16", 8), ("H100x16", 4), ("H200x24", 8), ("A100x64", 8), ("B200x144", 72)]
OWN = [
    [],
    ["cluster.placement=disaggregated", "weight_sync.method=distributed"],
    ["weight_sync.method=disk"],
    ["algorithm.advantage=gae", "algorithm.dynamic_sampling.enable=false"],
]


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.sampled_from([DENSE, EXPERTS]), st.sampled_from(CLUSTERS), st.sampled_from(OWN), st.integers(0, 10**6))
def test_whatever_is_suggested_would_be_submitted(
    file: str, cluster: tuple[str, int], own: list[str], seed: int
) -> None:
    gpus, per_node = cluster
    config = load_config(file, own)
    _, architecture = resolve_architecture(config.model, config.demo)
    plan = Planner(config, architecture, parse_machines(gpus, per_node), workload_of(config))
    rollout = plan.generation(config)
    plan.generation = lambda _: rollout  # how fast a layout is does not matter here
    layouts = list(plan._layouts())
    drawn = [plan.candidate(changes) for changes in Random(seed).sample(layouts, min(8, len(layouts)))]
    for candidate in [*filter(None, drawn), *plan.cures()[:3]]:
        submitted = load_config(file, [*own, *overrides_of(candidate.changes)])
        allocation = check_allocation(submitted, submitted.cluster.nodes)  # raises where submit.sh refuses
        assert allocation.gpus <= plan.machines.count
        assert memory(plan, submitted).fits


@pytest.mark.slow
@pytest.mark.parametrize("gpus", ["H200x8", "H100x16"], ids=["one_node", "two_nodes"])
def test_colocated_suggestions_sync_in_a_way_that_reaches_every_node(gpus: str) -> None:
    methods = set()
    for candidate in planner(DENSE, gpus).suggestions(20):
        config = load_config(DENSE, overrides_of(candidate.changes))
        if config.cluster.placement == "colocated":
            methods.add(config.weight_sync.method)
        elif config.cluster.nodes > 1:
            assert config.weight_sync.method == "distributed"
    assert methods == {"tensor"}


def test_submit_accepts_the_first_suggestion(tmp_path: Path) -> None:
    best = planner(DENSE, "H100x16").suggestions(1)[0]
    result = subprocess.run(
        ["bash", "scripts/slurm/submit.sh", "--config", DENSE, "--dry-run", f"trainer.runs_dir={tmp_path}",
         *overrides_of(best.changes)],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120,
        env={**os.environ, "MEGATRON_RETOOL_VENV": str(Path(sys.executable).parents[1])},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "--nodes=2" in result.stdout


def test_nothing_is_suggested_where_nothing_fits() -> None:
    assert planner(DENSE, "A100x1").suggestions() == []


def test_changes_become_overrides() -> None:
    changes: dict[str, Any] = {
        "learner__recompute__granularity": None, "learner__sequence_parallel": True, "learner__recompute__modules": [],
    }  # fmt: skip
    overrides = overrides_of(changes)
    assert overrides == [
        "learner.recompute.granularity=null", "learner.sequence_parallel=true", "learner.recompute.modules=[]"
    ]  # fmt: skip
    assert load_config(DENSE, ["learner.recompute.method=null", "learner.recompute.num_layers=null", *overrides])
    assert vary(load_config(DENSE), learner__world_size=16).learner.world_size == 16
