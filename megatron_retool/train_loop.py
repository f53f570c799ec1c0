"""The RL loop: prompts, rollout, reward, group filter, log-probs, correction, advantages, update, weight sync.

``train`` below is the whole algorithm, top to bottom; each line of it is one room of docs/architecture.md.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from rich.console import Console

from megatron_retool.cluster.deployment import Deployment
from megatron_retool.config import Config
from megatron_retool.experience import add_advantages, collect_groups, correct_rollout, split_mini_batches
from megatron_retool.monitor.logger import MetricLogger
from megatron_retool.monitor.metrics import StepTimer, batch_metrics, performance_metrics, rollout_metrics
from megatron_retool.run_state import (
    Checkpoint,
    checkpoint_workspace,
    commit_checkpoint,
    find_resume_point,
    prune_checkpoints,
)
from megatron_retool.trajectory import TrajectoryBatch, write_trajectories
from megatron_retool.validation import validate


async def train(config: Config, console: Console, leave: asyncio.Event) -> bool:
    """Train until ``trainer.total_steps``, from the last complete checkpoint where ``trainer.resume_mode`` says so.

    Args:
        leave: when set, the step under way is finished and checkpointed, and training stops there.

    Returns:
        Whether the last step was reached.
    """
    resume = find_resume_point(config)
    if resume is not None and resume.step == config.trainer.total_steps:
        console.print(f"{resume.path} is the last step already: nothing to train")
        return True
    async with Deployment(config, console) as run:
        step = await restore(run, resume)
        await run.sync_weights(step)
        with MetricLogger(config.run_dir, config.trainer.loggers, first_step=step + bool(step), console=console) as log:
            if step == 0 and config.trainer.val_before_train:
                log.log(0, await validate(run, step=0))
            while step < run.total_steps:
                step += 1
                timer = StepTimer()
                with timer.phase("step"):
                    with timer.phase("gen"):
                        collected = await collect_groups(run, step, timer)
                    batch = TrajectoryBatch.from_trajectories(collected.kept)
                    with timer.phase("old_log_prob"):
                        batch = await add_log_probs(run, batch)
                    with timer.phase("adv"):
                        batch, correction_metrics, skip = correct_rollout(config, batch, collected.kept, step - 1)
                        batch = add_advantages(config, batch)
                    with timer.phase("update_actor"):
                        updates = [] if skip else await update(run, batch, step)
                    with timer.phase("weight_sync"):
                        sync_metrics = await run.sync_weights(step)
                metrics = {
                    **rollout_metrics(collected.generated),
                    **collected.metrics,
                    **batch_metrics(batch, config.data.max_prompt_length, config.data.max_response_length),
                    **correction_metrics,
                    **mean_metrics(updates),
                    **sync_metrics,
                    "actor/skipped_updates": float(skip),
                    **performance_metrics(
                        int(batch.total_lengths.sum()), timer.seconds["step"], config.learner.world_size
                    ),
                }
                write_trajectories(
                    collected.generated,
                    config.run_dir / "rollouts" / f"step_{step:06d}.parquet",
                    texts=[run.decode(t) for t in collected.generated],
                )
                last = step == run.total_steps
                if last or due(step, config.trainer.test_freq):
                    with timer.phase("testing"):
                        metrics |= await validate(run, step)
                leaving = leave.is_set()
                if last or leaving or due(step, config.trainer.save_freq):
                    with timer.phase("save_checkpoint"):
                        await save(run, step)
                log.log(step, metrics | timer.metrics())
                if leaving and not last:
                    console.print(f"asked to leave: checkpoint of step {step} of {run.total_steps} is complete")
                    return False
    return True


def due(step: int, frequency: int) -> bool:
    return frequency > 0 and step % frequency == 0


async def add_log_probs(run: Deployment, batch: TrajectoryBatch) -> TrajectoryBatch:
    """old_log_probs and entropy with the training kernels, and ref_log_probs where a KL term needs them."""
    algorithm = run.config.algorithm
    temperature = run.config.rollout.train.temperature
    if algorithm.rollout_correction.bypass_old_log_probs:
        batch = batch.with_columns(old_log_probs=batch.rollout_log_probs)
    else:
        result = await run.learner.log_probs(batch, temperature=temperature)
        batch = batch.with_columns(old_log_probs=result["log_probs"], entropy=result["entropy"])
    if algorithm.kl_in_loss or algorithm.kl_in_reward:
        reference = await run.learner.log_probs(batch, reference=True, temperature=temperature)
        batch = batch.with_columns(ref_log_probs=reference["log_probs"])
    return batch


async def update(run: Deployment, batch: TrajectoryBatch, step: int) -> list[dict[str, float]]:
    """One optimizer step for each mini-batch."""
    return [
        await run.learner.update(mini_batch, temperature=run.config.rollout.train.temperature)
        for mini_batch in split_mini_batches(run.config, batch, step)
    ]


def mean_metrics(rows: list[dict[str, float]]) -> dict[str, float]:
    """Mean over the mini-batches of a step, name by name."""
    names = {name for row in rows for name in row}
    return {name: float(np.mean([row[name] for row in rows if name in row])) for name in sorted(names)}


async def restore(run: Deployment, resume: Checkpoint | None) -> int:
    """Put learner and data where the checkpoint left them; the step that was last completed."""
    if resume is None:
        return 0
    run.console.print(f"resuming from {resume.path} (step {resume.step} of {run.total_steps})")
    await run.learner.load(resume.learner)
    run.prompts.load_state_dict(resume.read("prompt_source.json"))
    state = resume.read("trainer_state.json")
    if state["step"] != resume.step:
        raise ValueError(f"{resume.path}/trainer_state.json says step {state['step']}: the checkpoint was renamed")
    return resume.step


async def save(run: Deployment, step: int) -> None:
    """A checkpoint that appears complete or not at all, then retention."""
    workspace = checkpoint_workspace(run.config.run_dir, step)
    await run.learner.save(workspace / "learner")
    files: dict[str, dict[str, Any]] = {
        "prompt_source.json": run.prompts.state_dict(),
        "trainer_state.json": {"step": step, "total_steps": run.total_steps, "seed": run.config.trainer.seed},
    }
    commit_checkpoint(workspace, step, files)
    prune_checkpoints(run.config.run_dir, run.config.trainer.keep_checkpoints)
