"""The loop of one rank of fine-tuning, over all stages."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from conversion.files.directory import COMPLETE_NAME, local_directory
from conversion.model.architecture import Architecture
from megatron_retool.algorithms.stage_schedule import is_multiple
from megatron_retool.config import Config, ConfigError, SFTStage
from megatron_retool.data.preference_dataset import PreferenceDataset
from megatron_retool.data.scored_dataset import ScoredDataset
from megatron_retool.data.sft_dataset import BatchOrder, SFTDataset
from megatron_retool.data.tokenizer import load_tokenizer
from megatron_retool.runs.checkpointer import Checkpointer, Contents
from megatron_retool.runs.checkpoints import (
    Checkpoint,
    find_resume_point,
    remove_unfinished,
    set_aside,
    set_aside_later,
    workspace_path,
)
from megatron_retool.runs.leave import LeaveRequest
from megatron_retool.runs.logger import MetricLogger
from megatron_retool.runs.peak_memory import peak_memory
from megatron_retool.runs.progress import progress_line
from megatron_retool.sft.preferences import preference_loss, preference_update
from megatron_retool.sft.stage import Dataset, FineTuningStage, Window
from run_files.atomic_files import write_text

if TYPE_CHECKING:
    from megatron_retool.learner.learner import Learner

_VALIDATION_BATCHES = 8
"""Batches whose conversations are put through the model in one call for the validation loss."""


class Run:
    """The loop of one rank."""

    def __init__(self, config: Config, leave: LeaveRequest, console: Console | None = None) -> None:
        self.config = config
        self.leave = leave
        self.rank = int(os.environ.get("RANK", "0"))
        self.console = console or Console(quiet=self.rank != 0, soft_wrap=not sys.stdout.isatty(), emoji=False)

    def run(self) -> bool:
        """Train; whether all stages are done."""
        config = self.config
        if config.trainer.resume_mode == "disable" and self.rank == 0:
            set_aside(config.trainer.run_dir)
        resume = find_resume_point(config.trainer)
        # With resume_path the run goes back, and rank 0 may be moving the marker just now.
        done = config.trainer.resume_mode == "auto" and (config.trainer.run_dir / COMPLETE_NAME).exists()
        if resume is not None and done:
            self.console.print(f"{config.trainer.run_dir} is complete: its last checkpoint is {resume.path}")
            return True
        if self.rank == 0:
            for path in remove_unfinished(config.trainer.run_dir):
                self.console.print(f"removed {path}: it was not complete, its writing or deletion had been interrupted")
        self.stages = self._load_data()
        state = self._resume_state(resume)
        if resume is not None and self.rank == 0:
            moved = set_aside_later(config.trainer.run_dir, config.trainer, resume)
            if moved is not None:
                self.console.print(f"what the run made after {resume.path} was moved to {moved}")
        stage = self.stages[state["stage"]]

        from megatron_retool.learner.learner import Learner

        self.learner = Learner(
            # Random conversations seldom begin alike, and attention that shares what they begin with takes longer.
            replace(config, learner=replace(config.learner, share_prefixes=False)),
            optimizer=stage.settings.optimizer,
            total_optimizer_steps=stage.steps,
            hf_dir=config.model.path,
            mcore_dir=config.model.mcore_path,
            with_reference=any(each.settings.loss == "dpo" for each in self.stages),
        )
        self.checkpointer = Checkpointer(config, self.console, lambda: {"learner": InProcess(self.learner)}, resume)
        try:
            if resume is not None:
                of_steps = f"step {resume.step} of {self.stages[-1].last_step}"
                self.console.print(f"resuming from {resume.path} ({of_steps}){resume.note}")
                self.learner.load(resume.learner)
            with self._metric_logger(state["step"] + 1) as log:
                if not self._train(state["step"], state["stage"], log):
                    return False
            self._barrier()
            if self.rank == 0:
                write_text(config.trainer.run_dir / COMPLETE_NAME, "")
            self._print_summary()
            return True
        finally:
            self.learner.close()

    def _load_data(self) -> list[FineTuningStage]:
        config = self.config
        tokenizer = load_tokenizer(config.model)
        stages: list[FineTuningStage] = []
        next_step = 1
        for index, settings in enumerate(config.sft.stages):
            train = self._dataset(settings, settings.train_files, tokenizer)
            steps = settings.steps or max(1, settings.epochs * len(train) // settings.batch_size)
            stages.append(
                FineTuningStage(
                    settings=settings,
                    train=train,
                    val=self._dataset(settings, settings.val_files, tokenizer) if settings.val_files else None,
                    order=BatchOrder(len(train), settings.batch_size, (config.trainer.seed, index)),
                    first_step=next_step,
                    last_step=next_step + steps - 1,
                )
            )
            next_step += steps
            self.console.print(f"stage {settings.name}: {steps} steps x {settings.batch_size}; {train.counts}")
        return stages

    def _dataset(self, stage: SFTStage, files: list[str], tokenizer: Any) -> Dataset:
        sft, model = self.config.sft, self.config.model
        if stage.loss == "top_k":
            vocab_size = Architecture.from_pretrained(local_directory(model.path), model.families).vocab_size
            return ScoredDataset(files, vocab_size, stage.max_length, stage.overlong)
        if stage.loss == "dpo":
            keys = (sft.prompt_key, sft.chosen_key, sft.rejected_key, sft.tools_key)
            return PreferenceDataset(files, tokenizer, stage.max_length, stage.overlong, *keys)
        return SFTDataset(files, tokenizer, stage.max_length, stage.overlong, sft.messages_key, sft.tools_key)

    def _resume_state(self, resume: Checkpoint | None) -> dict[str, Any]:
        """The step last completed and the stage whose optimizer the checkpoint holds.

        Raises:
            ConfigError: the checkpoint belongs to other stages or another seed.
        """
        if resume is None:
            return {"step": 0, "stage": 0}
        state = resume.read("trainer_state.json")
        for key, now in self._identity().items():
            if state.get(key) != now:
                raise ConfigError(
                    f"{resume.path} was made with other settings ({key}: {state.get(key)}, now {now}): resume with the "
                    "same stages and seed, or start over with trainer.resume_mode=disable"
                )
        return state

    def _identity(self) -> dict[str, Any]:
        return {"seed": self.config.trainer.seed, "stages": [stage.describe() for stage in self.stages]}

    def _train(self, completed: int, stage_index: int, log: MetricLogger | None) -> bool:
        """Train from the step after ``completed``; whether the last step was reached."""
        last_step = self.stages[-1].last_step
        with progress_line(self.console, "sft", last_step) as progress:
            progress.advance(completed)
            for index in range(stage_index, len(self.stages)):
                stage = self.stages[index]
                if index > stage_index:
                    self.learner.reset_optimizer(stage.settings.optimizer, stage.steps)
                window = Window()
                started = time.perf_counter()
                for step in range(max(completed + 1, stage.first_step), stage.last_step + 1):
                    metrics = self._update(stage, step, window)
                    progress.advance()
                    progress.note(f"{stage.settings.name} loss {metrics['loss']:.4f}")
                    ends_stage = step == stage.last_step
                    leaving = step < last_step and self._asked_to_leave()
                    row: dict[str, float] = {}
                    if stage.val is not None and (ends_stage or is_multiple(step, self.config.sft.test_freq)):
                        row |= self._validation(stage)
                        stage.report["validation loss"] = row["sft/val_loss"]
                    if ends_stage or row or leaving or is_multiple(step, self.config.sft.log_freq):
                        row |= window.metrics() | self._peak_memory()
                        stage.report["training loss"] = row["sft/loss"]
                        if log is not None:
                            log.log(step, row)
                        window = Window()
                    if step == last_step or leaving or is_multiple(step, self.config.sft.save_freq):
                        self._save(step, index)
                    if leaving:
                        self.console.print(f"asked to leave: checkpoint of step {step} of {last_step} is complete")
                        return False
                stage.report["seconds"] = time.perf_counter() - started
        return True

    def _asked_to_leave(self) -> bool:
        """Whether any rank was: the signal reaches them between different steps, and all must stop after the same."""
        import torch

        asked = torch.tensor(float(self.leave.is_set()), device=self.learner.device)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(asked, op=torch.distributed.ReduceOp.MAX)
        return bool(asked)

    def _peak_memory(self) -> dict[str, float]:
        """perf/max_*_gb of the rank that has the most of each; every rank must ask."""
        import torch

        peaks = peak_memory(self.learner.device)
        largest = torch.tensor(list(peaks.values()), dtype=torch.float64, device=self.learner.device)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        return {f"perf/{name}": value for name, value in zip(peaks, largest.tolist(), strict=True)}

    def _update(self, stage: FineTuningStage, step: int, window: Window) -> dict[str, float]:
        start = time.perf_counter()
        rows = stage.order.rows(step - stage.first_step)
        batch = stage.train.batch(rows)
        if isinstance(stage.train, ScoredDataset):
            metrics = self.learner.top_tokens_update(batch, stage.train.top_tokens(rows))
        elif stage.settings.loss == "dpo":
            metrics = preference_update(self.learner, batch, stage.settings)
        else:
            metrics = self.learner.sft_update(batch)
        window.add(metrics, int(batch.total_lengths.sum()), self._flops(batch), time.perf_counter() - start)
        return metrics

    def _flops(self, batch: Any) -> float | None:
        """Model FLOPs of the step over the peak of all devices in a second, where the peak is known."""
        from conversion.model import flops

        peak = flops.peak_flops(self.learner.acceleration.gpu_name)
        return None if peak is None else self.learner.model_flops(batch) / peak / self.config.learner.world_size

    def _validation(self, stage: FineTuningStage) -> dict[str, float]:
        """sft/val_loss: mean over all trained tokens of the validation conversations, or over its pairs, of which
        sft/val_dpo_accuracy is the share that the policy orders right."""
        assert stage.val is not None
        totals, count = Counter[str](), 0.0
        size = stage.settings.batch_size * _VALIDATION_BATCHES
        for first in range(0, len(stage.val), size):
            rows = np.arange(first, min(first + size, len(stage.val)))
            batch = stage.val.batch(rows)
            if isinstance(stage.val, ScoredDataset):
                loss = self.learner.top_tokens_loss(batch, stage.val.top_tokens(rows))
                values, weight = {"loss": loss}, int(batch.loss_mask.sum())
            elif stage.settings.loss == "dpo":
                result, weight = preference_loss(self.learner, batch, stage.settings), len(rows)
                values = {"loss": result.loss, "dpo_accuracy": result.metrics["dpo_accuracy"]}
            else:
                values, weight = {"loss": self.learner.sft_loss(batch)}, int(batch.loss_mask.sum())
            totals.update({name: value * weight for name, value in values.items()})
            count += weight
        return {f"sft/val_{name}": total / count for name, total in totals.items()}

    def _save(self, step: int, stage_index: int) -> None:
        """A checkpoint that is complete when any rank continues.

        Raises:
            SaveError: it could not be written; fine-tuning ends here.
        """
        if self.rank == 0:
            files = {"trainer_state.json": {"step": step, "stage": stage_index, **self._identity()}}
            asyncio.run(self.checkpointer.save(step, Contents(files), wait=True))
        else:
            self.learner.save(workspace_path(self.config.trainer.run_dir, step) / "learner")
        self._barrier()

    def _metric_logger(self, first_step: int) -> contextlib.AbstractContextManager[MetricLogger | None]:
        if self.rank:
            return contextlib.nullcontext()
        return MetricLogger.of_run(self.config, self.console, first_step=first_step)

    @staticmethod
    def _barrier() -> None:
        import torch

        if torch.distributed.is_initialized():
            torch.distributed.barrier()

    def _print_summary(self) -> None:
        table = Table(title="supervised fine-tuning")
        table.add_column("stage")
        names = ("steps", "seconds", "training loss", "validation loss")
        for name in names:
            table.add_column(name, justify="right")
        for stage in self.stages:
            report = {"steps": stage.steps, **stage.report}
            table.add_row(stage.settings.name, *(f"{report[name]:.4g}" if name in report else "" for name in names))
        self.console.print(table)
        self.console.print(
            f"checkpoint {self.config.trainer.run_dir / 'checkpoints'}/global_step_{self.stages[-1].last_step}"
        )


class InProcess:
    """A learner of this process as the ``Checkpointer`` asks for models."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    async def save(self, directory: Path, *, asynchronous: bool, weights_only: bool = False) -> None:
        """``Learner.save``."""
        self._learner.save(directory, asynchronous=asynchronous, weights_only=weights_only)

    async def finish_save(self) -> None:
        """``Learner.finish_save``."""
        self._learner.finish_save()

    async def load(self, directory: Path) -> None:
        """``Learner.load``."""
        self._learner.load(directory)
