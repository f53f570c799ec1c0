"""The updates of a step: actor and critic side by side, one optimizer step for each mini-batch."""

from __future__ import annotations

from megatron_retool.cluster.deployment import Deployment, gather_or_cancel
from megatron_retool.loop.columns import critic_mini_batch, split_mini_batches
from megatron_retool.monitor.metrics import StepTimer
from megatron_retool.monitor.phases import Phase
from megatron_retool.trajectory import TrajectoryBatch


async def update(run: Deployment, batch: TrajectoryBatch, step: int, timer: StepTimer) -> list[dict[str, float]]:
    """Update the actor (from the end of the critic's warm-up on) and the critic, where there is one.

    Returns:
        The metrics of each update, the actor's first.
    """
    mini_batches = list(split_mini_batches(run.config, batch, step))

    async def update_actor() -> list[dict[str, float]]:
        if run.critic is not None and step <= run.config.learner.critic.warmup_steps:
            return []
        with timer.phase(Phase.UPDATE_ACTOR):
            return [await run.learner.update(part, sampling=run.config.rollout.train) for part in mini_batches]

    async def update_critic() -> list[dict[str, float]]:
        if run.critic is None:
            return []
        with timer.phase(Phase.UPDATE_CRITIC):
            return [await run.critic.update_critic(critic_mini_batch(part)) for part in mini_batches]

    actor, critic = await gather_or_cancel([update_actor(), update_critic()])
    return actor + critic
