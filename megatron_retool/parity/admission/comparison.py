"""What transformers and torch.optim make of a model and a mini-batch, and how far a layout's learner is from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conversion.files.dist_metadata import load_arrays
from conversion.model.architecture import Architecture
from megatron_retool.algorithms.loss_aggregation import token_weights
from megatron_retool.algorithms.policy_loss import PolicyLossInputs, policy_loss
from megatron_retool.config import AlgorithmConfig, Config, ModelConfig, OptimizerConfig
from megatron_retool.parity.admission import forced_routing
from megatron_retool.parity.admission.layouts import Case, learner_config
from megatron_retool.parity.admission.recurrences import recurrent
from megatron_retool.parity.admission.tiny_model import converted, hf_log_probs, random_batch, with_copies
from megatron_retool.parity.batches import sequences
from megatron_retool.parity.stored_tensors import stored_gradients, stored_weights
from megatron_retool.planning.memory import rank_parameters
from megatron_retool.trajectory import TrajectoryBatch

COPIES = ((6, 3, 25), (7, 3, 18), (0, 2, 20), (4, 6, 4))
"""(row, other, tokens): the row begins with so many tokens of the other, beyond the prompt of one of them."""
LENGTHS = [(5, 30), (9, 3), (4, 22), (13, 41), (6, 1), (8, 17), (3, 28), (11, 12)]
TEMPERATURE = 0.7
_CHECKPOINT, _WEIGHTS = "checkpoint", "checkpoint.pt"
ALGORITHM = AlgorithmConfig(entropy_coefficient=0.01, kl_in_loss=0.05)
OPTIMIZER = OptimizerConfig(lr=1e-4, weight_decay=0.1, clip_grad=0.5, betas=[0.9, 0.95], eps=1e-6)
TOLERANCE = 1e-5
"""Of log-probs and weights absolute, of gradients, their norm and metrics relative; of entropy, and of the log-probs of
an engine, twice as much."""
ENGINE = "engine's log_probs"

Found = dict[str, float]


def too_far(found: Found) -> Found:
    """The figures of ``compare`` and ``compare_engine`` that exceed their tolerance."""
    limits = {"entropy": 2 * TOLERANCE, ENGINE: 2 * TOLERANCE, "parameters that the planner misses": 0.0}
    return {name: value for name, value in found.items() if not value <= limits.get(name, TOLERANCE)}


def mini_batch() -> TrajectoryBatch:
    """The mini-batch that every layout learns from, with all columns."""
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


def write_reference(model: Any, architecture: Architecture, directory: Path) -> None:
    """What transformers and torch.optim make of the model; of a mixture of experts also with forced experts.

    In float64, but for what transformers itself takes to float32 (norms, softmax, positions), so that most of what
    ``compare``, which reads the files, finds is the learner's own rounding. Changes the model's weights and their type.
    """
    with recurrent(model):
        _write_reference(model.double(), architecture, directory)


def _write_reference(model: Any, architecture: Architecture, directory: Path) -> None:
    batch = mini_batch()
    if architecture.is_moe:
        expected = forced_routing.expectations(model, architecture, batch, COPIES, TEMPERATURE, ALGORITHM.objective)
        torch.save(expected, directory / "forced_routing.pt")
    with torch.no_grad():
        scored, _ = hf_log_probs(model, batch)
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
    gradients = stored_gradients(model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)
    decayed = [p for n, p in model.named_parameters() if p.dim() > 1 and not n.endswith("bias")]
    rest = [p for n, p in model.named_parameters() if p.dim() == 1 or n.endswith("bias")]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    first, second = OPTIMIZER.betas
    torch.optim.AdamW(
        groups, lr=OPTIMIZER.lr, betas=(first, second), eps=OPTIMIZER.eps, weight_decay=OPTIMIZER.weight_decay
    ).step()
    torch.save(
        {
            "log_probs": torch.where(mask, log_probs, 0.0).detach().numpy(),
            ENGINE: scored.numpy(),
            "entropy": torch.where(mask, entropy, 0.0).detach().numpy(),
            "metrics": {name: pair.tolist() for name, pair in output.metrics.items()},
            "gradients": gradients,
            "grad_norm": float(norm),
            "weights": stored_weights(model),
        },
        directory / "reference.pt",
    )


def build(case: Case, hf_dir: Path, families: tuple[str, ...] = (), replay: bool = False) -> Any:
    """This rank's learner. Weights and config.json are those of ``hf_dir``."""
    from megatron_retool.learner.learner import Learner

    architecture = Architecture.from_pretrained(hf_dir, families)
    learner = learner_config(case)
    if replay and architecture.is_moe:
        learner = replace(learner, routing_replay="rollout")
    config = Config(model=ModelConfig(path=str(hf_dir), families=list(families)), learner=learner, algorithm=ALGORITHM)
    return Learner(
        config,
        optimizer=OPTIMIZER,
        total_optimizer_steps=10,
        hf_dir=hf_dir,
        with_reference=replay and architecture.is_moe,
    )


