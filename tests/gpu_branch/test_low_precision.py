"""The learner's matrix products in FP8 and FP4: Transformer Engine's own steps around products that torch rounds.

How far the numbers are from transformers', by the doctor's own steps; and what must not move them at all: copies of
weights that a step has left behind, recomputation, a leave from the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_retool.parity.admission.comparison import mini_batch
from megatron_retool.parity.doctor import learner_steps, model
from megatron_retool.parity.doctor.outcome import StepFigure
from megatron_retool.parity.doctor.session import DoctorSession
from tests.gpu_branch import fake_device
from tests.gpu_branch.conftest import Run
from tests.gpu_branch.test_phases import _differing, _learner, _weights, updated
from tests.learner.test_multi_token_prediction import make_model

RECIPES = [
    ("tensorwise", fake_device.HOPPER),
    ("blockwise", fake_device.HOPPER),
    # Another GPU is another process.
    *(pytest.param(each, fake_device.BLACKWELL, marks=pytest.mark.slow) for each in ("mxfp8", "nvfp4")),
]
STEPS: dict[str, Callable[[DoctorSession], list[StepFigure]]] = {
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


def _kept_as_the_doctor(directory: Path) -> list[StepFigure]:
    return learner_steps.fp8_parameters(DoctorSession(directory, 1))


@pytest.mark.slow
def test_weights_in_fp8_as_the_doctor_wants(reference: Path, on_gpus: Run) -> None:
    figures = on_gpus(_kept_as_the_doctor, reference)
    assert len(figures) == 2 and all(figure.value < figure.at_most for figure in figures), figures


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
    "qwen3": (
        "learner.recompute.granularity=full",
        "learner.recompute.modules=[core_attn,layernorm,mlp]",
        "learner.cpu_offloading_num_layers=1",
    ),
    "qwen3_moe": (
        "learner.recompute.granularity=full",
        "learner.recompute.modules=[moe]",
    ),
    "deepseek_v3": ("learner.recompute.granularity=full", "learner.recompute.modules=[layernorm,moe_act]"),
}


@pytest.mark.parametrize(
    ("family", "recipe"), [("qwen3", "tensorwise"), ("qwen3_moe", "blockwise"), ("deepseek_v3", "tensorwise")]
)
def test_what_is_computed_again_is_the_same(family: str, recipe: str, models: Path, on_gpus: Run) -> None:
    (plain, *others), mixed = on_gpus(updated, models / f"{family}-2", ["", *SAME[family]], _options(recipe))
    assert mixed == []
    differing = {setting: _differing(found, plain) for setting, found in zip(SAME[family], others, strict=True)}
    assert differing == dict.fromkeys(SAME[family], [])


KEPT = "learner.fp8.parameters=true"


def _away_and_back(directory: Path, recipe: str) -> dict[str, Any]:
    batch = mini_batch()
    learner, stays = (_learner(directory, *_options(recipe, KEPT)) for _ in range(2))
    for each in (learner, stays):
        torch.manual_seed(7)  # FP4 rounds gradients at random
        each.update(batch)
    learner.offload("weights", "optimizer", "gradients")
    held = [
        part.untyped_storage().nbytes()
        for parameter in learner.model_chunks[0].parameters()
        if hasattr(parameter, "get_metadata")
        for part in parameter.get_metadata().values()
        if isinstance(part, torch.Tensor)
    ]
    learner.reload("weights", "optimizer", "gradients")
    for each in (learner, stays):
        torch.manual_seed(7)
        each.update(batch)
    return {"differing": _differing(_weights(learner), _weights(stays)), "parts": len(held) > 8, "left": sum(held)}


@pytest.mark.parametrize(("recipe", "capability"), RECIPES)
def test_weights_in_fp8_leave_the_gpu_and_come_back(
    recipe: str, capability: tuple[int, int], models: Path, on_gpus: Run
) -> None:
    found = on_gpus(_away_and_back, models / "qwen3_moe-2", recipe, capability=capability)
    assert found == {"differing": [], "parts": True, "left": 0}


def _main_parameters(learner: Any) -> list[torch.Tensor]:
    mains = (parameter.main_param for chunk in learner.model_chunks for parameter in chunk.parameters())
    return [main.clone() for main in mains if main is not None]


def _kept_and_not(directory: Path, recipe: str, layouts: tuple[str, ...], world: int) -> dict[str, Any]:
    """How far log-probs and gradients' norms of steps with weights in FP8 are from those with weights in bfloat16."""
    found: dict[str, Any] = {}
    with fake_device.recorded() as record:
        for layout in layouts:
            options = [f"learner.{each}" for each in layout.split() if "=" in each]
            runs = []
            for kept in ([], [KEPT]):
                learner = _learner(directory, *_options(recipe, *options, *kept), world=world)
                batch = mini_batch()
                torch.manual_seed(7)
                norms = [learner.update(batch)["actor/grad_norm"] for _ in range(3)]
                runs.append((learner.log_probs(batch)["log_probs"], norms))
            (plain, norms), (rounded, own_norms) = runs
            before = _main_parameters(learner)
            learner.reset_optimizer(learner.config.learner.optimizer, 10)
            after = _main_parameters(learner)
            assert len(before) > 8
            assert all(torch.equal(own, earlier) for own, earlier in zip(after, before, strict=True)), layout
            found[layout] = float(np.abs(plain - rounded).max()), float(np.abs(np.subtract(norms, own_norms)).max())
    return {"apart": found, "mixed": [str(event) for event in record.mixed]}


