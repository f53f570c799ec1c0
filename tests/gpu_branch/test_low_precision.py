"""The learner's matrix products in FP8 and FP4: Transformer Engine's own steps around products that torch rounds.

How far the numbers are from transformers', by the doctor's own steps; and what must not move them at all: copies of
weights that a step has left behind, recomputation, a leave from the GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_retool.admission.parity import mini_batch
from megatron_retool.doctor import learner_steps, model
from megatron_retool.doctor.outcome import StepFigure
from megatron_retool.doctor.session import DoctorSession
from tests.gpu_branch import fake_device
from tests.gpu_branch.conftest import Run
from tests.gpu_branch.test_phases import _differing, _learner, _weights

RECIPES = [
    ("tensorwise", fake_device.HOPPER),
    ("blockwise", fake_device.HOPPER),
    # Another GPU is another process.
    *(pytest.param(each, fake_device.BLACKWELL, marks=pytest.mark.slow) for each in ("mxfp8", "nvfp4")),
]
STEPS = {
    "tensorwise": learner_steps.fp8_tensorwise,
    "blockwise": learner_steps.fp8_blockwise,
    "mxfp8": learner_steps.fp8_mxfp8,
    "nvfp4": learner_steps.nvfp4,
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A doctor's directory with its models and what transformers computes of them."""
    directory = tmp_path_factory.mktemp("doctor")
    model.reference(DoctorSession(directory, 0))
    return directory


def _measured(directory: Path, recipe: str) -> tuple[list[StepFigure], list[str]]:
    with fake_device.recorded() as record:
        figures = STEPS[recipe](DoctorSession(directory, 1))
    return figures, [str(event) for event in record.mixed]


@pytest.mark.parametrize(("recipe", "capability"), RECIPES)
def test_is_as_near_to_transformers_as_the_doctor_wants(
    recipe: str, capability: tuple[int, int], reference: Path, on_gpus: Run
) -> None:
    figures, mixed = on_gpus(_measured, reference, recipe, capability=capability)
    assert mixed == []
    for figure in figures:
        assert figure.at_most is None or 0 < figure.value < figure.at_most, figure
    rounded = [figure.value for figure in figures if "log-probs" in figure.name]
    assert len(rounded) == 2
    # What bfloat16 leaves is 0.017: the products did round.
    assert min(rounded) > 0.05


def _options(recipe: str, *more: str) -> tuple[str, ...]:
    return (f"learner.fp8.recipe={recipe}", "learner.fp8.keep_first_last_bf16=false", *more)


def _after_steps(directory: Path, recipe: str) -> dict[str, Any]:
    """Log-probs after steps, with the copies of weights that the layers keep and with copies made again."""
    learner, batch = _learner(directory, *_options(recipe)), mini_batch()
    before = learner.log_probs(batch)["log_probs"]
    found: dict[str, Any] = {"kept": 0}
    for _ in range(2):
        learner.update(batch)
    kept = learner.log_probs(batch)["log_probs"]
    for module in learner.model_chunks[0].modules():
        workspaces = getattr(module, "_fp8_workspaces", {})
        found["kept"] += len(workspaces)
        workspaces.clear()
    again = learner.log_probs(batch)["log_probs"]
    return found | {"moved": float(np.abs(kept - before).max()), "stale": float(np.abs(kept - again).max())}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_copies_of_weights_follow_a_step(family: str, recipe: str, models: Path, on_gpus: Run) -> None:
    found = on_gpus(_after_steps, models / f"{family}-2", recipe)
    assert found["kept"] > 0
    assert found["moved"] > 0
    assert found["stale"] == 0


SAME = {
    "qwen3": ("", "learner.recompute.granularity=full", "learner.recompute.modules=[core_attn,layernorm,mlp]"),
    "qwen3_moe": (
        "",
        "learner.recompute.granularity=full",
        "learner.recompute.modules=[moe_act,layernorm]",
        "learner.recompute.modules=[moe]",
    ),
    "deepseek_v3": ("", "learner.recompute.granularity=full", "learner.recompute.modules=[layernorm,moe_act]"),
}


