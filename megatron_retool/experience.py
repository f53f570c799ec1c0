"""From prompts to a batch that can be trained on: rollout with dynamic sampling, correction, advantages, mini-batches."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron_retool.algorithms.advantages import compute_advantages
from megatron_retool.algorithms.dynamic_sampling import is_informative, next_round_size
from megatron_retool.algorithms.policy_loss import token_weights
from megatron_retool.algorithms.rollout_correction import rollout_correction
from megatron_retool.config import Config
from megatron_retool.monitor.metrics import StepTimer
from megatron_retool.monitor.progress import progress_line
from megatron_retool.trajectory import Trajectory, TrajectoryBatch, read_trajectories

if TYPE_CHECKING:
    from megatron_retool.cluster.deployment import Deployment


@dataclass
class Collected:
    """A step's trajectories: ``kept`` are trained on (whole groups, in order of group), ``generated`` is everything."""

    kept: list[Trajectory]
    generated: list[Trajectory]
    metrics: dict[str, float] = field(default_factory=dict)


async def collect_groups(run: Deployment, step: int, timer: StepTimer) -> Collected:
    """Generate until train_batch_size informative groups are there, or max_generation_rounds are spent (DAPO eq. 11).

    A group whose members all have the same reward gives no gradient; it is dropped and replaced from new prompts.

    Raises:
        RuntimeError: no group at all is informative.
    """
    config = run.config
    wanted = config.data.train_batch_size
    dynamic = config.algorithm.dynamic_sampling
    rounds = dynamic.max_generation_rounds if dynamic.enable else 1
    groups: list[list[Trajectory]] = []
    kept: list[list[Trajectory]] = []
    with progress_line(run.console, f"step {step} rollout", wanted * config.rollout.train.n) as progress:
        for round_index in range(rounds):
            size = next_round_size(wanted, len(kept), len(groups)) if round_index else wanted
            prompts = run.prompts.next_batch(size)
            if round_index:
                progress.extend(size * config.rollout.train.n)
            fresh = []
            async for group in generate(run, prompts, step):
                with timer.phase("reward"):
                    await asyncio.to_thread(run.rewards.score, group)
                fresh.append(group)
                progress.advance(len(group))
                progress.note(f"round {round_index + 1}, kept {len(kept)} of {wanted} groups")
            fresh.sort(key=lambda group: group[0].group_id)
            groups += fresh
            kept += [g for g in fresh if not dynamic.enable or is_informative(g, dynamic.metric)]
            if len(kept) >= wanted:
                break
    if not kept:
        raise RuntimeError(
            f"step {step}: all {len(groups)} groups of {rounds} rounds have equal rewards, so there is nothing to learn "
            "from; raise algorithm.dynamic_sampling.max_generation_rounds or choose prompts of another difficulty"
        )
    kept_ids = {group[0].group_id for group in kept[:wanted]}
    for group in groups:
        for trajectory in group:
            trajectory.reward_info["trained"] = group[0].group_id in kept_ids
    all_correct = sum(all(t.reward > 0 for t in g) for g in groups)
    all_wrong = sum(all(t.reward <= 0 for t in g) for g in groups)
    return Collected(
        kept=[t for group in kept[:wanted] for t in group],
        generated=[t for group in groups for t in group],
        metrics={
            "dynamic_sampling/kept_groups": float(len(kept_ids)),
            "dynamic_sampling/generated_groups": float(len(groups)),
            "dynamic_sampling/all_correct": all_correct / len(groups),
            "dynamic_sampling/all_wrong": all_wrong / len(groups),
        },
    )


def correct_rollout(config: Config, batch: TrajectoryBatch) -> tuple[TrajectoryBatch, dict[str, float], bool]:
    """Weights and masks against the mismatch of learner and engine, as columns importance_weights and keep."""
    result = rollout_correction(
        torch.from_numpy(batch.columns["old_log_probs"]),
        torch.from_numpy(batch.rollout_log_probs),
        torch.from_numpy(batch.loss_mask),
        torch.from_numpy(batch.sequence_ids),
        len(batch),
        torch.from_numpy(batch.turn_ids),
        config.algorithm.rollout_correction,
    )
    batch = batch.with_columns(importance_weights=result.importance_weights.numpy(), keep=result.keep_mask.numpy())
    return batch, result.metrics, result.skip_update


def add_advantages(config: Config, batch: TrajectoryBatch) -> TrajectoryBatch:
    advantages = compute_advantages(
        config.algorithm,
        rewards=torch.from_numpy(batch.rewards),
        group_ids=torch.from_numpy(batch.group_ids),
        loss_mask=torch.from_numpy(batch.loss_mask),
        sequence_ids=torch.from_numpy(batch.sequence_ids),
    )
    return batch.with_columns(advantages=advantages.numpy())


def split_mini_batches(config: Config, batch: TrajectoryBatch, step: int) -> Iterator[TrajectoryBatch]:
    """Shuffle the responses (seeded by run and step) and cut them into mini-batches, each with its loss_weights.

    Every loss aggregation is a weight per token over the mini-batch as a whole, so the loss does not depend on how the
    learner cuts it into micro-batches or over ranks. Rejected tokens get weight 0; whether they count in the
    denominator is algorithm.rollout_correction.denominator.
    """
    order = np.random.default_rng((config.trainer.seed, step)).permutation(len(batch))
    count = max(1, round(len(batch) / config.learner.mini_batch_size))
    correction = config.algorithm.rollout_correction
    for rows in np.array_split(order, count):
        mini_batch = batch.select(np.sort(rows))
        keep = mini_batch.columns["keep"].astype(bool)
        counted = mini_batch.loss_mask & keep if correction.denominator == "post" else mini_batch.loss_mask
        weights = token_weights(
            torch.from_numpy(counted),
            torch.from_numpy(mini_batch.sequence_ids),
            len(mini_batch),
            config.algorithm.loss_aggregation,
            max_length=config.data.max_response_length,
        )
        yield mini_batch.with_columns(loss_weights=weights.numpy() * keep)