def compare(case: Case, hf_dir: Path, families: tuple[str, ...] = ()) -> Found:
    """How far the learner is from the reference beside ``hf_dir``; every rank calls it, rank 0 knows gradients.

    Learner and reference read one mini-batch: log-probs, entropy, the loss's metrics, each gradient, the gradient
    norm, and weights after one update; in a mixture of experts also with experts that are replayed.
    """
    from megatron_retool.learner.weights import gradients_by_hf_name

    expected = load_arrays(hf_dir / "reference.pt")
    learner = build(case, hf_dir, families, replay=True)
    batch = mini_batch()
    result: Found = {}
    if (
        learner.config.learner.share_prefixes
        and sum(learner.packer.plan(batch).num_tokens) >= batch.total_lengths.sum() - 40
    ):
        raise ValueError("no prefixes were shared")
    if learner.routing_replay is not None:
        compared = forced_routing.compare(learner, batch, hf_dir / "forced_routing.pt", TEMPERATURE)
        result |= {f"replay: {name}": value for name, value in compared.items()}
        learner.routing_replay = None
    answer = learner.log_probs(batch, temperature=TEMPERATURE)
    for column in ("log_probs", "entropy"):
        result[column] = float(np.abs(answer[column] - expected[column]).max())
    result["parameters that the planner misses"] = _missed_parameters(learner)

    step, gradients = learner._step, {}

    def step_after_a_look() -> Any:
        named = gradients_by_hf_name(learner.model_chunks, learner.architecture)
        gradients.update(forced_routing.on_host(named))  # clipping works in place
        return step()

    learner._step = step_after_a_look
    metrics = learner.update(batch, temperature=TEMPERATURE)
    for metric, (total, count) in expected["metrics"].items():
        value = total / count if count else total
        result[f"metric {metric}"] = abs(metrics[metric] - value) / max(abs(value), 1e-3)
    result["grad_norm"] = abs(metrics["actor/grad_norm"] / expected["grad_norm"] - 1)
    weights = _exported(learner)
    if not gradients:
        return result
    _same_names(gradients, expected["gradients"])
    _same_names(weights, expected["weights"])
    result["gradient"] = forced_routing.distance(gradients, expected["gradients"])
    result["weight"] = max(float((weights[n] - w).abs().max()) for n, w in expected["weights"].items())
    return result


def engine_sequences(longest: int | None) -> list[list[int]]:
    """The mini-batch's prompts with their responses; an engine scores their first ``longest`` tokens."""
    return [np.concatenate(pair)[:longest].tolist() for pair in sequences(mini_batch())]


def compare_engine(log_probs: list[list[float]], hf_dir: Path) -> Found:
    """How far an engine is from the reference beside ``hf_dir``, in the responses' tokens.

    Args:
        log_probs: of ``engine_sequences``, of all their tokens but the first, at temperature 1.
    """
    expected = load_arrays(hf_dir / "reference.pt")[ENGINE]
    off, first = [0.0], 0
    for (prompt, response), row in zip(sequences(mini_batch()), log_probs, strict=True):
        own = np.array(row[len(prompt) - 1 :])
        off += np.abs(own - expected[first : first + len(own)]).tolist()
        first += len(response)
    return {ENGINE: float(np.max(off))}


def _same_names(found: dict[str, Any], expected: dict[str, Any]) -> None:
    if found.keys() != expected.keys():
        raise ValueError(f"tensors of only one side: {', '.join(sorted(found.keys() ^ expected.keys())[:5])}")


def _missed_parameters(learner: Any) -> float:
    """How many parameters this rank has more or fewer than the planner says."""
    from megatron.core import parallel_state

    stage = parallel_state.get_pipeline_model_parallel_rank()
    own = sum(p.numel() for chunk in learner.model_chunks for p in chunk.parameters())
    return float(abs(own - rank_parameters(learner.architecture, learner.layout, stage)))


def save_checkpoint(case: Case, hf_dir: Path, families: tuple[str, ...] = ()) -> Found:
    """Save after an update, for ``load_checkpoint``: the checkpoint, its weights and those after one more update."""
    learner = build(case, hf_dir, families)
    learner.update(mini_batch(), temperature=TEMPERATURE)
    learner.save(hf_dir / _CHECKPOINT)
    saved = _exported(learner)
    learner.update(mini_batch(), temperature=TEMPERATURE)
    after = _exported(learner)
    if saved:
        torch.save((saved, after), hf_dir / _WEIGHTS)
    return {}


def load_checkpoint(case: Case, hf_dir: Path, families: tuple[str, ...] = ()) -> Found:
    """What ``save_checkpoint`` saved in another layout: weights, and the update after it.

    Also what conversion made of ``hf_dir`` in ``hf_dir``/mcore, which the learner loads like a checkpoint.
    """
    from megatron_retool.learner.checkpoint.load import load_model_weights
    from megatron_retool.learner.weights import global_tensors

    learner = build(case, hf_dir, families)
    before = _exported(learner)
    saved, after = load_arrays(hf_dir / _WEIGHTS) if before else ({}, {})  # one rank has the weights
    with torch.no_grad():
        for _, tensor in global_tensors(learner.model_chunks):
            tensor.zero_()
    load_model_weights(learner.model_chunks, learner.architecture, converted(hf_dir))
    result = {"converted weight": _largest(_exported(learner), before)}
    learner.load(hf_dir / _CHECKPOINT)
    result["weight after a load"] = _largest(_exported(learner), saved)
    learner.update(mini_batch(), temperature=TEMPERATURE)
    return result | {"weight after the next update": _largest(_exported(learner), after)}


def _exported(learner: Any) -> dict[str, Any]:
    return forced_routing.on_host({name: t for bucket in learner.export_weights() for name, t in bucket})


def _largest(found: dict[str, Any], expected: dict[str, Any]) -> float:
    return max((float((found[name] - tensor).abs().max()) for name, tensor in expected.items()), default=0.0)
