"""The updates of a step, one optimizer step for each mini-batch; their metrics, update by update."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_retool.cluster.deployment import Deployment
from megatron_retool.cluster.learner_group import LearnerGroup
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
    algorithm, sampling = run.config.algorithm, run.config.rollout.train
    kl_in_loss = algorithm.scheduled_kl(step) if algorithm.kl_in_loss else 0.0
    with timer.phase(Phase.UPDATE_ACTOR):
        updates = [await run.learner.update(part, sampling=sampling, kl_in_loss=kl_in_loss) for part in mini_batches]
    if algorithm.kl_in_loss:
        updates = [{**update, "actor/kl_coef": kl_in_loss} for update in updates]
    return updates


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
