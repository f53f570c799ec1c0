"""The RL loop: prompts, rollout, reward, group filter, log-probs, correction, advantages, update, weight sync.

``train_from_checkpoint`` below is the whole algorithm, top to bottom; each line of it is one room of
docs/architecture.md.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from megatron_retool.cluster.deployment import Deployment, gather_or_cancel
from megatron_retool.cluster.learner_group import LearnerDied
from megatron_retool.config import Config
from megatron_retool.loop.columns import (
    add_advantages,
    add_log_probs,
    correct_rollout,
    critic_mini_batch,
    split_mini_batches,
    write_estimates,
)
from megatron_retool.loop.experience import Collected, Experience
from megatron_retool.loop.faults import (
    CheckpointSaves,
    LearnerRecovery,
    SkippedSteps,
    SkipReason,
    StragglerWatch,
    nonfinite_updates,
)
from megatron_retool.loop.state import TrainerState
from megatron_retool.loop.validation import validate
from megatron_retool.monitor.logger import MetricLogger
from megatron_retool.monitor.metrics import StepTimer, batch_metrics, performance_metrics, rollout_metrics
from megatron_retool.runs.checkpoints import (
    Checkpoint,
    checkpoint_attempt,
    checkpoint_in_progress,
    commit_checkpoint,
    find_resume_point,
    prune_checkpoints,
    set_aside_later,
)
from megatron_retool.runs.leave import LeaveRequest
from megatron_retool.trajectory import Trajectory, TrajectoryBatch, write_trajectories
from sglang_rollout.agent.paused_groups import read_paused_groups, write_paused_groups


async def train(config: Config, console: Console, leave: LeaveRequest) -> bool:
    """Train until ``trainer.total_steps``, from the last complete checkpoint where ``trainer.resume_mode`` says so.

    Args:
        leave: when set, the step under way is finished and checkpointed, and training stops there.

    Returns:
        Whether the last step was reached.
    """
    resume = find_resume_point(config)
    moved = set_aside_later(config, resume)
    if moved is not None:
        console.print(f"what the run made after {resume.path} was moved to {moved}")
    if resume is not None and resume.step == config.trainer.total_steps:
        console.print(f"{resume.path} is the last step already: nothing to train")
        return True
    run = Deployment(config, console)
    async with run.watchdog, run:
        run.checkpoint = resume
        recovery = LearnerRecovery(run)
        while True:
            try:
                return await train_from_checkpoint(run, leave)
            except LearnerDied as error:
                await recovery.after(error)


async def train_from_checkpoint(run: Deployment, leave: LeaveRequest) -> bool:
    """The loop itself, from ``run.checkpoint`` on; metrics of steps that it repeats are dropped.

    Raises:
        LearnerDied: a rank of learner or critic is gone.
    """
    config = run.config
    with run.watchdog.watch(StepTimer()).phase("restore"):
        state = await restore(run)
        await run.sync_weights(state.step)
    first_step = state.step + bool(state.step)
    async with contextlib.AsyncExitStack() as stack:
        log = stack.enter_context(
            MetricLogger(
                config.run_dir,
                config.trainer.loggers,
                first_step=first_step,
                console=run.console,
                write_errors=run.write_errors,
            )
        )
        saves = CheckpointSaves(config, run.console)
        stragglers = StragglerWatch(config, run.console)
        skipped = SkippedSteps(config.trainer.max_skipped_steps)
        experience = await stack.enter_async_context(Experience(run, state))
        if state.step == 0 and config.trainer.val_before_train:
            log.log(0, await validate(run, step=0))
        while state.step < run.total_steps:
            state.step += 1
            step = state.step
            timer = run.watchdog.watch(StepTimer())
            with timer.phase("step"):
                with timer.phase("gen"):
                    collected = await experience.take(step)
                if run.pending_save is not None:
                    await saves.attempt(finish_save(run), required=False)
                learned = await learn(run, state, collected.kept, timer)
                batch = learned.batch
                with timer.phase("weight_sync"):
                    sync_metrics = await run.sync_weights(step)
            metrics = {
                **rollout_metrics(collected.generated),
                **collected.metrics,
                **batch_metrics(batch, config.data.max_prompt_length, config.data.max_response_length),
                **learned.metrics,
                **sync_metrics,
                **skipped.record(step, learned.skipped),
                **stragglers.record(run.learner, run.critic),
                **performance_metrics(int(batch.total_lengths.sum()), timer.seconds["step"], config.learner.world_size),
            }
            store(run, step, collected, batch)
            last = step == run.total_steps
            if last or state.validation_due():
                with timer.phase("testing"):
                    metrics |= await validate(run, step)
            leaving = leave.is_set()
            if last or leaving or state.save_due() or saves.overdue:
                with timer.phase("save_checkpoint"):
                    saving = save(run, state, collected, wait=last or leaving)
                    metrics |= await saves.attempt(saving, required=last or leaving)
            log.log(step, metrics | timer.metrics())
            skipped.check(step)
            if leaving and not last:
                run.console.print(f"asked to leave: checkpoint of step {step} of {run.total_steps} is complete")
                return False
    return True


@dataclass(frozen=True)
class Learned:
    """What a step taught: its batch with every column, metrics, and why no weight was changed, if none was."""

    batch: TrajectoryBatch
    metrics: dict[str, float]
    skipped: SkipReason | None


async def learn(run: Deployment, state: TrainerState, kept: list[Trajectory], timer: StepTimer) -> Learned:
    """Log-probs, correction, advantages and update of one step's trajectories."""
    batch, step = TrajectoryBatch.from_trajectories(kept), state.step
    if not kept:
        return Learned(batch, {}, SkipReason.NO_SIGNAL)
    with timer.phase("turn"):
        await run.turns.training()
    batch = await add_log_probs(run, batch, timer)
    with timer.phase("adv"):
        batch, metrics, beyond_limit = correct_rollout(run.config, batch, kept, step - 1)
        batch, kl_metrics = add_advantages(batch, kept, state)
    metrics |= kl_metrics
    if beyond_limit:
        return Learned(batch, metrics, SkipReason.MISMATCH)
    if not batch.columns["keep"][batch.loss_mask].any():
        return Learned(batch, metrics, SkipReason.REJECTED)
    updates = await update(run, batch, step, timer)
    return Learned(batch, metrics | mean_metrics(updates), SkipReason.NONFINITE if nonfinite_updates(updates) else None)


