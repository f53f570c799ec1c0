"""Supervised fine-tuning of model.path on conversations with tool calls: the stages of sft.stages.

Starts learner.world_size processes on this host, or is one of them under
torchrun or srun. The same command resumes from the last checkpoint.
conversion/mcore_to_hf.py makes a Hugging Face model of the last one.

examples:
  megatron-retool sft --config configs/sft_qwen2.5_32b.yaml
  megatron-retool sft --config my.yaml model.path=models/Qwen2.5-7B
"""

from __future__ import annotations

import argparse
import contextlib
import os

from rich.console import Console

from megatron_retool.commands.running import LEFT
from megatron_retool.commands.settings import add_config, load
from megatron_retool.config.model import check_model_path
from megatron_retool.data.path_checks import check_paths
from megatron_retool.interruption import interrupts
from megatron_retool.runs.checkpoints import how_to_go_on
from megatron_retool.runs.leave import REQUEUE, LeaveRequest
from megatron_retool.runs.lock import run_lock

SETTINGS = (
    "trainer.experiment_name", "trainer.runs_dir", "trainer.seed", "trainer.resume_mode", "trainer.keep_checkpoints",
    "trainer.async_save", "trainer.on_failed_save", "trainer.loggers", "model", "sft", "learner", "cluster.nodes",
)  # fmt: skip
EXIT_STATUS = LEFT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``sft`` takes on the command line."""
    add_config(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out ``sft``; the exit status."""
    config = load(options)
    check_paths(config, stages=True)  # before the imports, which take seconds
    from megatron_retool.cluster.checks import check_model, check_run

    check_run(config.trainer, config.learner, config.cluster)
    check_model_path(config.model.path)
    check_model(config, learns=True)
    from megatron_retool.sft.launch import fine_tune

    # Under torchrun or srun the ranks are one run, and the first of them holds its lock.
    first = os.environ.get("RANK", "0") == "0"
    lock = run_lock(config.trainer.run_dir, "sft") if first else contextlib.nullcontext()
    with LeaveRequest() as leave, interrupts(how_to_go_on=lambda: how_to_go_on(config.trainer)), lock:
        return 0 if fine_tune(config, console, leave) else REQUEUE
