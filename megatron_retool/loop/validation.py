"""Held-out evaluation of the policy that the engines serve."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from megatron_retool.cluster.deployment import Deployment
from megatron_retool.config import Config, SamplingConfig, TrainerConfig
from megatron_retool.data.prompts import PromptRow
from megatron_retool.loop.metrics import rollout_metrics
from megatron_retool.loop.samples import print_sample, sample_of
from megatron_retool.loop.state import TrainerState
from megatron_retool.loop.validation_metrics import BEHAVIOUR, quick_name
from megatron_retool.loop.validation_schedule import Validation
from megatron_retool.rewards.difficulty import difficulty_metrics
from megatron_retool.rewards.evaluation import EvaluationRecord, evaluation_metrics
from megatron_retool.rewards.manager import RewardManager
from megatron_retool.rollout_rows import rollouts_of, whole_rollouts
from megatron_retool.runs.logger import MetricLogger
from megatron_retool.runs.own_metrics import own_metrics
from megatron_retool.runs.progress import progress_line
from megatron_retool.runs.step_timer import StepTimer
from megatron_retool.trajectory import Trajectory, write_trajectories
from run_files.phases import Phase
from run_files.steps import question_of, step_path


async def validate_after(run: Deployment, state: TrainerState, log: MetricLogger, timer: StepTimer) -> dict[str, float]:
    """The validation that follows the present step, if one does, taken note of for trainer.early_stopping.

    A quick one by which the run ends is followed by a full one.
    """
    step = state.step
    metrics: dict[str, float] = {}
    due = state.validation_due(last=step == run.total_steps)
    if due is Validation.QUICK:
        with timer.phase(Phase.QUICK_VALIDATION):
            metrics |= await validate_quickly(run, step)
        metrics |= state.early_stopping.record(step, metrics)
        if state.early_stopping.stops:
            due = Validation.FULL
    if due is Validation.FULL:
        with timer.phase(Phase.VALIDATION):
            metrics |= await validate(run, step, log)
        metrics |= state.early_stopping.record(step, metrics)
    return metrics


async def validate(run: Deployment, step: int, log: MetricLogger | None = None) -> dict[str, float]:
    """Sample every held-out prompt rollout.val.n times; val-core/* and val-aux/* metrics.

    Trajectories go to validation/step_N.parquet, and the first ``log_val_generations`` are printed as text and shown
    by the loggers of ``log`` that have tables.
    """
    config = run.config
    prompts = run.validation_prompts
    trajectories = await _sampled(run, prompts, config.rollout.val, f"step {step} validation", Phase.VALIDATION)
    texts = _stored(run, trajectories, "validation", step)
    messages = {prompt.group_id: prompt.messages for prompt in prompts}
    first_of_group = [(text, t) for text, t in zip(texts, trajectories, strict=True) if t.index == 0 and t.segment == 0]
    shown = [
        sample_of(t, question_of(messages[t.group_id], prompt), response)
        for (prompt, response), t in first_of_group[: config.trainer.log_val_generations]
    ]
    for number, sample in enumerate(shown, start=1):
        print_sample(run.console, f"step {step}, validation sample {number} of {len(shown)}", sample)
    if log is not None:
        log.log_samples(step, [sample.row() for sample in shown])
    return _metrics(run.config.trainer, run.rewards, trajectories) | difficulty_metrics(whole_rollouts(trajectories))


async def validate_quickly(run: Deployment, step: int) -> dict[str, float]:
    """Sample the prompts of quick validations rollout.quick_val.n times; val-quick/* metrics.

    Trajectories go to validation_quick/step_N.parquet, with the group ids of full validations. None are shown.
    """
    sampling = replace(run.config.rollout.val, n=run.config.rollout.quick_val.n)
    name = f"step {step} quick validation"
    trajectories = await _sampled(run, run.validation_prompts.quick, sampling, name, Phase.QUICK_VALIDATION)
    _stored(run, trajectories, "validation_quick", step)
    metrics = _metrics(run.config.trainer, run.rewards, trajectories)
    return {quick_name(metric): value for metric, value in metrics.items()}


async def _sampled(
    run: Deployment, prompts: Sequence[PromptRow], sampling: SamplingConfig, name: str, phase: Phase
) -> list[Trajectory]:
    """Scored responses of all ``prompts``, in their order."""
    trajectories: list[Trajectory] = []
    with progress_line(run.console, name, len(prompts) * sampling.n) as progress:
        async with contextlib.aclosing(run.rollout.stream(prompts, sampling, "validation")) as groups:
            async for group in groups:
                await asyncio.to_thread(run.rewards.score, group, "validation")
                trajectories += group
                progress.advance(len(rollouts_of(group)))
                run.watchdog.progress(phase)
    return sorted(trajectories, key=lambda t: t.key)


def _stored(run: Deployment, trajectories: Sequence[Trajectory], folder: str, step: int) -> list[tuple[str, str]]:
    """Prompts and responses as text, once they are in the step's file."""
    texts = [run.decode(t) for t in trajectories]
    stored = step_path(run.config.trainer.run_dir / folder, step)
    with run.write_errors.tolerated(stored):
        write_trajectories(trajectories, stored, texts=texts)
    return texts


def _metrics(trainer: TrainerConfig, rewards: RewardManager, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    behaviour = rollout_metrics(trajectories)
    own = own_metrics(trainer, trajectories)
    return {
        **evaluation_metrics(with_all(trajectories), seed=trainer.seed),
        **{f"val-aux/{name}": value for name, value in behaviour.items() if name.startswith(BEHAVIOUR)},
        **{f"val-aux/{name}": value for name, value in own.items()},
        **{f"val-aux/{name}": value for name, value in rewards.take_metrics("validation").items()},
    }


def with_all(trajectories: Sequence[Trajectory]) -> list[EvaluationRecord]:
    """Records of the rollouts by data source, and all of them once more under the source "all"."""
    records = [EvaluationRecord.from_trajectory(trajectory) for trajectory in whole_rollouts(trajectories)]
    return records + [replace(record, data_source="all") for record in records]


async def evaluate_model(config: Config, console: Console) -> None:
    """Validate ``model.path`` without a learner; metrics.jsonl and validation/ under the run's directory."""
    async with Deployment(config, console, with_learner=False) as run:
        with MetricLogger.of_run(config, console, write_errors=run.write_errors) as log:
            log.log(0, await validate(run, 0, log))


async def validate_only(run: Deployment, step: int) -> dict[str, float]:
    """Validate the policy that the engines serve after ``step``. No row of an earlier run is dropped."""
    with MetricLogger.of_run(run.config, run.console, first_step=sys.maxsize, write_errors=run.write_errors) as log:
        metrics = await validate(run, step, log)
        log.log(step, metrics)
    return metrics
