"""Adapters in every layout: log-probs, gradients, their norm and an optimizer's step are peft's; what breaks when a
mark is left out is seen."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_retool.config import Config, LearnerConfig, OptimizerConfig, RecomputeConfig
from megatron_retool.parity.admission.layouts import CP, EP, ETP, PP, SP, TP, VPP
from megatron_retool.parity.ranks import RankFailed, run_ranks
from tests.kit.adapter_reference import SETTINGS, gather_factors, mini_batch, set_factors, write_reference

FULL = RecomputeConfig(granularity="full", method="uniform", num_layers=1)
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one rank": ("qwen3", 1, {}),
    "recompute": ("qwen3", 1, {"recompute": FULL}),
    "tp2": ("qwen3", 2, {TP: 2}),
    "tp2 sp": ("qwen3", 2, {TP: 2, SP: True}),
    "tp2 sp, recompute": ("qwen3", 2, {TP: 2, SP: True, "recompute": FULL}),
    "pp2": ("qwen3", 2, {PP: 2}),
    "dp2": ("qwen3", 2, {}),
    "dp2, plain optimizer": ("qwen3", 2, {"use_distributed_optimizer": False}),
    "dp2, overlap": ("qwen3", 2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "cp2": ("qwen3", 2, {CP: 2}),
    "cp2, dynamic": ("qwen3", 2, {CP: 2, "dynamic_context_parallel": True}),
    "tied, biases, one rank": ("qwen2", 1, {}),
    "tied, biases, pp2": ("qwen2", 2, {PP: 2}),
    "norms after, one rank": ("olmo2", 1, {}),
    "norms after, tp2 sp": ("olmo2", 2, {TP: 2, SP: True}),
    "windows, zero-centered norms, one rank": ("gemma3_text", 1, {}),
    "fused on disk, one rank": ("phi3", 1, {}),
    "fused on disk, tp2 sp": ("phi3", 2, {TP: 2, SP: True}),
    "experts, one rank": ("qwen3_moe", 1, {}),
    "experts, ep2": ("qwen3_moe", 2, {EP: 2}),
    "experts, tp2 sp etp1": ("qwen3_moe", 2, {TP: 2, SP: True, ETP: 1}),
    "experts, tp2 sp etp2": ("qwen3_moe", 2, {TP: 2, SP: True, ETP: 2}),
    "experts, tp2 sp etp1 ep2": ("qwen3_moe", 2, {TP: 2, SP: True, ETP: 1, EP: 2}),
    "dense layers, shared experts, one rank": ("glm4_moe", 1, {}),
    "dense layers, shared experts, ep2": ("glm4_moe", 2, {EP: 2}),
    "dense layers, shared experts, tp2 sp etp1": ("glm4_moe", 2, {TP: 2, SP: True, ETP: 1}),
    "latents, one rank": ("deepseek_v3", 1, {}),
    "latents, tp2 sp etp1": ("deepseek_v3", 2, {TP: 2, SP: True, ETP: 1}),
    "latents, whole queries, pp2": ("deepseek_v2", 2, {PP: 2}),
    "gated delta nets, one rank": ("qwen3_next", 1, {}),
    "gated delta nets, tp2 sp etp1": ("qwen3_next", 2, {TP: 2, SP: True, ETP: 1}),
    "gated delta nets, not interleaved, tp2": ("qwen3_5_text", 2, {TP: 2}),
    "mamba, one rank": ("granitemoehybrid", 1, {}),
    "mamba, cp2": ("granitemoehybrid", 2, {CP: 2}),
    "half layers, experts without gates, tp2 sp etp1": ("nemotron_h", 2, {TP: 2, SP: True, ETP: 1}),
}
FOUR = {
    "pp4 vpp2": ("qwen3 of 8 layers", 4, {PP: 4, VPP: 2}),
    "tp2 sp pp2": ("qwen3", 4, {TP: 2, SP: True, PP: 2}),
    "experts, tp2 sp etp2 ep2": ("qwen3_moe", 4, {TP: 2, SP: True, ETP: 2, EP: 2}),
}
BAR, NORM_BAR = 1e-5, 1e-6
DELTA_NET_BAR = 2e-5
"""Of gradients through a recurrence in float32, and of steps along them: last digits depend on the processor."""
LR, CLIP, EPS = 1e-2, 0.5, 1e-4


def _learner(world: int, settings: dict[str, Any], directory: Path) -> Any:
    from megatron_retool.learner.learner import Learner

    section = LearnerConfig(
        world_size=world, dtype="float32", max_tokens_per_micro_batch=112, lora=SETTINGS, **settings
    )
    optimizer = OptimizerConfig(lr=LR, clip_grad=CLIP, eps=EPS, weight_decay=0.0)
    return Learner(
        Config(learner=section),
        optimizer=optimizer,
        total_optimizer_steps=9,
        hf_dir=directory / "hf",
        with_reference=True,
    )


def compare_layout(world: int, settings: dict[str, Any], directory: Path, control: str = "") -> dict[str, float]:
    """How far this layout's learner is from the reference, on rank 0."""
    from megatron_retool.learner.weights import all_gather_gradient_shards, gradient_value

    expected = torch.load(directory / "reference.pt", weights_only=False)
    learner = _learner(world, settings, directory)
    _leave_out(control, learner)
    assert learner.reference_chunks is None, "the base is the reference: no copy of it is kept"
    chunks, batch = learner.model_chunks, mini_batch()
    found: dict[str, float] = {}

    def log_probs(**options: Any) -> np.ndarray:
        answer: np.ndarray = learner.log_probs(batch, **options)["log_probs"]
        return answer

    found["base before"] = float(np.abs(log_probs() - expected["base"]).max())  # B is 0
    set_factors(learner, expected["factors"])
    found["log_probs"] = float(np.abs(log_probs() - expected["log_probs"]).max())
    found["reference"] = float(np.abs(log_probs(reference=True) - expected["base"]).max())
    found["log_probs after the reference"] = float(np.abs(log_probs() - expected["log_probs"]).max())
    merged = {name: tensor.clone() for bucket in learner.export_weights() for name, tensor in bucket}
    check_export(learner, expected["factors"])
    gradients: dict[str, torch.Tensor] = {}
    step = learner._step

    def step_after_a_look() -> Any:
        for chunk in chunks:
            all_gather_gradient_shards(chunk)
        gradients.update(gather_factors(chunks, gradient_value))
        return step()

    learner._step = step_after_a_look
    metrics = learner.sft_update(batch)
    learner.export_weights()  # gathers what an overlapping optimizer has left to the next pass
    after = gather_factors(chunks)
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected["gradients"].values()))
    found["grad_norm"] = abs(metrics["grad_norm"] / norm - 1)
    if torch.distributed.get_rank() > 0:
        return found
    assert gradients.keys() == after.keys() == expected["gradients"].keys()
    assert merged.keys() == expected["merged"].keys()
    found["gradient"] = max(
        float((gradients[name] - gradient).abs().max() / gradient.abs().max())
        for name, gradient in expected["gradients"].items()
    )
    found["merged"] = max(float((merged[name] - weight).abs().max()) for name, weight in expected["merged"].items())
    stepped = _adamw_step(expected, norm)
    found["step"] = max(float((after[name] - factor).abs().max()) for name, factor in stepped.items())
    return found


