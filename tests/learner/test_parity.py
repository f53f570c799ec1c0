"""Every family in every layout computes what transformers computes: log-probs, entropy, loss, every gradient, and the
weights after one DAPO update. A mixture of experts does so too where the choice of experts is replayed, and all of
them where common prefixes are computed once."""

from __future__ import annotations

import dataclasses
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_retool.algorithms.loss_aggregation import token_weights
from megatron_retool.algorithms.policy_loss import PolicyLossInputs, policy_loss
from megatron_retool.config import AlgorithmConfig, Config, LearnerConfig, OptimizerConfig
from megatron_retool.trajectory import TrajectoryBatch
from tests.learner import forced_routing
from tests.learner.ranks import run_ranks
from tests.learner.tiny_models import (
    FAMILIES,
    hf_log_probs,
    hf_model,
    random_batch,
    save_model,
    stored_gradients,
    stored_weights,
    with_copies,
)

COPIES = ((6, 3, 25), (7, 3, 18), (0, 2, 20), (4, 6, 4))
"""(row, other, tokens): the row begins with so many tokens of the other, beyond the prompt of one of them."""
LENGTHS = [(5, 30), (9, 3), (4, 22), (13, 41), (6, 1), (8, 17), (3, 28), (11, 12)]
TEMPERATURE = 0.7
ALGORITHM = AlgorithmConfig(entropy_coefficient=0.01, kl_in_loss=0.05)
OPTIMIZER = OptimizerConfig(lr=1e-4, weight_decay=0.1, clip_grad=0.5, betas=[0.9, 0.95], eps=1e-6)

TP, SP, PP, VPP, CP, EP, ETP = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
PLAIN, SHARE = "use_distributed_optimizer", "share_prefixes"
Layout = dict[str, Any]
DENSE: dict[int, dict[str, Layout]] = {
    1: {
        "one": {},
        "one_unpacked": {"max_tokens_per_micro_batch": 56},
        "one_recompute": {"recompute": "full"},
        "shared": {SHARE: True},
        "shared_unpacked": {SHARE: True, "max_tokens_per_micro_batch": 64},
        "shared_recompute": {SHARE: True, "recompute": "full"},
    },
    2: {
        "tp2": {TP: 2},
        "tp2_sp": {TP: 2, SP: True},
        "tp2_sp_shared": {TP: 2, SP: True, SHARE: True},
        "pp2": {PP: 2},
        "pp2_shared": {PP: 2, SHARE: True},
        "cp2": {CP: 2},
        "dp2": {},
        "dp2_shared": {SHARE: True},
        "dp2_plain_optimizer": {PLAIN: False},
    },
    4: {
        "pp4_vpp2": {PP: 4, VPP: 2},
        "tp2_sp_cp2": {TP: 2, SP: True, CP: 2},
        "tp2_pp2": {TP: 2, PP: 2},
        "pp2_cp2": {PP: 2, CP: 2},
        "tp4_more_than_key_value_heads": {TP: 4},
        "pp4_vpp2_shared": {PP: 4, VPP: 2, SHARE: True},
    },
}
EXPERTS: dict[int, dict[str, Layout]] = {
    1: {"one": {}, "one_unpacked": {"max_tokens_per_micro_batch": 56}, "shared": {SHARE: True}},
    2: {
        "tp2_sp": {TP: 2, SP: True},
        "pp2": {PP: 2},
        "cp2": {CP: 2},
        "dp2": {},
        "ep2": {EP: 2},
        "ep2_tp2_shared": {EP: 2, TP: 2, SP: True, ETP: 1, SHARE: True},
        "pp2_shared": {PP: 2, SHARE: True},
        "ep2_tp2": {EP: 2, TP: 2, SP: True, ETP: 1},
    },
    4: {
        "pp4_vpp2": {PP: 4, VPP: 2},
        "tp2_sp_cp2": {TP: 2, SP: True, CP: 2},
        "ep2_etp2_dp2": {EP: 2, TP: 2, SP: True, ETP: 2},
        "ep4": {EP: 4},
        "ep2_pp2": {EP: 2, PP: 2},
        "ep2_pp2_shared": {EP: 2, PP: 2, SHARE: True},
    },
}
CASES = [
    (world, family, name)
    for world in (1, 2, 4)
    for family in FAMILIES
    for name in (EXPERTS if family == "qwen3_moe" else DENSE)[world]
    if not (family == "mistral" and "shared" in name)  # whose sliding window is refused
]