def _saved_and_continued(directory: Path, place: Path, *options: str) -> np.ndarray[Any, Any]:
    learner = _learner(directory, *options)
    learner.update(mini_batch())
    learner.save(place)
    torch.manual_seed(7)
    learner.update(mini_batch())
    return learner.log_probs(mini_batch())["log_probs"]


def _loaded_and_continued(directory: Path, place: Path, *options: str) -> np.ndarray[Any, Any]:
    learner = _learner(directory, *options)
    learner.load(place)
    torch.manual_seed(7)
    learner.update(mini_batch())
    return learner.log_probs(mini_batch())["log_probs"]


@pytest.mark.parametrize(("recipe", "capability"), RECIPES)
def test_either_kind_of_weights_continues_from_the_other(
    recipe: str, capability: tuple[int, int], models: Path, tmp_path: Path, on_gpus: Run
) -> None:
    one, other = _options(recipe, KEPT), _options(recipe)
    if recipe in ("blockwise", "nvfp4"):
        one, other = other, one
    place, directory = tmp_path / "checkpoint", models / "qwen3_moe-2"
    expected = on_gpus(_saved_and_continued, directory, place, *one, capability=capability)
    found = on_gpus(_loaded_and_continued, directory, place, *other, capability=capability)
    assert np.array_equal(found, expected)


OVERLAP = "overlap_grad_reduce=true overlap_param_gather=true"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "world", "recipe", "capability"),
    [
        ("qwen3", 1, "tensorwise", fake_device.HOPPER),
        ("qwen3_moe", 1, "blockwise", fake_device.HOPPER),
        ("qwen3", 2, "blockwise", fake_device.HOPPER),
        ("qwen3_moe", 2, "tensorwise", fake_device.HOPPER),
        ("qwen3_moe", 2, "mxfp8", fake_device.BLACKWELL),
        ("qwen3_moe", 2, "nvfp4", fake_device.BLACKWELL),
    ],
)
def test_weights_in_fp8_change_no_number(
    family: str, world: int, recipe: str, capability: tuple[int, int], models: Path, on_gpus: Run
) -> None:
    layouts = () if recipe == "mxfp8" else (OVERLAP,)
    layouts += ("",) if world == 1 else LAYOUTS[family]
    if capability == fake_device.BLACKWELL:  # mxfp8: half a matrix is too small; nvfp4: Triton pads what is gathered
        layouts = tuple(layout for layout in layouts if TP not in layout)
    found = on_gpus(_kept_and_not, models / f"{family}-2", recipe, layouts, world, world=world, capability=capability)
    assert found["mixed"] == []
    for layout, apart in found["apart"].items():
        assert apart == (0, pytest.approx(0, abs=1e-6)), layout


def _with_predictors(directory: Path) -> dict[str, Any]:
    """By recipe, with layers for multi-token prediction and without: log-probs after two updates, the layers' loss in
    the last of them, and whether their own products were in FP8."""
    found: dict[str, Any] = {}
    for name, options in {"": (), **{each: _options(each) for each in ("tensorwise", "blockwise")}}.items():
        for train in (True, False):
            learner = _learner(directory, *options, f"learner.mtp.train={str(train).lower()}")
            learner.update(mini_batch())
            metrics = learner.update(mini_batch())
            products = {
                module.fp8
                for part, module in learner.model_chunks[0].module.named_modules()
                if part.startswith("mtp.") and hasattr(module, "fp8_meta") and not part.endswith("core_attention")
            }
            log_probs = learner.log_probs(mini_batch())["log_probs"]
            found[f"{name}{' with' if train else ''}"] = log_probs, metrics.get("learner/mtp_loss"), products
    return found


def test_predictors_observe_a_policy_in_fp8(tmp_path: Path, on_gpus: Run) -> None:
    make_model("mimo", tmp_path / "model")
    found = on_gpus(_with_predictors, tmp_path / "model")
    for recipe in ("tensorwise", "blockwise"):
        (log_probs, loss, products), (without, _, _) = found[f"{recipe} with"], found[recipe]
        assert np.array_equal(log_probs, without)
        assert products == {True}
        assert loss != found[" with"][1]
        assert loss == pytest.approx(found[" with"][1], rel=0.01)


TP = "tensor_model_parallel_size=2 sequence_parallel=true"
LAYOUTS = {
    "qwen3": ("pipeline_model_parallel_size=2", "data parallel"),
    "qwen3_moe": (
        f"{TP} expert_model_parallel_size=2 expert_tensor_parallel_size=1",
        "context_parallel_size=2 expert_model_parallel_size=2",
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