def check_export(learner: Any, factors: dict[str, torch.Tensor]) -> None:
    """The first and the last rank get every factor bit for bit, and the others none."""
    receivers = sorted({0, torch.distributed.get_world_size() - 1})
    sent = {name: tensor.clone() for bucket in learner.export_adapter(receivers) for name, tensor in bucket}
    if torch.distributed.get_rank() not in receivers:
        assert not sent
        return
    assert sent.keys() == factors.keys()
    assert all(torch.equal(sent[name], factor) for name, factor in factors.items())


def _adamw_step(expected: dict[str, Any], norm: float) -> dict[str, torch.Tensor]:
    factors = {name: torch.nn.Parameter(factor.double()) for name, factor in expected["factors"].items()}
    for name, factor in factors.items():
        factor.grad = expected["gradients"][name] * min(1.0, CLIP / (norm + 1e-6))
    torch.optim.AdamW(factors.values(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0).step()
    return {name: factor.detach() for name, factor in factors.items()}


def _three_updates(directory: Path) -> dict[str, list[float]]:
    found = {}
    for name in ("dp2", "dp2, overlap"):
        learner = _learner(2, LAYOUTS[name][2], directory / "qwen3")
        found[name] = [learner.sft_update(mini_batch())["loss"] for _ in range(3)]
    return found


def test_overlap_changes_no_later_update(references: Path) -> None:
    """After a step a rank has the new values of its own part alone, until a pass gathers the others."""
    found = run_ranks(_three_updates, 2, references / "three updates", references)
    assert found["dp2, overlap"] == pytest.approx(found["dp2"], rel=1e-6)
    assert abs(found["dp2"][2] - found["dp2"][1]) > 1e-2


def _leave_out(control: str, learner: Any) -> None:
    """Take away what one of the controls says that the parity above depends on."""
    from megatron_retool.learner.adapters import Adapter, adapters
    from megatron_retool.learner.weights import unwrap

    factors = [p for adapter in adapters(learner.model_chunks) for p in (*adapter.a, *adapter.b)]
    if control == "no sequence-parallel mark":
        for parameter in factors:
            parameter.sequence_parallel = False
    elif control == "no gradient of the embedding":
        for chunk in learner.model_chunks:
            unwrap(chunk).trains_adapters = False
    elif control == "no norm marks":
        for parameter in factors:
            parameter.tensor_model_parallel = False
        learner.reset_optimizer(OptimizerConfig(lr=LR, clip_grad=CLIP, eps=EPS, weight_decay=0.0), 9)
    elif control == "no sum over the experts' tensor parallelism":
        Adapter.partial = ()


def _compare_all(world: int, directory: Path, names: list[str]) -> dict[str, dict[str, float]]:
    layouts = {**LAYOUTS, **FOUR}
    return {name: compare_layout(world, layouts[name][2], directory / layouts[name][0]) for name in names}


def _found(directory: Path, layouts: dict[str, Any]) -> dict[str, dict[str, float]]:
    found = {}
    for world in sorted({world for _, world, _ in layouts.values()}):
        names = [name for name, (_, size, _) in layouts.items() if size == world]
        found |= run_ranks(_compare_all, world, directory / f"ranks{world}", world, directory, names)
    return found


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lora")
    for family in {family for family, _, _ in LAYOUTS.values()}:
        write_reference(family, directory / family)
    return directory


@pytest.fixture(scope="module")
def found(references: Path) -> dict[str, dict[str, float]]:
    return _found(references, LAYOUTS)


def within(figures: dict[str, float], layout: str) -> None:
    """Fail where a figure of ``compare_layout`` is above its bar."""
    bars = {"grad_norm": NORM_BAR}
    if layout.startswith("gated delta nets"):
        bars |= {"gradient": DELTA_NET_BAR, "step": DELTA_NET_BAR}
    too_far = {name: value for name, value in figures.items() if not value <= bars.get(name, BAR)}
    assert not too_far, layout
    assert {"gradient", "grad_norm", "merged", "step"} <= figures.keys(), layout


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_are_pefts_in_every_layout(found: dict[str, dict[str, float]], layout: str) -> None:
    within(found[layout], layout)


@pytest.mark.slow
def test_adapters_are_pefts_on_four_ranks(references: Path) -> None:
    write_reference("qwen3", references / "qwen3 of 8 layers", num_hidden_layers=8)
    for layout, figures in _found(references, FOUR).items():
        within(figures, layout)


@pytest.mark.parametrize(
    ("control", "layout"),
    [
        ("no sequence-parallel mark", "tp2 sp"),
        ("no sum over the experts' tensor parallelism", "experts, tp2 sp etp2"),
    ],
)
def test_ranks_drift_apart_without_a_sum_of_gradients(references: Path, control: str, layout: str) -> None:
    family, world, settings = LAYOUTS[layout]
    with pytest.raises(RankFailed, match="ranks differ in"):
        run_ranks(compare_layout, world, references / "drift", world, settings, references / family, control)


CONTROLS = {
    "no gradient of the embedding": ("recompute", "gradient", 1e-2),
    "no norm marks": ("experts, tp2 sp etp2", "grad_norm", 1e-3),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_what_is_left_out_is_seen(references: Path, control: str) -> None:
    layout, figure, least = CONTROLS[control]
    family, world, settings = LAYOUTS[layout]
    directory = references / f"control {list(CONTROLS).index(control)}"
    assert run_ranks(compare_layout, world, directory, world, settings, references / family, control)[figure] > least