def _layout(world: int, family: str, name: str) -> Layout:
    return (EXPERTS if family == "qwen3_moe" else DENSE)[world][name]


def _process_groups(layout: Layout) -> str:
    return str(sorted((key, size) for key, size in layout.items() if key in (TP, SP, PP, VPP, CP, EP, ETP)))


def mini_batch() -> TrajectoryBatch:
    batch = with_copies(random_batch(LENGTHS), COPIES)
    rng = np.random.default_rng(5)
    count = batch.num_response_tokens
    mask = torch.from_numpy(batch.loss_mask)
    weights = token_weights(ALGORITHM.aggregation, mask, torch.from_numpy(batch.sequence_ids), len(batch))
    return batch.with_columns(
        old_log_probs=-3.5 + rng.normal(0, 0.5, count),
        ref_log_probs=-3.5 + rng.normal(0, 0.5, count),
        advantages=rng.normal(0, 1, count),
        importance_weights=rng.uniform(0.5, 2.0, count),
        loss_weights=weights.numpy(),
    )


def reference(family: str, directory: Path) -> None:
    """What transformers and torch.optim make of the same model and mini-batch."""
    model = hf_model(family)
    save_model(model, directory / family)
    batch = mini_batch()
    log_probs, entropy = hf_log_probs(model, batch, TEMPERATURE)
    columns = {name: torch.from_numpy(column) for name, column in batch.columns.items()}
    mask = torch.from_numpy(batch.loss_mask)
    inputs = PolicyLossInputs(
        log_probs=log_probs,
        entropy=entropy,
        loss_mask=mask,
        sequence_ids=torch.from_numpy(batch.sequence_ids),
        **columns,
    )
    output = policy_loss(inputs, ALGORITHM.objective)
    output.loss.backward()
    gradients = {name: g.clone() for name, g in stored_gradients(model).items()}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)
    decayed = [p for n, p in model.named_parameters() if p.dim() > 1 and not n.endswith("bias")]
    rest = [p for n, p in model.named_parameters() if p.dim() == 1 or n.endswith("bias")]
    torch.optim.AdamW(
        [{"params": decayed}, {"params": rest, "weight_decay": 0.0}],
        lr=OPTIMIZER.lr,
        betas=tuple(OPTIMIZER.betas),
        eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
    ).step()
    torch.save(
        {
            "log_probs": torch.where(mask, log_probs, 0.0).detach().numpy(),
            "entropy": torch.where(mask, entropy, 0.0).detach().numpy(),
            "metrics": {name: pair.tolist() for name, pair in output.metrics.items()},
            "gradients": gradients,
            "grad_norm": float(norm),
            "weights": stored_weights(model),
        },
        directory / f"{family}.pt",
    )
    if family == "qwen3_moe":
        _forced_reference(hf_model(family), batch, directory / "forced_routing.pt")


def _forced_reference(model: Any, batch: TrajectoryBatch, file: Path) -> None:
    rows = {
        "all_rows": forced_routing.random_rows(batch, 8, 4, 2, missing=0.0, copies=COPIES),
        "gaps": forced_routing.random_rows(batch, 8, 4, 2, missing=0.25, copies=COPIES),
        "own": None,
    }
    expected = {
        kind: forced_routing.expectation(model, batch, each, TEMPERATURE, ALGORITHM.objective)
        for kind, each in rows.items()
    }
    torch.save(expected, file)


def _config(world: int, layout: Layout) -> Config:
    layout = {"max_tokens_per_micro_batch": 112, "log_prob_chunk_tokens": 19, **layout}
    learner = LearnerConfig(world_size=world, dtype="float32", **{k: v for k, v in layout.items() if k != "recompute"})
    if "recompute" in layout:
        learner = dataclasses.replace(
            learner, recompute=dataclasses.replace(learner.recompute, granularity=layout["recompute"])
        )
    return Config(learner=learner, algorithm=ALGORITHM)


