"""The updates of a step, one optimizer step for each mini-batch; their metrics, update by update."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_retool.cluster.deployment import Deployment
from megatron_retool.cluster.learner_group import LearnerGroup
from megatron_retool.config import Config
from megatron_retool.loop.columns import critic_mini_batch
from megatron_retool.monitor.metrics import StepTimer
from megatron_retool.monitor.phases import Phase
from megatron_retool.trajectory import TrajectoryBatch


async def update_actor(
    run: Deployment, mini_batches: Sequence[TrajectoryBatch], step: int, timer: StepTimer
) -> list[dict[str, float]]:
    """Teach the policy; nothing during the critic's warm-up, where there is one."""
    if run.critic is not None and step <= run.config.learner.critic.warmup_steps:
        return []
    kl_in_loss = kl_coefficient_of(run.config, step)
    sampling = run.config.rollout.train
    with timer.phase(Phase.UPDATE_ACTOR):
        updates = [await run.learner.update(part, sampling=sampling, kl_in_loss=kl_in_loss) for part in mini_batches]
    return [with_kl_coefficient(update, run.config, kl_in_loss) for update in updates]


def kl_coefficient_of(config: Config, step: int) -> float:
    """Coefficient of the KL in the loss of ``step``; 0 where there is none."""
    return config.algorithm.scheduled_kl(step) if config.algorithm.kl_in_loss else 0.0


def with_kl_coefficient(update: dict[str, float], config: Config, kl_in_loss: float) -> dict[str, float]:
    """An update's metrics with actor/kl_coef, where the loss has a KL."""
    return {**update, "actor/kl_coef": kl_in_loss} if config.algorithm.kl_in_loss else update


async def update_critic(
    run: Deployment, mini_batches: Sequence[TrajectoryBatch], timer: StepTimer
) -> list[dict[str, float]]:
    """Teach the value model, where there is one."""
    if run.critic is None:
        return []
    with timer.phase(Phase.UPDATE_CRITIC):
        return [await run.critic.update_critic(critic_mini_batch(part)) for part in mini_batches]


async def peak_memory(*groups: LearnerGroup | None) -> dict[str, float]:
    """perf/max_*_gb of learner and critic (with /critic behind it): see ``monitor.memory.peak_memory``."""
    return {
        f"perf/{name}{'' if group.role == 'learner' else '/' + group.role}": value
        for group in groups
        if group is not None
        for name, value in (await group.peak_memory()).items()
    }
