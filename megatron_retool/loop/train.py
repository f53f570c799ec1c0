"""The RL loop: prompts, rollout, reward, group filter, log-probs, correction, advantages, update, weight sync.

``train_from_checkpoint`` below is the whole algorithm, top to bottom; each line of it is one room of
docs/architecture.md.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from rich.console import Console

from megatron_retool.algorithms.means import mean_metrics
from megatron_retool.cluster.checks import check_model, check_stored_rollouts
from megatron_retool.cluster.deployment import Deployment, gather_or_cancel
from megatron_retool.cluster.learner_failures import LearnerDied
from megatron_retool.config import Config
from megatron_retool.config.old_log_probs import expected_updates, old_log_probs_source
from megatron_retool.loop.asynchronous import step_source
from megatron_retool.loop.columns import add_advantages, add_log_probs, correct_rollout, has_loss, split_mini_batches
from megatron_retool.loop.faults import (
    LearnerRecovery,
    NoSignal,
    RewardFailures,
    SkippedSteps,
    SkipReason,
    StragglerWatch,
    skipped_updates,
)
from megatron_retool.loop.fused_update import learn_fused, source_of
from megatron_retool.loop.metrics import batch_metrics, per_token_metrics, performance_metrics, rollout_metrics
from megatron_retool.loop.profiling import StepProfiler
from megatron_retool.loop.resume import announce_resume, announce_start, contents_after, restore
from megatron_retool.loop.rollout_files import store_step, store_times
from megatron_retool.loop.state import TrainerState
from megatron_retool.loop.update import peak_memory, update_actor, update_critic
from megatron_retool.loop.validation import validate, validate_after, validate_only
from megatron_retool.loop.validation_metrics import check_named_metrics
from megatron_retool.runs.checkpointer import Checkpointer
from megatron_retool.runs.checkpoints import find_resume_point, remove_unfinished, set_aside_later
from megatron_retool.runs.leave import LeaveRequest
from megatron_retool.runs.logger import MetricLogger
from megatron_retool.runs.own_metrics import own_metrics
from megatron_retool.runs.rollouts import check_rollouts, prepare_rollouts
from megatron_retool.runs.step_timer import StepTimer
from megatron_retool.trajectory import Trajectory, TrajectoryBatch
from run_files.phases import Phase


async def train(config: Config, console: Console, leave: LeaveRequest) -> bool:
    """Train until ``trainer.total_steps``, or until ``trainer.early_stopping`` ends the run, from the last complete
    checkpoint where ``trainer.resume_mode`` says so.

    Args:
        leave: when set, a validation is given up, the step under way is finished and checkpointed, and training stops.

    Returns:
        Whether the run is at its end.
    """
    resume = find_resume_point(config.trainer)
    for path in remove_unfinished(config.trainer.run_dir):
        console.print(f"removed {path}: it was not complete, its writing or deletion had been interrupted")
    if resume is not None:
        moved = set_aside_later(config.trainer.run_dir, config.trainer, resume)
        if moved is not None:
            console.print(f"what the run made after {resume.path} was moved to {moved}")
        if announce_resume(config, resume, console) and not config.trainer.val_only:
            return True
    else:
        announce_start(config.model, config.trainer, console)
    check_rollouts(config.trainer.run_dir, config.trainer)
    check_model(config, learns=True)  # once more: of the demo it was not there when the command began
    check_named_metrics(config.trainer, config.data, config.rollout)  # the same
    if not config.trainer.val_only:
        check_stored_rollouts(config.rollout, config.learner, first_step=1 + (0 if resume is None else resume.step))
        announced = old_log_probs_source(
            config.learner, config.algorithm, expected_updates(config.learner, config.data, config.rollout)
        ).sentence
        console.print(announced, markup=False, highlight=False, soft_wrap=True)
    run = Deployment(config, console)
    try:
        async with run.watchdog, run:
            if not config.trainer.val_only:
                prepare_rollouts(config.trainer)
            checkpointer = Checkpointer(config, console, lambda: run.models, resume, run.gpu_phases.saving)
            recovery = LearnerRecovery(run, checkpointer)
            while True:
                try:
                    return await train_from_checkpoint(run, checkpointer, leave)
                except LearnerDied as error:
                    await recovery.after(error)
    finally:
        remove_unfinished(config.trainer.run_dir)  # of a save that was stopped, which no process writes any more


async def train_from_checkpoint(run: Deployment, checkpointer: Checkpointer, leave: LeaveRequest) -> bool:
    """The loop itself, from the newest checkpoint on; metrics of steps that it repeats are dropped.

    Raises:
        LearnerDied: a rank of learner or critic is gone.
    """
    config = run.config
    with run.watchdog.watch(StepTimer()).phase(Phase.RESTORE):
        state = await restore(run, checkpointer)
        with run.activities.part("sending the weights to the engines"):
            await run.weights.sync(state.step)
    if config.trainer.val_only:
        return await leave.interrupting(validate_only(run, state.step)) is not None
    first_step = state.step + bool(state.step)
    async with contextlib.AsyncExitStack() as stack:
        log = stack.enter_context(
            MetricLogger.of_run(config, run.console, first_step=first_step, write_errors=run.write_errors)
        )
        stragglers = StragglerWatch(config, run.console)
        skipped = SkippedSteps(config.trainer.max_skipped_steps)
        reward_failures, no_signal = RewardFailures(run.console), NoSignal(run.console)
        profiler = StepProfiler(run)
        experience = await stack.enter_async_context(step_source(run, state, checkpointer.newest))
        if state.step == 0 and config.trainer.val_before_train:
            validated = await leave.interrupting(validate(run, 0, log))
            if validated is None:
                run.console.print("asked to leave: the first validation was given up, and no step was begun")
                return False
            log.log(0, validated | state.early_stopping.record(0, validated))
        while state.step < run.total_steps:
            state.step += 1
            step = state.step
            timer = run.watchdog.watch(StepTimer())
            await profiler.begin(step)
            with timer.phase(Phase.STEP):
                with timer.phase(Phase.GENERATION):
                    collected = await experience.take(step)
                reward_failures.record(step, collected.generated)
                no_signal.record(step, collected.generated)
                saved = await checkpointer.finish()
                await run.weights.before_update()
                learned = await learn(run, state, collected.kept, timer)
                batch = learned.batch
                with timer.phase(Phase.WEIGHT_SYNC):
                    sync_metrics = await run.weights.sync(step)
                experience.weights_arrived()
            await profiler.end(step, timer)
            metrics = {
                "training/global_step": float(step),
                "training/epoch": float(run.prompts.epoch),
                **rollout_metrics(collected.generated),
                **own_metrics(config.trainer, collected.generated),
                **collected.metrics,
                **batch_metrics(batch, config.data.max_prompt_length, config.data.max_response_length),
                **learned.metrics,
                **sync_metrics,
                **saved,
                **skipped.record(step, learned.skipped),
                **stragglers.record(run.learner, run.critic),
                **performance_metrics(
                    int(batch.total_lengths.sum()),
                    batch.num_rollouts,
                    timer.seconds[Phase.STEP],
                    config.learner.world_size,
                ),
                **await peak_memory(run.learner, run.critic),
                **per_token_metrics(timer.seconds, int(batch.prompt_lengths.sum()), int(batch.response_lengths.sum())),
            }
            store_step(run, step, collected.generated, batch)
            validated = await leave.interrupting(validate_after(run, state, log, timer))
            if validated is None:
                run.console.print(f"asked to leave: the validation after step {step} was given up")
            metrics |= validated or {}
            last = step == run.total_steps or state.early_stopping.stops
            leaving = leave.is_set()
            complete = last or leaving or state.save_due() or checkpointer.overdue
            weights = state.save_weights_due() or checkpointer.weights_overdue
            if complete or weights:
                with timer.phase(Phase.SAVE_CHECKPOINT):
                    contents = contents_after(run, state, experience.at_checkpoint(collected)) if complete else None
                    metrics |= await checkpointer.write(step, contents, wait=last or leaving, weights=weights)
            store_times(config.trainer.run_dir, run.write_errors, step, timer, stragglers.seconds)
            # Before the checkpoint has its name: a run that is killed between the two repeats the step, row and all.
            log.log(step, metrics | timer.metrics())
            await checkpointer.commit()
            skipped.check(step)
            if leaving and not last:
                run.console.print(f"asked to leave: checkpoint of step {step} of {run.total_steps} is complete")
                return False
            if last and step < run.total_steps:
                run.console.print(f"{state.early_stopping.reason}: step {step} of {run.total_steps} is the last one")
                return True
            # Else they would stay while the next step is generated: their routed experts may be gigabytes.
            del collected, learned, batch
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
    with timer.phase(Phase.PHASE_SWITCH):
        await run.gpu_phases.training()
    if source_of(run.config.learner, run.config.algorithm, batch).fused:
        batch, metrics, updates = await learn_fused(run, state, batch, kept, timer)
    else:
        batch, metrics = await add_log_probs(run, batch, kept, timer)
        with timer.phase(Phase.ADVANTAGE):
            batch, correction_metrics, beyond_limit = correct_rollout(
                run.config.learner, run.config.algorithm, batch, kept, step - 1
            )
            batch, kl_metrics = add_advantages(batch, kept, state)
        metrics |= correction_metrics | kl_metrics | {"actor/fused_old_log_probs": 0.0}
        if beyond_limit:
            return Learned(batch, metrics, SkipReason.MISMATCH)
        updates = []
        if has_loss(batch):
            mini_batches = list(split_mini_batches(run.config, batch, step))
            actor, critic = await gather_or_cancel(
                [update_actor(run, mini_batches, step, timer), update_critic(run.critic, mini_batches, timer)]
            )
            updates = [*actor, *critic]
    if not has_loss(batch):
        return Learned(batch, metrics, SkipReason.REJECTED)
    return Learned(batch, metrics | mean_metrics(updates), skipped_updates(updates))
