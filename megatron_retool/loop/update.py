"""The updates of a step, one optimizer step for each mini-batch; their metrics, update by update."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_retool.algorithms.means import Mean
from megatron_retool.cluster.deployment import Deployment
from megatron_retool.cluster.learner_group import LearnerGroup
from megatron_retool.config import AlgorithmConfig
from megatron_retool.loop.columns import critic_mini_batch
from megatron_retool.runs.step_timer import StepTimer
from megatron_retool.trajectory import TrajectoryBatch
from run_files.phases import Phase


async def update_actor(
    run: Deployment, mini_batches: Sequence[TrajectoryBatch], step: int, timer: StepTimer
) -> list[dict[str, float]]:
    """Teach the policy; nothing during the critic's warm-up, where there is one."""
    if run.critic is not None and step <= run.config.learner.critic.warmup_steps:
        return []
    kl_in_loss = kl_coefficient_of(run.config.algorithm, step)
    sampling = run.config.rollout.train
    with timer.phase(Phase.UPDATE_ACTOR):
        updates = [await run.learner.update(part, sampling=sampling, kl_in_loss=kl_in_loss) for part in mini_batches]
    algorithm = run.config.algorithm
    return [measured(update, algorithm, part, kl_in_loss) for update, part in zip(updates, mini_batches, strict=True)]


def kl_coefficient_of(algorithm: AlgorithmConfig, step: int) -> float:
    """Coefficient of the KL in the loss of ``step``; 0 where there is none."""
    return algorithm.scheduled_kl(step) if algorithm.kl_in_loss else 0.0


def measured(
    update: dict[str, float], algorithm: AlgorithmConfig, mini_batch: TrajectoryBatch, kl_in_loss: float
) -> dict[str, float]:
    """An update's metrics with actor/kl_coef, where the loss has a KL, and its losses as means over their items."""
    over = loss_items(algorithm, mini_batch) if "actor/pg_loss" in update else 0
    losses = {name: Mean(update[name], over) for name in ("actor/pg_loss", "actor/kl_loss") if name in update}
    update = update | losses
    return {**update, "actor/kl_coef": kl_in_loss} if algorithm.kl_in_loss else update


def loss_items(algorithm: AlgorithmConfig, mini_batch: TrajectoryBatch) -> int:
    """What the mini-batch's loss is a mean over: sampled tokens for token-mean, else responses.

    With the denominator "post" only what the rollout correction keeps, which the column keep says.
    """
    counted = mini_batch.loss_mask
    if algorithm.rollout_correction.denominator == "post":
        counted = counted & (mini_batch.columns["keep"] > 0)
    if algorithm.loss_aggregation == "token-mean":
        return int(counted.sum())
    return len(np.unique(mini_batch.token_rollout_ids[counted]))


async def update_critic(
    critic: LearnerGroup | None, mini_batches: Sequence[TrajectoryBatch], timer: StepTimer
) -> list[dict[str, float]]:
    """Teach the value model, where there is one."""
    if critic is None:
        return []
    with timer.phase(Phase.UPDATE_CRITIC):
        updates = [await critic.update_critic(critic_mini_batch(part)) for part in mini_batches]
    # The critic's loss is a mean over all sampled tokens (``critic_mini_batch``).
    return [
        update | {"critic/vf_loss": Mean(update["critic/vf_loss"], int(part.loss_mask.sum()))}
        for update, part in zip(updates, mini_batches, strict=True)
    ]


async def peak_memory(*groups: LearnerGroup | None) -> dict[str, float]:
    """perf/max_*_gb of learner and critic (with /critic behind it): see ``runs.peak_memory``."""
    return {
        f"perf/{name}{'' if group.role == 'learner' else '/' + group.role}": value
        for group in groups
        if group is not None
        for name, value in (await group.peak_memory()).items()
    }