def _updated(directory: Path, recipe: str, settings: tuple[str, ...]) -> tuple[dict[str, list[str]], list[str]]:
    """Which weights differ after an update with a setting from those without, and where devices were mixed."""
    found = {}
    with fake_device.recorded() as record:
        for setting in settings:
            options = [setting] if setting else []
            if "modules" in setting:
                options.append("learner.recompute.granularity=selective")
            learner = _learner(directory, *_options(recipe, *options))
            learner.update(mini_batch())
            found[setting] = _weights(learner)
    plain = found.pop("")
    differing = {setting: names for setting, own in found.items() if (names := _differing(own, plain))}
    return differing, [str(event) for event in record.mixed]


@pytest.mark.parametrize(
    ("family", "recipe"), [("qwen3", "tensorwise"), ("qwen3_moe", "blockwise"), ("deepseek_v3", "tensorwise")]
)
def test_what_is_computed_again_is_the_same(family: str, recipe: str, models: Path, on_gpus: Run) -> None:
    assert on_gpus(_updated, models / f"{family}-2", recipe, SAME[family]) == ({}, [])


def _away_and_back(directory: Path, recipe: str) -> dict[str, Any]:
    batch = mini_batch()
    learner, stays = (_learner(directory, *_options(recipe)) for _ in range(2))
    for each in (learner, stays):
        each.update(batch)
    learner.offload("weights", "optimizer", "gradients")
    learner.reload("weights", "optimizer", "gradients")
    for each in (learner, stays):
        each.update(batch)
    return {"differing": _differing(_weights(learner), _weights(stays))}


@pytest.mark.parametrize(("family", "recipe"), [("qwen3", "tensorwise"), ("qwen3_moe", "blockwise")])
def test_leaves_the_gpu_and_comes_back(family: str, recipe: str, models: Path, on_gpus: Run) -> None:
    assert on_gpus(_away_and_back, models / f"{family}-2", recipe) == {"differing": []}


TP = "tensor_model_parallel_size=2 sequence_parallel=true"
LAYOUTS = {
    "qwen3": ("pipeline_model_parallel_size=2", "data parallel"),
    "qwen3_moe": (
        TP,
        f"{TP} expert_model_parallel_size=2 expert_tensor_parallel_size=1",
        "expert_model_parallel_size=2",
        "context_parallel_size=2",
    ),
}


def _in_layouts(directory: Path, recipe: str, layouts: tuple[str, ...], world: int) -> tuple[list[Any], list[str]]:
    """Log-probs before and after an update, and its gradients' norm."""
    found = []
    with fake_device.recorded() as record:
        for layout in layouts:
            options = [f"learner.{each}" for each in layout.split() if "=" in each]
            learner = _learner(directory, *_options(recipe, *options), world=world)
            first = learner.log_probs(mini_batch())["log_probs"]
            metrics = learner.update(mini_batch())
            found.append((first, learner.log_probs(mini_batch())["log_probs"], metrics["actor/grad_norm"]))
    return found, [str(event) for event in record.mixed]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_layouts_round_alike(family: str, recipe: str, models: Path, on_gpus: Run) -> None:
    (((first, second, norm),), _) = on_gpus(_in_layouts, models / f"{family}-2", recipe, ("",), 1)
    found, mixed = on_gpus(_in_layouts, models / f"{family}-2", recipe, LAYOUTS[family], 2, world=2)
    assert mixed == []
    for layout, (own_first, own_second, own_norm) in zip(LAYOUTS[family], found, strict=True):
        off = [float(np.abs(own - one).mean() / one.std()) for own, one in ((own_first, first), (own_second, second))]
        # Stages and data parallel ranks round the same matrices as one process does.
        assert max(off) <= (0 if family == "qwen3" else 0.05), (layout, off)
        assert own_norm == pytest.approx(norm, rel=1e-6 if family == "qwen3" else 0.1), layout
