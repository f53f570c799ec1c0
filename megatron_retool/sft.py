"""Supervised fine-tuning on multi-turn traces with the Megatron-Core learner.

    python -m megatron_retool sft --config configs/sft_qwen2.5_32b.yaml
    torchrun --nproc-per-node 8 -m megatron_retool.sft runs/<name>/config.yaml

The stages of ``sft.stages`` follow one another on the same weights, each with its own data, optimizer and schedule.
Every rank runs this loop with the same batches and the learner takes each rank's share. With learner.world_size > 1
the command starts the ranks itself, unless torchrun or srun already did.

A run leaves metrics.jsonl, tensorboard/ and checkpoints/global_step_N, and a file COMPLETE once all stages are done.
Steps are counted through all stages. Batches depend on the seed and the step alone, so a resumed run repeats none and
skips none. SIGUSR1, to the command or to any rank, ends all ranks after the same step with a checkpoint of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from megatron_retool.config import Config, ConfigError, SFTStage, load_config, save_config
from megatron_retool.data.sft_dataset import BatchOrder, SFTDataset
from megatron_retool.data.tokenizer import load_tokenizer
from megatron_retool.monitor.logger import MetricLogger
from megatron_retool.monitor.progress import progress_line
from megatron_retool.runs.checkpoints import (
    Checkpoint,
    checkpoint_workspace,
    commit_checkpoint,
    find_resume_point,
    prune_checkpoints,
    set_aside,
    set_aside_later,
)
from megatron_retool.runs.leave import LeaveRequest, passed_on

COMPLETE_MARKER = "COMPLETE"
_VALIDATION_BATCHES = 8
"""Batches whose conversations are put through the model in one call for the validation loss."""


def main(config: Config, console: Console | None = None, leave: LeaveRequest | None = None) -> bool:
    """Run ``config.sft`` in this process, or in ``learner.world_size`` processes that it starts.

    Args:
        leave: when set, on any rank, the step under way is finished and checkpointed, and training stops there.

    Returns:
        Whether all stages are done.

    Raises:
        ConfigError, DataError: a setting or a file is wrong (before any training).
        RuntimeError: a rank failed; the message is the rank's own.
        KeyboardInterrupt: stopped by a signal; every rank has ended.
    """
    _check(config)
    leave = leave or LeaveRequest()
    if "RANK" in os.environ or config.learner.world_size == 1:
        return Run(config, leave, console).run()
    if config.cluster.nodes > 1:
        raise ConfigError(
            f"cluster.nodes={config.cluster.nodes}: start the command on every node with torchrun or srun; alone it "
            "starts processes on its own host only"
        )
    if config.trainer.resume_mode == "disable":
        set_aside(config.run_dir)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    save_config(config, config.run_dir / "config.yaml")
    _launch(config, config.run_dir / "config.yaml", leave)
    return (config.run_dir / COMPLETE_MARKER).exists()


def _check(config: Config) -> None:
    if not config.sft.stages:
        raise ConfigError("sft.stages is empty: name at least one stage with train_files")
    if not config.model.path:
        raise ConfigError("model.path is not set: give the Hugging Face directory of the model to fine-tune")
    for index, stage in enumerate(config.sft.stages):
        key = f"sft.stages[{index}]"
        if not stage.train_files:
            raise ConfigError(f"{key}.train_files is empty: name at least one file")
        for name in ("train_files", "val_files"):
            for path in getattr(stage, name):
                if not Path(path).is_file():
                    raise ConfigError(f"{key}.{name}: {path} does not exist")
        for name in ("batch_size", "max_length"):
            if getattr(stage, name) < 1:
                raise ConfigError(f"{key}.{name}={getattr(stage, name)} must be at least 1")
        if stage.steps is not None and stage.steps < 1:
            raise ConfigError(f"{key}.steps={stage.steps} must be at least 1, or null for sft.stages.epochs")


@dataclass
class Stage:
    """One stage with its data. Its steps are ``first_step`` … ``last_step`` of the run, counted from 1."""

    settings: SFTStage
    train: SFTDataset
    val: SFTDataset | None
    order: BatchOrder
    first_step: int
    last_step: int
    report: dict[str, float] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return self.last_step - self.first_step + 1

    def describe(self) -> dict[str, Any]:
        """What the order of its batches depends on."""
        return {
            "name": self.settings.name,
            "steps": self.steps,
            "batch_size": self.settings.batch_size,
            "conversations": len(self.train),
        }


class Run:
    """The loop of one rank."""

    def __init__(self, config: Config, leave: LeaveRequest, console: Console | None = None) -> None:
        self.config = config
        self.leave = leave
        self.rank = int(os.environ.get("RANK", "0"))
        self.console = console or Console(quiet=self.rank != 0, soft_wrap=not sys.stdout.isatty())

    def run(self) -> bool:
        """Train; whether all stages are done."""
        config = self.config
        if config.trainer.resume_mode == "disable" and self.rank == 0:
            set_aside(config.run_dir)
        resume = find_resume_point(config)
        # With resume_path the run goes back, and rank 0 may be moving the marker just now.
        done = config.trainer.resume_mode == "auto" and (config.run_dir / COMPLETE_MARKER).exists()
        if resume is not None and done:
            self.console.print(f"{config.run_dir} is complete: its last checkpoint is {resume.path}")
            return True
        self.stages = self._load_data()
        state = self._resume_state(resume)
        moved = set_aside_later(config, resume) if self.rank == 0 else None
        if moved is not None:
            self.console.print(f"what the run made after {resume.path} was moved to {moved}")
        stage = self.stages[state["stage"]]

        from megatron_retool.learner.learner import Learner

        self.learner = Learner(
            config,
            optimizer=stage.settings.optimizer,
            total_optimizer_steps=stage.steps,
            hf_dir=config.model.path,
            mcore_dir=config.model.mcore_path,
        )
        try:
            if resume is not None:
                self.console.print(f"resuming from {resume.path} (step {resume.step} of {self.stages[-1].last_step})")
                self.learner.load(resume.learner)
            with self._metric_logger(state["step"] + 1) as log:
                if not self._train(state["step"], state["stage"], log):
                    return False
            self._barrier()
            if self.rank == 0:
                _write_marker(config.run_dir / COMPLETE_MARKER)
            self._print_summary()
            return True
        finally:
            self.learner.close()

    def _load_data(self) -> list[Stage]:
        config = self.config
        tokenizer = load_tokenizer(config.model)
        stages: list[Stage] = []
        next_step = 1
        for index, settings in enumerate(config.sft.stages):
            train = self._dataset(settings, settings.train_files, tokenizer)
            steps = settings.steps or max(1, settings.epochs * len(train) // settings.batch_size)
            stages.append(
                Stage(
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

    def _dataset(self, stage: SFTStage, files: list[str], tokenizer: Any) -> SFTDataset:
        sft = self.config.sft
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
                window = _Window()
                started = time.perf_counter()
                for step in range(max(completed + 1, stage.first_step), stage.last_step + 1):
                    metrics = self._update(stage, step, window)
                    progress.advance()
                    progress.note(f"{stage.settings.name} loss {metrics['loss']:.4f}")
                    ends_stage = step == stage.last_step
                    leaving = step < last_step and self._asked_to_leave()
                    row: dict[str, float] = {}
                    if stage.val is not None and (ends_stage or _due(step, self.config.sft.test_freq)):
                        row["sft/val_loss"] = stage.report["validation loss"] = self._validation_loss(stage)
                    if ends_stage or row or leaving or _due(step, self.config.sft.log_freq):
                        row |= window.metrics()
                        stage.report["training loss"] = row["sft/loss"]
                        if log is not None:
                            log.log(step, row)
                        window = _Window()
                    if step == last_step or leaving or _due(step, self.config.sft.save_freq):
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

    def _update(self, stage: Stage, step: int, window: _Window) -> dict[str, float]:
        start = time.perf_counter()
        batch = stage.train.batch(stage.order.rows(step - stage.first_step))
        metrics = self.learner.sft_update(batch)
        window.add(metrics, int(batch.total_lengths.sum()), self._flops(batch), time.perf_counter() - start)
        return metrics

    def _flops(self, batch: Any) -> float | None:
        """Model FLOPs of the step over the peak of all devices in a second, where the peak is known."""
        from conversion.model import flops

        peak = flops.peak_flops(self.learner.acceleration.gpu_name)
        return None if peak is None else self.learner.model_flops(batch) / peak / self.config.learner.world_size

    def _validation_loss(self, stage: Stage) -> float:
        """Mean over all trained tokens of the stage's validation conversations."""
        assert stage.val is not None
        total = tokens = 0.0
        size = stage.settings.batch_size * _VALIDATION_BATCHES
        for first in range(0, len(stage.val), size):
            batch = stage.val.batch(np.arange(first, min(first + size, len(stage.val))))
            count = int(batch.loss_mask.sum())
            total += self.learner.sft_loss(batch) * count
            tokens += count
        return total / tokens

    def _save(self, step: int, stage_index: int) -> None:
        run_dir = self.config.run_dir
        workspace = run_dir / "checkpoints" / f".global_step_{step}.partial"
        if self.rank == 0:
            workspace = checkpoint_workspace(run_dir, step)
        self._barrier()
        self.learner.save(workspace / "learner")
        self._barrier()
        if self.rank == 0:
            files = {"trainer_state.json": {"step": step, "stage": stage_index, **self._identity()}}
            prune_checkpoints(self.config, commit_checkpoint(workspace, step, files))
        self._barrier()

    def _metric_logger(self, first_step: int) -> contextlib.AbstractContextManager[MetricLogger | None]:
        if self.rank:
            return contextlib.nullcontext()
        return MetricLogger(
            self.config.run_dir, self.config.trainer.loggers, first_step=first_step, console=self.console
        )

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
        self.console.print(f"checkpoint {self.config.run_dir / 'checkpoints'}/global_step_{self.stages[-1].last_step}")


