"""From prompts to a batch to train on: rollout with dynamic sampling, correction, advantages, mini-batches."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron_retool.algorithms.advantages import compute_advantages
from megatron_retool.algorithms.dynamic_sampling import GroupFilter, RefillDecision, decide_refill, filter_groups
from megatron_retool.algorithms.policy_loss import token_weights
from megatron_retool.algorithms.rollout_correction import rollout_correction
from megatron_retool.config import Config
from megatron_retool.monitor.metrics import StepTimer
from megatron_retool.monitor.progress import ProgressLine, progress_line
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
    """Generate until train_batch_size informative groups are there, or max_generation_rounds are spent (DAPO, 3.2).

    Raises:
        RuntimeError: no group at all is informative.
    """
    config = run.config
    wanted, dynamic = config.data.train_batch_size, config.algorithm.dynamic_sampling
    groups: list[list[Trajectory]] = []
    decision = RefillDecision("generate", wanted, False)
    rounds = 0
    with progress_line(run.console, f"step {step} rollout", 0) as progress:
        while decision.action == "generate":
            rounds += 1
            progress.note(f"round {rounds}, {len(groups)} groups so far")
            groups += await generate_round(run, decision.groups, step, timer, progress)
            found = filter_step(groups, dynamic.metric)
            kept = found.kept_groups if dynamic.enable else [group[0].group_id for group in groups]
            decision = decide_refill(
                len(kept), len(groups), wanted, rounds, dynamic.max_generation_rounds if dynamic.enable else 1
            )
    if decision.action == "skip":
        raise RuntimeError(
            f"step {step}: all {len(groups)} groups of {rounds} rounds have equal rewards, so there is nothing to "
            "learn from; raise algorithm.dynamic_sampling.max_generation_rounds or choose prompts of another difficulty"
        )
    chosen = set(kept[: decision.groups])
    for group in groups:
        for trajectory in group:
            trajectory.reward_info["trained"] = trajectory.group_id in chosen
    generated = [trajectory for group in groups for trajectory in group]
    return Collected(
        kept=[trajectory for trajectory in generated if trajectory.reward_info["trained"]],
        generated=generated,
        metrics={**found.metrics(), "dynamic_sampling/rounds": float(rounds)},
    )


async def generate_round(
    run: Deployment, count: int, step: int, timer: StepTimer, progress: ProgressLine
) -> list[list[Trajectory]]:
    """``count`` new prompts, sampled and scored; groups in order of group id. Scoring overlaps generation."""
    config = run.config
    if config.rollout.replay_dir is not None:
        return replay_groups(run, count, step)
    prompts = run.prompts.next_batch(count)
    progress.extend(count * config.rollout.train.n)
    groups = []
    async for group in run.rollout.stream(prompts, config.rollout.train):
        with timer.phase("reward"):
            await asyncio.to_thread(run.rewards.score, group)
        groups.append(group)
        progress.advance(len(group))
    return sorted(groups, key=lambda group: group[0].group_id)


def replay_groups(run: Deployment, count: int, step: int) -> list[list[Trajectory]]:
    """The groups that an earlier run stored for this step, instead of generating (rollout.replay_dir).

    The data position moves on as if they had been generated.

    Raises:
        ValueError: the stored prompts are not those that this step would have drawn.
    """
    file = Path(run.config.rollout.replay_dir or "") / f"step_{step:06d}.parquet"
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in read_trajectories(file):
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    prompts = run.prompts.next_batch(len(groups))
    for prompt, group in zip(prompts, groups.values(), strict=True):
        if list(prompt.prompt_ids) != group[0].prompt_ids.tolist():
            raise ValueError(f"{file}: group {group[0].group_id} has another prompt than the data give at step {step}")
    return list(groups.values())


def filter_step(groups: list[list[Trajectory]], metric: str) -> GroupFilter:
    rows = [trajectory for group in groups for trajectory in group]
    accuracies = [float(t.reward_info.get("acc", t.reward > 0)) for t in rows]
    values = accuracies if metric == "acc" else [t.reward for t in rows]
    return filter_groups([t.group_id for t in rows], values, accuracies)


def correct_rollout(
    config: Config, batch: TrajectoryBatch, trajectories: Sequence[Trajectory], current_version: int
) -> tuple[TrajectoryBatch, dict[str, float], bool]:
    """Weights and masks against the mismatch of learner and engine, as columns importance_weights and keep.

    ``trajectories`` are the batch's rows; the ones that overlong filtering marked give no loss either.

    Returns:
        The batch, rollout_corr/* metrics, and whether the whole update is to be skipped.
    """
    filtered = np.array([bool(t.reward_info.get("overlong_filtered")) for t in trajectories], dtype=bool)
    result = rollout_correction(
        torch.from_numpy(batch.columns["old_log_probs"]),
        torch.from_numpy(batch.rollout_log_probs),
        torch.from_numpy(batch.loss_mask),
        torch.from_numpy(batch.sequence_ids),
        len(batch),
        torch.from_numpy(batch.turn_ids),
        config.algorithm.rollout_correction,
        weight_versions=torch.from_numpy(batch.weight_versions),
        current_version=current_version,
    )
    keep = result.keep_mask.numpy() & ~np.repeat(filtered, batch.response_lengths)
    batch = batch.with_columns(importance_weights=result.importance_weights.numpy(), keep=keep)
    return batch, result.metrics, result.skip_update


def add_advantages(config: Config, batch: TrajectoryBatch) -> TrajectoryBatch:
    result = compute_advantages(
        config.algorithm,
        rewards=torch.from_numpy(batch.rewards),
        group_ids=torch.from_numpy(batch.group_ids),
        loss_mask=torch.from_numpy(batch.loss_mask),
        sequence_ids=torch.from_numpy(batch.sequence_ids),
    )
    return batch.with_columns(advantages=result.advantages.numpy(), returns=result.returns.numpy())


def split_mini_batches(config: Config, batch: TrajectoryBatch, step: int) -> Iterator[TrajectoryBatch]:
    """Shuffle the responses (seeded by run and step) and cut them into mini-batches, each with its loss_weights.

    Every loss aggregation is a weight per token over the mini-batch as a whole, so the loss does not depend on how the
    learner cuts it into micro-batches or over ranks. Rejected tokens get weight 0.
    """
    order = np.random.default_rng((config.trainer.seed, step)).permutation(len(batch))
    count = max(1, round(len(batch) / config.learner.mini_batch_size))
    for rows in np.array_split(order, count):
        mini_batch = batch.select(np.sort(rows))
        weights = token_weights(
            torch.from_numpy(mini_batch.loss_mask),
            torch.from_numpy(mini_batch.sequence_ids),
            len(mini_batch),
            config.algorithm.loss_aggregation,
            keep_mask=torch.from_numpy(mini_batch.columns["keep"] > 0),
            denominator=config.algorithm.rollout_correction.denominator,
            max_response_length=config.data.max_response_length,
        )
        yield mini_batch.with_columns(loss_weights=weights.numpy())
