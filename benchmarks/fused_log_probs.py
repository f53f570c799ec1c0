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
import functools
import statistics
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.learner_work import (
    SHAPES,
    add_batch_arguments,
    in_turns,
    learner_settings,
    long_tailed_batch,
    median_ratio,
    qwen2,
    random_learner,
)
from megatron_retool.algorithms.loss_aggregation import token_weights
from megatron_retool.algorithms.rollout_correction import CorrectionResult, rollout_correction
from megatron_retool.config import AlgorithmConfig, RolloutCorrectionConfig
from megatron_retool.learner.learner import Learner
from megatron_retool.trajectory import TrajectoryBatch


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
    result = learner.update_fused(with_weights(learner, batch, batch.loss_mask))
    corrected(learner, batch, result["log_probs"])
    return result["metrics"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="demo")
    add_batch_arguments(parser)
    options = parser.parse_args()

    correction = RolloutCorrectionConfig(rejection=["geometric_ratio 0.99 1.01"])
    learner = random_learner(
        qwen2(SHAPES[options.shape]),
        lr=1e-12,  # so small that every step has the same log-probs, and rejects the same responses
        algorithm=AlgorithmConfig(rollout_correction=correction),
        **learner_settings(options),
    )
    batch = long_tailed_batch(options, learner.architecture.vocab_size)
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
    steps = {name: functools.partial(step, learner, batch) for name, step in sides.items()}
    times = in_turns(steps, options.steps, 2, learner.device)
    for place, unit in enumerate(("s", "s of CPU")):
        by_side = {name: [result[place] for result in taken] for name, taken in times.items()}
        parts = ", ".join(f"{name} {statistics.median(result):.3f} {unit}" for name, result in by_side.items())
        print(f"{parts}; ratio {median_ratio(by_side['fused'], by_side['with a pass']):.3f}")
    learner.close()


if __name__ == "__main__":
    main()
