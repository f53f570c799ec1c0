"""What it spares the learner that old log-probs are those of the update's own forward pass, alternating with a pass.

    python benchmarks/fused_log_probs.py                       # the demo's shape
    python benchmarks/fused_log_probs.py --shape small --mean-length 400 --recompute full

One on-policy step, in which one update follows the batch: with a pass (learner.fuse_old_log_probs=never) it is
log-probs, rollout correction and update; fused it is the update, with the correction inside, and the correction of the
whole batch for metrics. Geo-MIS, token weights and veto are on, and some responses are rejected. One process; --steps
pairs of steps after two to warm up, medians of each and of the ratio within a pair, in seconds of the clock and (on a
CPU) of the process. It also prints how far the two are apart in loss and gradient norm.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.learner_step import SHAPES, batch_of, random_lengths
from conversion.model.architecture import Architecture
from megatron_retool.algorithms.loss_aggregation import token_weights
from megatron_retool.algorithms.rollout_correction import CorrectionResult, rollout_correction
from megatron_retool.config import (
    AlgorithmConfig,
    Config,
    LearnerConfig,
    OptimizerConfig,
    RecomputeConfig,
    RolloutCorrectionConfig,
)
from megatron_retool.learner.learner import Learner
from megatron_retool.trajectory import TrajectoryBatch


def learner_of(options: argparse.Namespace) -> Learner:
    shape = {"model_type": "qwen2", "max_position_embeddings": 32768, **SHAPES[options.shape]}
    learner = LearnerConfig(
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        max_tokens_per_micro_batch=options.max_tokens_per_micro_batch,
        recompute=RecomputeConfig(granularity=options.recompute),
    )
    correction = RolloutCorrectionConfig(rejection=["geometric_ratio 0.99 1.01"])
    return Learner(
        Config(learner=learner, algorithm=AlgorithmConfig(rollout_correction=correction)),
        # So small a rate that every step has the same log-probs, and rejects the same responses.
        optimizer=OptimizerConfig(lr=1e-12),
        total_optimizer_steps=10_000,
        architecture=Architecture.from_hf_config(shape),
    )


def corrected(learner: Learner, batch: TrajectoryBatch, log_probs: np.ndarray) -> CorrectionResult:
    return rollout_correction(
        torch.from_numpy(log_probs),
        torch.from_numpy(batch.rollout_log_probs),
        torch.from_numpy(batch.loss_mask),
        torch.from_numpy(batch.token_rollout_ids),
        batch.num_rollouts,
        torch.from_numpy(batch.turn_ids),
        learner.config.algorithm.rollout_correction,
    )


def with_weights(learner: Learner, batch: TrajectoryBatch, keep: np.ndarray) -> TrajectoryBatch:
    weights = token_weights(
        learner.config.algorithm.aggregation,
        torch.from_numpy(batch.loss_mask),
        torch.from_numpy(batch.token_rollout_ids),
        batch.num_rollouts,
        keep_mask=torch.from_numpy(keep),
    )
    return batch.with_columns(keep=keep, loss_weights=weights.numpy())


def with_a_pass(learner: Learner, batch: TrajectoryBatch) -> dict[str, float]:
    log_probs = learner.log_probs(batch)["log_probs"]
    correction = corrected(learner, batch, log_probs)
    batch = with_weights(learner, batch, correction.keep_mask.numpy())
    columns = {"old_log_probs": log_probs, "importance_weights": correction.importance_weights.numpy()}
    return learner.update(batch.with_columns(**columns))


def fused(learner: Learner, batch: TrajectoryBatch) -> dict[str, float]:
    found = learner.update_fused(with_weights(learner, batch, batch.loss_mask))
    corrected(learner, batch, found["log_probs"])
    return found["metrics"]


def seconds_of(step: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Of the clock, and of the process."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    clock, process = time.perf_counter(), time.process_time()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - clock, time.process_time() - process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="demo")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--mean-length", type=int, default=110)
    parser.add_argument("--max-tokens-per-micro-batch", type=int, default=16384)
    parser.add_argument("--recompute", choices=("full", "selective"))
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()

    learner = learner_of(options)
    lengths = random_lengths(options.sequences, options.mean_length, 8 * options.mean_length, seed=0)
    batch = batch_of(lengths, learner.architecture.vocab_size, seed=1)
    rng = np.random.default_rng(2)
    own = learner.log_probs(batch)["log_probs"]
    # Every fourth response is as if another model had sampled it.
    gap = rng.normal(0.0, 0.02, len(own)) + 0.1 * (batch.sequence_ids % 4 == 0)
    batch.rollout_log_probs = np.where(batch.loss_mask, own - gap, 0).astype(np.float32)
    batch = batch.with_columns(advantages=rng.normal(size=len(own)))

    first, second = with_a_pass(learner, batch), fused(learner, batch)
    kept = corrected(learner, batch, own).keep_mask.numpy()
    print(f"{int(batch.total_lengths.sum())} tokens in {len(batch)} responses, of whose sampled tokens "
          f"{kept[batch.loss_mask].mean():.0%} give loss")  # fmt: skip
    for name in ("actor/pg_loss", "actor/grad_norm"):
        print(f"{name}: {first[name]:.8g} with a pass, {second[name] - first[name]:+.1e} fused")

    sides = {"with a pass": with_a_pass, "fused": fused}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for repetition in range(options.steps + 2):
        # First one then the other first: the machine's speed drifts.
        for name in list(sides)[:: 1 if repetition % 2 else -1]:
            found = seconds_of(lambda name=name: sides[name](learner, batch), learner.device)
            if repetition >= 2:
                times[name].append(found)
    for place, unit in enumerate(("s", "s of CPU")):
        by_side = {name: [pair[place] for pair in found] for name, found in times.items()}
        ratio = statistics.median(
            own / other for own, other in zip(by_side["fused"], by_side["with a pass"], strict=True)
        )
        parts = ", ".join(f"{name} {statistics.median(found):.3f} {unit}" for name, found in by_side.items())
        print(f"{parts}; ratio {ratio:.3f}")
    learner.close()


if __name__ == "__main__":
    main()
