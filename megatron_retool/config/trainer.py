"""The run itself: its name, length, validations, checkpoints and what it does about faults."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_retool.algorithms.stage_schedule import parse_stages
from megatron_retool.config.base import ConfigError, at_least_one, choice, not_negative, number
from megatron_retool.config.profiler import ProfilerConfig

_NAME = re.compile(r"\w[\w.=+@,-]{0,127}")

AT_END = ("export", "report", "summary")


@dataclass(frozen=True)
class EarlyStoppingConfig:
    """When a validation metric ends the run."""

    metric: str = ""
    """A validation metric, such as val-core/all/acc/mean@30 or val-quick/all/acc/mean@4; empty: no early end."""
    mode: str = choice("max", "min")
    """Whether higher or lower is better."""
    patience: int = at_least_one(5)
    """Validations in a row, of those that have the metric, without a better value; then the run ends."""
    min_delta: float = not_negative(0.0)
    """A value is better where it exceeds the best one by more than this."""


@dataclass(frozen=True)
class TrainerConfig:
    """The run itself: its name, length, validations, checkpoints and what it does about faults."""

    project_name: str = "megatron-retool"
    """What wandb, MLflow, SwanLab and Trackio file the run under."""
    experiment_name: str = "experiment"
    """Name of the run, and of its directory below runs_dir; team/name makes a directory in a directory."""
    runs_dir: str = "runs"
    """Where the directories of runs are."""
    seed: int = not_negative(0, maximum=2**31 - 1)
    """Of the order of prompts and of what else is drawn outside the engines."""
    mode: str = choice("sync", "async")
    """sync: a step generates its groups, trains on them and sends the weights. async: engines generate all the time and
    get new weights while they do, and a step takes the groups that are complete (docs/async.md)."""
    max_age: int = at_least_one(1, maximum=1000)
    """async: weight updates by which the oldest token that is trained on may be behind the learner."""
    deterministic: bool = False
    """Two runs with this seed, and one that is killed and resumed, are equal to the bit on the same machine and layout:
    token ids, rewards, metrics (of time and caches apart) and weights. It seeds the engines too (with this seed, where
    rollout.engine.random_seed is null), and takes deterministic kernels on both sides."""
    total_steps: int | None = at_least_one(None)
    """Training steps; null: total_epochs passes over the prompts."""
    total_epochs: int = at_least_one(1)
    """Passes over the prompts where total_steps is null."""
    test_freq: int = not_negative(5)
    """Steps between validations; 0: only before and after training."""
    test_schedule: list[str] = field(default_factory=list)
    """In place of test_freq: "<first step> <steps between validations>" in ascending order, as in ["0 10", "50 5"]."""
    quick_test_freq: int = not_negative(0)
    """Steps between quick validations (data.quick_val_samples, rollout.quick_val), val-quick/ in the metrics; 0: none.
    A step with a full validation has no quick one."""
    save_freq: int = not_negative(30)
    """Steps between checkpoints; 0: only at the end."""
    save_weights_freq: int = not_negative(0)
    """Steps between checkpoints of only the policy's weights (checkpoints/weights_step_N): to evaluate, to export and
    to begin another run from (model.mcore_path), but not to resume from; 0: none."""
    val_before_train: bool = True
    """A validation before the first step."""
    val_only: bool = False
    """Validate the newest checkpoint, or the model where there is none, and end without training."""
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    """The end of a run before its last step, once a validation metric gets no better."""
    rollout_data_dir: str | None = None
    """Where rollouts lie, in a folder of the run's name; null: rollouts/ in the run's directory, which leads there
    otherwise."""
    log_val_generations: int = not_negative(4)
    """Responses that each full validation prints, and shows in the loggers that have tables."""
    resume_mode: str = choice("auto", "disable", "resume_path")
    """auto: resume from the run's newest complete checkpoint. disable: set an earlier run aside and start over.
    resume_path: continue from resume_from_path."""
    resume_from_path: str | None = None
    """A checkpoint, …/global_step_N."""
    verify_checkpoints: bool = True
    """Hold the files of a checkpoint, of model.path and of model.mcore_path against their checksums, where they have
    some, before the learner loads them. Its ranks share the work, which is one reading of the files."""
    keep_checkpoints: int = not_negative(2)
    """Newest checkpoints that are kept; 0 keeps all."""
    keep_every: int = not_negative(0)
    """Checkpoints of steps that are multiples of it are kept for good; 0: none."""
    keep_weights: int = not_negative(0)
    """Newest weights-only checkpoints that are kept, whatever becomes of the others; 0 keeps all."""
    checkpoint_compression: str = choice("none", "zstd")
    """zstd: what checkpoints of both kinds hold is compressed, without loss, tensor by tensor. Float32 loses about a
    tenth of its size, and saving takes longer."""
    keep_best: int = not_negative(0)
    """Best checkpoints by best_metric that are kept besides."""
    best_metric: str = ""
    """A validation metric, higher is better, such as val-core/all/acc/mean@30."""
    async_save: bool = False
    """Write checkpoints while the next step is generated; the learner waits only until its state is copied."""
    on_failed_save: str = choice("continue", "stop")
    """continue: a checkpoint that the disk has no room for is tried again after each step; the last always stops."""
    max_learner_restarts: int = not_negative(3)
    """Times in a row, without a new checkpoint in between, that a learner which lost a rank is built again."""
    max_skipped_steps: int = not_negative(5)
    """Steps in a row that change no weight (no group with different rewards, a mismatch beyond its limit, gradients
    that are not finite) after which the run ends; 0: never. float16's loss scale may need some steps to settle."""
    straggler_factor: float = number(1.5, above=1, special=0)
    """A learner rank whose own part of the updates takes this many times the others' median is named; 0: none is."""
    straggler_steps: int = at_least_one(3)
    """Steps in a row after which it is named, and again after as many more."""
    hang_timeout_seconds: float = not_negative(3600.0)
    """Time without progress in a phase of a step after which every process's stacks are written to logs/; 0: off."""
    start_hang_timeout_seconds: float = not_negative(7200.0)
    """The same for the start of engines, sandboxes and learner, and for a learner that is built again. Large models on
    slow file systems take long to load."""
    hang_action: str = choice("dump", "abort")
    """abort: the run ends then, with the exit code that asks Slurm's script for a requeue."""
    at_end: list[str] = field(default_factory=lambda: ["export", "report", "summary"])
    """What a run does that has reached its last step: export (the last checkpoint as a Hugging Face one, in export/),
    report (the curves as a page), summary (a table)."""
    loggers: list[str] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
    """console, jsonl, csv, tensorboard, wandb, mlflow, swanlab, trackio, or one's own: path/to/file.py:Class or
    package.module:Class."""
    logger_kwargs: dict[str, Any] = field(default_factory=dict)
    """Logger -> keyword arguments of it, such as {wandb: {entity: …}}."""
    metrics: list[str] = field(default_factory=list)
    """Metrics of one's own beside the built-in ones: functions of a step's trajectories, path/to/file.py:function or
    package.module:function (docs/extending.md)."""
    metrics_kwargs: dict[str, Any] = field(default_factory=dict)
    """Function of metrics -> keyword arguments of it."""
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    """What the learner's processes do within chosen steps."""

    @property
    def run_dir(self) -> Path:
        """runs/<experiment_name>, where everything the run leaves behind lies."""
        return Path(self.runs_dir) / self.experiment_name

    def check(self) -> None:
        """Raise ConfigError where the run's name is none, or settings of this section contradict each other."""
        if not all(map(_NAME.fullmatch, self.experiment_name.split("/"))):
            raise ConfigError(
                f"trainer.experiment_name={self.experiment_name!r} is no name of a directory below trainer.runs_dir: "
                "take letters, digits and . _ = + - between them, as in qwen_7b or team/qwen_7b"
            )
        if not self.runs_dir.strip():
            raise ConfigError("trainer.runs_dir is empty: name a directory, such as runs")
        if self.test_schedule:
            try:
                parse_stages(self.test_schedule)
            except ValueError as error:
                raise ConfigError(f"trainer.test_schedule: {error}") from error
        every = self.quick_test_freq
        if every and self.test_freq and not self.test_schedule and every % self.test_freq == 0:
            raise ConfigError(
                f"trainer.quick_test_freq={every}: each of its steps has a full validation "
                f"(trainer.test_freq={self.test_freq}), so no quick one would ever run: lower it, or raise test_freq"
            )
        self._check_early_stopping()
        if unknown := [name for name in self.at_end if name not in AT_END]:
            raise ConfigError(f"trainer.at_end: {unknown[0]!r} is not one of {', '.join(AT_END)}")
        if self.keep_best and not self.best_metric:
            raise ConfigError("trainer.keep_best needs trainer.best_metric, such as val-core/all/acc/mean@30")
        if self.resume_mode == "resume_path" and not self.resume_from_path:
            raise ConfigError("trainer.resume_mode=resume_path needs trainer.resume_from_path=…/global_step_N")
        self.profiler.check()

    def _check_early_stopping(self) -> None:
        """Whether validations with the metric are held; which metrics they have is ``loop.validation_metrics``'s."""
        metric = self.early_stopping.metric
        if metric.startswith("val-quick/") and not self.quick_test_freq:
            raise ConfigError(
                f"trainer.early_stopping.metric={metric} is of quick validations, and trainer.quick_test_freq=0 asks "
                "for none"
            )
        if metric.startswith(("val-core/", "val-aux/")) and not self.test_freq and not self.test_schedule:
            raise ConfigError(
                f"trainer.early_stopping.metric={metric} is of full validations, and trainer.test_freq=0 holds them "
                "only before and after training: set test_freq"
            )