class _Window:
    """Means over the steps since the last row of metrics."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = defaultdict(list)
        self._tokens = 0
        self._seconds = 0.0
        self._peak_seconds: list[float] = []

    def add(self, metrics: dict[str, float], tokens: int, peak_seconds: float | None, seconds: float) -> None:
        for name, value in metrics.items():
            self._values[name].append(value)
        self._tokens += tokens
        self._seconds += seconds
        if peak_seconds is not None:
            self._peak_seconds.append(peak_seconds)

    def metrics(self) -> dict[str, float]:
        """sft/loss, grad_norm (means) and lr (the last), perf/throughput (tokens/s), time_per_step and mfu."""
        row = {f"sft/{name}": float(np.mean(values)) for name, values in self._values.items()}
        row["sft/lr"] = self._values["lr"][-1]
        row["perf/throughput"] = self._tokens / self._seconds
        row["perf/time_per_step"] = self._seconds / len(self._values["lr"])
        if self._peak_seconds:
            row["perf/mfu/sft"] = sum(self._peak_seconds) / self._seconds
        return row


def _due(step: int, frequency: int) -> bool:
    return frequency > 0 and step % frequency == 0


def _write_marker(path: Path) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "w") as handle:
        os.fsync(handle.fileno())
    os.replace(partial, path)


# --- processes -------------------------------------------------------------------------------------------------------


def _launch(config: Config, config_file: Path, leave: LeaveRequest) -> None:
    """Start the ranks under torchrun's agent, in this process, and wait for them."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The agent reports a failed rank at length; its message alone is passed on below.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.learner.world_size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
    )
    environment = _environment(OMP_NUM_THREADS=str(config.learner.threads), GLOO_SOCKET_IFNAME=_loopback())
    with environment, passed_on(leave, _ranks):
        try:
            elastic_launch(settings, sys.executable)("-u", "-m", "megatron_retool.sft", str(config_file))
        except SignalException:
            raise KeyboardInterrupt from None
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.exitcode == -signal.SIGINT:
                raise KeyboardInterrupt from None
            raise RuntimeError(_failure_message(rank, failure)) from None


