"""Accumulate and apply in every layout: outputs, gradients of two calls, their norm and AdamW's step are those of
transformers and peft; what is only read changes nothing; an update is the same two."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_retool.config import Config, ConfigError, LearnerConfig, LoraConfig, OptimizerConfig
from megatron_retool.parity.admission.layouts import CP, EP, ETP, PP, SP, TP, VPP
from megatron_retool.parity.admission.tiny_model import random_batch
from megatron_retool.parity.ranks import run_ranks
from megatron_retool.target_sequences import OptimizerStep, RequestRefused, TargetSequence, TokenLoss
from tests.kit.adapter_reference import LENGTHS, SETTINGS, gather_factors, set_factors, small_model
from tests.kit.target_reference import (
    CROSS_ENTROPY,
    GSPO,
    PAIRS,
    PPO,
    STEP,
    WIDTHS,
    random_sequences,
    write_target_reference,
)

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one rank": ("qwen3", 1, {}),
    "tp2 sp": ("qwen3", 2, {TP: 2, SP: True}),
    "pp2": ("qwen3", 2, {PP: 2}),
    "cp2": ("qwen3", 2, {CP: 2}),
    "cp2, dynamic": ("qwen3", 2, {CP: 2, "dynamic_context_parallel": True}),
    "dp2": ("qwen3", 2, {}),
    "dp2, plain optimizer": ("qwen3", 2, {"use_distributed_optimizer": False}),
    "dp2, overlap": ("qwen3", 2, OVERLAP),
    "experts, one rank": ("qwen3_moe", 1, {}),
    "experts, ep2": ("qwen3_moe", 2, {EP: 2}),
    "experts, tp2 sp etp2": ("qwen3_moe", 2, {TP: 2, SP: True, ETP: 2}),
}
FOUR: dict[str, tuple[str, int, dict[str, Any]]] = {
    "pp2, dp2, overlap": ("qwen3", 4, {PP: 2, **OVERLAP}),
    "tp2 sp, pp2": ("qwen3", 4, {TP: 2, SP: True, PP: 2}),
    "cp2, dp2": ("qwen3", 4, {CP: 2}),
    "experts, ep2, dp2 of experts": ("qwen3_moe", 4, {EP: 2}),
}
BAR, NORM_BAR = 1e-5, 1e-6


def make_learner(world: int, settings: dict[str, Any], directory: Path, rank: int = SETTINGS.rank, **other: Any) -> Any:
    from megatron_retool.learner.learner import Learner

    lora = LoraConfig(rank=rank, alpha=SETTINGS.alpha, seed=SETTINGS.seed)
    section = LearnerConfig(world_size=world, dtype="float32", max_tokens_per_micro_batch=112, lora=lora, **settings)
    optimizer = OptimizerConfig(lr=3e-3, clip_grad=0.7, eps=1e-4, weight_decay=0.0)
    return Learner(
        Config(learner=section), optimizer=optimizer, total_optimizer_steps=9, hf_dir=directory / "hf", **other
    )


def _difference(outputs: Any, expected: dict[str, Any]) -> float:
    pairs = [*zip(outputs.log_probs, expected["log_probs"], strict=True)]
    pairs += zip(outputs.elementwise_loss, expected["losses"], strict=True)
    for mine, reference in pairs:
        assert mine.dtype == np.float32 and mine.shape == tuple(reference.shape)
    total = sum(float(each.sum()) for each in expected["losses"])
    apart = max(float(np.abs(mine - reference.numpy()).max()) for mine, reference in pairs)
    return max(apart, abs(outputs.metrics["loss"] / total - 1))


def compare_layout(world: int, settings: dict[str, Any], directory: Path) -> dict[str, float]:
    """How far two calls, one that only reads, and a step are from the reference, on rank 0."""
    from megatron_retool.learner.weights import all_gather_gradient_shards, gradient_value

    expected = torch.load(directory / "targets.pt", weights_only=False)
    learner = make_learner(world, settings, directory)
    set_factors(learner, expected["factors"])
    chunks, gradients = learner.model_chunks, {}
    first, second, third = expected["answers"]
    found = {"cross-entropy": _difference(learner.accumulate(random_sequences(WIDTHS, 1), CROSS_ENTROPY), first)}
    found["gspo"] = _difference(learner.accumulate(random_sequences(PAIRS, 3), GSPO, forward_only=True), third)
    found["ppo"] = _difference(learner.accumulate(random_sequences(PAIRS, 2), PPO), second)
    finalize = learner.transformer_config.finalize_model_grads_func

    def look_after_the_sum(*args: Any) -> None:
        finalize(*args)
        for chunk in chunks:
            all_gather_gradient_shards(chunk)
        gradients.update(gather_factors(chunks, gradient_value))

    learner.transformer_config.finalize_model_grads_func = look_after_the_sum
    scheduled = learner.learning_rate
    metrics = learner.apply(STEP)
    assert metrics["lr"] == STEP.learning_rate and metrics["skipped"] == 0
    assert learner.learning_rate == scheduled, "a caller's step leaves the schedule as it is"
    learner.export_weights()
    after = gather_factors(chunks)
    found["grad_norm"] = abs(metrics["grad_norm"] / expected["norm"] - 1)
    found["gradient"] = max(
        float((gradients[name] - gradient).abs().max() / gradient.abs().max())
        for name, gradient in expected["gradients"].items()
    )
    found["step"] = max(float((after[name] - factor).abs().max()) for name, factor in expected["stepped"].items())
    return found


def _compare_all(world: int, directory: Path, names: list[str]) -> dict[str, dict[str, float]]:
    layouts = {**LAYOUTS, **FOUR}
    return {name: compare_layout(world, layouts[name][2], directory / layouts[name][0]) for name in names}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("targets")
    for family in sorted({family for family, _, _ in LAYOUTS.values()}):
        write_target_reference(family, directory / family)
    return directory


@pytest.fixture(scope="module")
def found(references: Path) -> dict[str, dict[str, float]]:
    together: dict[str, dict[str, float]] = {}
    for world in (1, 2):
        names = [name for name, (_, size, _) in LAYOUTS.items() if size == world]
        together |= run_ranks(_compare_all, world, references / f"ranks{world}", world, references, names)
    return together


def _within(figures: dict[str, float]) -> None:
    assert figures.keys() == {"cross-entropy", "gspo", "ppo", "grad_norm", "gradient", "step"}
    bars = {"grad_norm": NORM_BAR}
    assert not {name: value for name, value in figures.items() if not value <= bars.get(name, BAR)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_gradients_and_step_are_the_references(found: dict[str, dict[str, float]], layout: str) -> None:
    _within(found[layout])


@pytest.mark.slow
def test_outputs_gradients_and_step_are_the_references_on_four_ranks(references: Path) -> None:
    for figures in run_ranks(_compare_all, 4, references / "ranks4", 4, references, list(FOUR)).values():
        _within(figures)


AS_UPDATES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "all weights, one rank": (0, 1, {}),
    "adapters, one rank": (4, 1, {}),
    "all weights, tp2 sp": (0, 2, {TP: 2, SP: True}),
    "all weights, dp2, overlap": (0, 2, OVERLAP),
    "all weights, pp2 vpp2": (0, 2, {PP: 2, VPP: 2, "overlap_p2p_comm": True}),
    "adapters, dp2, overlap": (4, 2, OVERLAP),
}


def _weights(learner: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in learner.export_weights() for name, tensor in bucket}


def _next_tokens(seed: int) -> tuple[Any, list[TargetSequence]]:
    """A batch for fine-tuning, and the same as sequences whose targets are their next tokens."""
    batch = random_batch(LENGTHS, seed=seed)
    batch = batch.with_columns(loss_weights=np.random.default_rng(seed).normal(0, 0.02, batch.num_response_tokens))
    prompts = np.split(batch.prompt_ids, np.cumsum(batch.prompt_lengths)[:-1])
    ends = np.cumsum(batch.response_lengths)[:-1]
    weights = np.split(np.where(batch.loss_mask, batch.columns["loss_weights"], 0).astype(np.float32), ends)
    sequences = []
    for prompt, response, own in zip(prompts, np.split(batch.response_ids, ends), weights, strict=True):
        tokens = np.concatenate([prompt, response]).astype(np.int64)
        column = np.concatenate([np.zeros(len(prompt) - 1), own, np.zeros(1)]).astype(np.float32)
        sequences.append(TargetSequence(tokens, np.append(tokens[1:], 0), {"weights": column}))
    return batch, sequences


def _as_updates(world: int, directory: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for name in names:
        rank, _, settings = AS_UPDATES[name]
        plain, mixed = (make_learner(world, settings, directory, rank) for _ in range(2))
        before = _weights(plain)
        metrics = [plain.sft_update(_next_tokens(seed)[0]) for seed in range(3)]
        step = OptimizerStep(3e-3, 0.9, 0.95, 1e-4, grad_clip_norm=0.7)
        mixed.sft_update(_next_tokens(0)[0])
        sequences = _next_tokens(1)[1]
        losses = [
            mixed.accumulate(part, CROSS_ENTROPY).metrics["loss"]
            for part in (sequences[:1], sequences[1:4], sequences[4:])
        ]
        norm = mixed.apply(step)["grad_norm"]
        mixed.sft_update(_next_tokens(2)[0])
        expected, weights = _weights(plain), _weights(mixed)
        found[name] = {
            "moved": max((float((expected[key] - before[key]).abs().max()) for key in expected), default=0.0),
            "weights": max((float((expected[key] - weights[key]).abs().max()) for key in expected), default=0.0),
            "loss": abs(sum(losses) / metrics[1]["loss"] - 1),
            "grad_norm": abs(norm / metrics[1]["grad_norm"] - 1),
        }
    return found


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dense")
    small_model("qwen3", num_hidden_layers=4).save_pretrained(directory / "hf")
    return directory


def test_an_update_is_accumulate_and_apply(dense: Path) -> None:
    found: dict[str, dict[str, float]] = {}
    for world in (1, 2):
        names = [name for name, (_, size, _) in AS_UPDATES.items() if size == world]
        found |= run_ranks(_as_updates, world, dense / f"ranks{world}", world, dense, names)
    for name, figures in found.items():
        assert figures["moved"] > 3e-3, name
        assert max(figures["weights"], figures["loss"], figures["grad_norm"]) < 1e-5, (name, figures)


def _refusals(directory: Path) -> dict[str, str]:
    learner = make_learner(1, {}, directory)
    sequences = random_sequences(PAIRS, 1)
    long = random_sequences([(113, None)], 1)
    learner.accumulate(sequences, CROSS_ENTROPY)
    unknown = TargetSequence(np.array([0, 10**6]), np.zeros(2, np.int64), {"weights": np.ones(2, np.float32)})
    other = TargetSequence(sequences[0].tokens, sequences[0].targets, {})
    cases: dict[str, Any] = {
        "none": lambda: learner.accumulate([], CROSS_ENTROPY),
        "loss": lambda: learner.accumulate(sequences, TokenLoss("stable_reinforce")),
        "column": lambda: learner.accumulate([other], PPO),
        "columns": lambda: learner.accumulate([*sequences, other], PPO),
        "token": lambda: learner.accumulate([unknown], CROSS_ENTROPY),
        "long": lambda: learner.accumulate(long, CROSS_ENTROPY),
        "update": lambda: learner.sft_update(random_batch(LENGTHS)),
    }
    said = {}
    for case, call in cases.items():
        with pytest.raises(RequestRefused) as refused:
            call()
        said[case] = str(refused.value)
    norm = learner.apply(STEP)["grad_norm"]
    with pytest.raises(RequestRefused) as refused:
        learner.apply(STEP)
    again = make_learner(1, {}, directory)
    again.accumulate(sequences, CROSS_ENTROPY)
    assert again.apply(STEP)["grad_norm"] == norm, "what was refused has left nothing"
    critic = make_learner(1, {}, directory, role="critic")
    with pytest.raises(ConfigError) as wrong:
        critic.accumulate(sequences, CROSS_ENTROPY)
    return said | {"nothing": str(refused.value), "critic": str(wrong.value)}


def test_a_wrong_request_is_refused_by_name_and_changes_nothing(dense: Path) -> None:
    said = run_ranks(_refusals, 1, dense / "refusals", dense)
    assert "sequences: the list is empty" in said["none"]
    assert "loss='stable_reinforce' is not one of cross_entropy, importance_sampling" in said["loss"]
    assert "rollout_log_probs: the loss needs this column" in said["column"]
    assert "sequences[5]: has the columns []" in said["columns"]
    assert "sequences[0].tokens: holds 1000000, and the model knows" in said["token"]
    assert "has 113 tokens, more than learner.max_tokens_per_micro_batch=112" in said["long"]
    assert "an update would drop what was accumulated" in said["update"]
    assert "nothing was accumulated since the last step" in said["nothing"]
    assert "role=critic does not go with gradients that a caller accumulates" in said["critic"]


@pytest.mark.parametrize(
    "settings",
    [
        {"share_prefixes": True},
        {"routing_replay": "rollout"},
        {"moe_router_bias_update_rate": 1e-3},
        {"optimizer": OptimizerConfig(name="muon")},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_setting_that_does_not_go_with_it_is_named(dense: Path, settings: dict[str, Any]) -> None:
    from conversion.model.architecture import Architecture
    from megatron_retool.config.accumulation import check_accumulation

    architecture = Architecture.from_pretrained(dense / "hf")
    check_accumulation(Config().learner, architecture)
    predicting = dataclasses.replace(architecture, predictors=1)
    with pytest.raises(ConfigError, match=f"learner.{next(iter(settings))}.* does not go with gradients"):
        check_accumulation(Config(learner=LearnerConfig(**settings)).learner, architecture)
    with pytest.raises(ConfigError, match="learner.mtp.train=true does not go with"):
        check_accumulation(Config().learner, predicting)