def _replaying(config: Config) -> Config:
    return dataclasses.replace(config, learner=dataclasses.replace(config.learner, routing_replay="rollout"))


def compare(world: int, family: str, name: str, directory: Path) -> dict[str, float]:
    from megatron_retool.learner.learner import Learner
    from megatron_retool.learner.weights import gradients_by_hf_name

    expected = torch.load(directory / f"{family}.pt", weights_only=False)
    config, moe = _config(world, _layout(world, family, name)), family == "qwen3_moe"
    learner = Learner(
        _replaying(config) if moe else config,
        optimizer=OPTIMIZER,
        total_optimizer_steps=10,
        hf_dir=directory / family,
        with_reference=moe,
    )
    batch = mini_batch()
    found: dict[str, float] = {}
    if "shared" in name:
        assert sum(learner.packer.num_tokens(batch)) < batch.total_lengths.sum() - 40
    if moe:
        compared = forced_routing.compare(learner, batch, directory / "forced_routing.pt", TEMPERATURE)
        found |= {f"replay: {name}": value for name, value in compared.items()}
        learner.routing_replay = None
    answer = learner.log_probs(batch, temperature=TEMPERATURE)
    for column in ("log_probs", "entropy"):
        found[column] = float(np.abs(answer[column] - expected[column]).max())

    step, gradients = learner._step, {}

    def step_after_a_look() -> Any:
        named = gradients_by_hf_name(learner.model_chunks, learner.architecture)
        gradients.update({name: g.clone() for name, g in named.items()})  # clipping works in place
        return step()

    learner._step = step_after_a_look
    metrics = learner.update(batch, temperature=TEMPERATURE)
    for metric, (total, count) in expected["metrics"].items():
        value = total / count if count else total
        found[f"metric {metric}"] = abs(metrics[metric] - value) / max(abs(value), 1e-3)
    found["grad_norm"] = abs(metrics["actor/grad_norm"] / expected["grad_norm"] - 1)
    weights = {n: t for bucket in learner.export_weights() for n, t in bucket}
    if not gradients:
        return found
    assert gradients.keys() == expected["gradients"].keys()
    assert weights.keys() == expected["weights"].keys()
    found["gradient"] = max(
        float((gradients[n] - g).norm() / g.norm()) for n, g in expected["gradients"].items() if g.norm() > 0
    )
    found["weight"] = max(float((weights[n] - w).abs().max()) for n, w in expected["weights"].items())
    return found


def _compare_all(world: int, directory: Path) -> dict[tuple[str, str], Any]:
    answers: dict[tuple[str, str], Any] = {}
    # One layout after the other: process groups are made once for each, and their threads stay.
    own = [(family, name) for case_world, family, name in CASES if case_world == world]
    for family, name in sorted(own, key=lambda case: _process_groups(_layout(world, *case))):
        try:
            answers[family, name] = compare(world, family, name, directory)
        except Exception:
            if world > 1:
                raise
            answers[family, name] = traceback.format_exc()
    return answers


@pytest.fixture(scope="module")
def comparisons(references: Path) -> dict[int, Any]:
    """Filled world by world, when its first case is asked for: starting processes costs more than a case."""
    return {}


@pytest.mark.parametrize(("world", "family", "name"), CASES, ids=[f"{w}-{f}-{n}" for w, f, n in CASES])
def test_equals_transformers(world: int, family: str, name: str, references: Path, comparisons: dict[int, Any]) -> None:
    if world not in comparisons:
        try:
            comparisons[world] = run_ranks(_compare_all, world, references / f"world{world}", world, references)
        except RuntimeError as error:
            comparisons[world] = dict.fromkeys([case[1:] for case in CASES], str(error))
    found = comparisons[world][family, name]
    assert isinstance(found, dict), found
    tolerance = {"grad_norm": 1e-5, "gradient": 1e-5, "weight": 1e-5, "log_probs": 1e-5, "entropy": 2e-5}
    too_far = {n: d for n, d in found.items() if not d <= tolerance.get(n, 1e-5)}
    assert not too_far