def _ranks() -> list[int]:
    """Process ids of the ranks that this process has started."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "megatron_retool.sft" in child.cmdline():
                found.append(child.pid)
    return found


def _failure_message(rank: int, failure: Any) -> str:
    data = failure.error_file_data.get("message")
    if isinstance(data, dict) and data.get("message"):
        kind, _, text = data["message"].partition(": ")
        return text if kind in ("ConfigError", "DataError") else f"rank {rank}: {data['message']}"
    return f"rank {rank} ended with exit code {failure.exitcode}; see its output above"


@contextlib.contextmanager
def _environment(**variables: str | None) -> Iterator[None]:
    """Set variables that are not set, for the length of the block."""
    added = {name: value for name, value in variables.items() if value is not None and name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _loopback() -> str | None:
    # All ranks are on this host; a host name that does not resolve must not stop them.
    return "lo" if Path("/sys/class/net/lo").exists() else None


def _end_with_parent() -> None:
    """Let the kernel end this rank when the process that started it is gone (Linux)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)


def worker(config_file: str) -> int:
    """One rank under torchrun. Leaving is no failure to torchrun, which would end the other ranks: 0 as well."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    _end_with_parent()
    handler = get_error_handler()
    handler.initialize()
    try:
        with LeaveRequest() as leave:
            main(load_config(config_file), leave=leave)
    except (ConfigError, OSError) as error:
        handler.record_exception(error)
        return 1
    except Exception as error:
        handler.record_exception(error)
        from megatron_retool.data.files import DataError

        if isinstance(error, DataError):
            return 1
        raise
    return 0


if __name__ == "__main__":
    sys.exit(worker(sys.argv[1]))
