"""Held-out evaluation of the policy that the engines serve."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from megatron_retool.cluster.deployment import Deployment
from megatron_retool.config import Config
from megatron_retool.loop.samples import print_sample, question_of, sample_of
from megatron_retool.monitor.logger import MetricLogger
from megatron_retool.monitor.metrics import rollout_metrics
from megatron_retool.monitor.phases import Phase
from megatron_retool.monitor.progress import progress_line
from megatron_retool.rewards.evaluation import EvaluationRecord, evaluation_metrics
from megatron_retool.trajectory import Trajectory, write_trajectories

_SHOWN = ("num_turns/mean", "num_turns/max", "num_turns/min", "tool/use_rate", "tool/success_rate", "code/")


async def validate(run: Deployment, step: int, log: MetricLogger | None = None) -> dict[str, float]:
    """Sample every held-out prompt rollout.val.n times; val-core/* and val-aux/* metrics.

    Trajectories go to validation/step_N.parquet, and the first ``log_val_generations`` are printed as text and shown
    by the loggers of ``log`` that have tables.
    """
    config = run.config
    prompts = run.validation_prompts
    trajectories: list[Trajectory] = []
    with progress_line(run.console, f"step {step} validation", len(prompts) * config.rollout.val.n) as progress:
        async for group in run.rollout.stream(prompts, config.rollout.val, "validation"):
            await asyncio.to_thread(run.rewards.score, group, "validation")
            trajectories += group
            progress.advance(len(group))
            run.watchdog.progress(Phase.VALIDATION)
    trajectories.sort(key=lambda t: (t.group_id, t.index))
    texts = [run.decode(t) for t in trajectories]
    stored = config.run_dir / "validation" / f"step_{step:06d}.parquet"
    with run.write_errors.tolerated(stored):
        write_trajectories(trajectories, stored, texts=texts)
    messages = {prompt.group_id: prompt.messages for prompt in prompts}
    first_of_group = [(text, t) for text, t in zip(texts, trajectories, strict=True) if t.index == 0]
    shown = [
        sample_of(t, question_of(messages[t.group_id], prompt), response)
        for (prompt, response), t in first_of_group[: config.trainer.log_val_generations]
    ]
    for number, sample in enumerate(shown, start=1):
        print_sample(run.console, f"step {step}, validation sample {number} of {len(shown)}", sample)
    if log is not None:
        log.log_samples(step, [sample.row() for sample in shown])
    behaviour = rollout_metrics(trajectories)
    return {
        **evaluation_metrics(with_all(trajectories), seed=config.trainer.seed),
        **{f"val-aux/{name}": value for name, value in behaviour.items() if name.startswith(_SHOWN)},
        **{f"val-aux/{name}": value for name, value in run.rewards.take_metrics("validation").items()},
    }


def with_all(trajectories: Sequence[Trajectory]) -> list[EvaluationRecord]:
    """Records by data source, and all of them once more under the source "all"."""
    records = [EvaluationRecord.from_trajectory(trajectory) for trajectory in trajectories]
    return records + [replace(record, data_source="all") for record in records]


async def evaluate_model(config: Config, console: Console) -> None:
    """Validate ``model.path`` without a learner; metrics.jsonl and validation/ under the run's directory."""
    async with Deployment(config, console, with_learner=False) as run:
        with MetricLogger.of_run(config, console, write_errors=run.write_errors) as log:
            log.log(0, await validate(run, 0, log))


async def validate_only(run: Deployment, step: int) -> None:
    """Validate the policy that the engines serve after ``step``. No row of an earlier run is dropped."""
    with MetricLogger.of_run(run.config, run.console, first_step=sys.maxsize, write_errors=run.write_errors) as log:
        log.log(step, await validate(run, step, log))