def store(run: Deployment, step: int, collected: Collected, batch: TrajectoryBatch) -> None:
    """rollouts/step_N.parquet and step_N.learner.parquet, each where the disk has room for it."""
    stored = run.config.run_dir / "rollouts" / f"step_{step:06d}"
    texts = [run.decode(t) for t in collected.generated]
    with run.write_errors.tolerated(stored.with_suffix(".parquet")):
        write_trajectories(collected.generated, stored.with_suffix(".parquet"), texts)
    with run.write_errors.tolerated(stored.with_suffix(".learner.parquet")):
        write_estimates(batch, stored.with_suffix(".learner.parquet"))


async def update(run: Deployment, batch: TrajectoryBatch, step: int, timer: StepTimer) -> list[dict[str, float]]:
    """One optimizer step of the actor for each mini-batch, and of the critic where there is one, side by side."""
    mini_batches = list(split_mini_batches(run.config, batch, step))

    async def update_actor() -> list[dict[str, float]]:
        if run.critic is not None and step <= run.config.learner.critic.warmup_steps:
            return []
        with timer.phase("update_actor"):
            return [await run.learner.update(part, sampling=run.config.rollout.train) for part in mini_batches]

    async def update_critic() -> list[dict[str, float]]:
        if run.critic is None:
            return []
        with timer.phase("update_critic"):
            return [await run.critic.update_critic(critic_mini_batch(part)) for part in mini_batches]

    actor, critic = await gather_or_cancel([update_actor(), update_critic()])
    return actor + critic


def mean_metrics(rows: list[dict[str, float]]) -> dict[str, float]:
    """Mean over the mini-batches of a step, name by name."""
    names = {name for row in rows for name in row}
    return {name: float(np.mean([row[name] for row in rows if name in row])) for name in sorted(names)}


async def restore(run: Deployment) -> TrainerState:
    """Put learner, critic, data and paused groups where the checkpoint left them; the state after its step."""
    state, resume = TrainerState.first(run.config), run.checkpoint
    run.pending_save = None
    if resume is None:
        return state
    run.console.print(f"resuming from {resume.path} (step {resume.step} of {run.total_steps})")
    await run.turns.training()
    await run.learner.load(resume.learner)
    if run.critic is not None:
        await run.critic.load(resume.critic)
    run.prompts.load_state_dict(resume.read("prompt_source.json"))
    if run.config.rollout.partial.enable and resume.paused_groups.exists():
        paused = read_paused_groups(resume.paused_groups)
        run.rollout.restore_paused(paused, run.prompts.take_unfinished([group.group_id for group in paused]))
    state.load_state_dict(resume.read("trainer_state.json"))
    if state.step != resume.step:
        raise ValueError(f"{resume.path}/trainer_state.json says step {state.step}: rename the checkpoint back")
    return state


async def save(run: Deployment, state: TrainerState, collected: Collected, *, wait: bool) -> None:
    """A checkpoint after the step of ``collected`` that appears complete or not at all, then retention.

    With trainer.async_save the learner only copies its state here and writes it while the next step is generated;
    ``finish_save`` completes the checkpoint. ``wait`` completes it at once.

    Raises:
        SaveError: the disk is full.
    """
    await finish_save(run)
    files: dict[str, dict[str, Any]] = {
        "prompt_source.json": collected.prompt_state,
        "trainer_state.json": {**state.state_dict(), "total_steps": run.total_steps, "seed": run.config.trainer.seed},
    }
    asynchronous = run.config.trainer.async_save and not wait
    async with run.turns.saving():
        with checkpoint_attempt(run.config.run_dir, state.step) as workspace:
            await run.learner.save(workspace / "learner", asynchronous=asynchronous)
            if run.critic is not None:
                await run.critic.save(workspace / "critic", asynchronous=asynchronous)
            if collected.paused:
                write_paused_groups(collected.paused, Checkpoint(workspace, state.step).paused_groups)
    run.pending_save = (state.step, files)
    if not asynchronous:
        await finish_save(run)


async def finish_save(run: Deployment) -> None:
    """Complete the checkpoint that is being written, if there is one.

    Raises:
        SaveError: the disk is full.
    """
    if run.pending_save is None:
        return
    (step, files), run.pending_save = run.pending_save, None
    with checkpoint_in_progress(run.config.run_dir, step) as workspace:
        for group in (run.learner, run.critic):
            if group is not None:
                await group.finish_save()
        run.checkpoint = commit_checkpoint(workspace, step, files)
    prune_checkpoints(run.config, run.checkpoint)
