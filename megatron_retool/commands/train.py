"""Trains model.path, which has to be there, as have the data files.

Reads model.path (Hugging Face; model.mcore_path: its Megatron-Core weights),
data.train_files and data.val_files; with the demo's configuration the data and
the fine-tuned model of an earlier run (demo.base). Leaves
runs/<trainer.experiment_name> with metrics.jsonl, rollouts/, validation/,
checkpoints/ and logs/, and at the end export/ and report/ (trainer.at_end). The
same command resumes from the last checkpoint (trainer.resume_mode).

examples:
  megatron-retool train --config my.yaml
  megatron-retool train --config my.yaml trainer.total_steps=200 learner.optimizer.lr=1e-6
"""

from __future__ import annotations

import argparse

from rich.console import Console

from megatron_retool.commands import running
from megatron_retool.commands.settings import add_config, load
from megatron_retool.config.model import check_model_path
from megatron_retool.data.path_checks import check_paths, is_made_by_the_demo
from megatron_retool.interruption import interrupts
from megatron_retool.runs.demo_base import naming_the_base
from megatron_retool.runs.leave import LeaveRequest
from megatron_retool.runs.lock import run_lock

SETTINGS = (
    "trainer", "model", "data", "rollout", "tools", "reward", "algorithm", "learner", "weight_sync", "cluster",
    "demo.enable", "demo.directory", "demo.base",
)  # fmt: skip
EXIT_STATUS = running.LEFT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``train`` takes on the command line."""
    add_config(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out ``train``; the exit status."""
    config = load(options)
    check_paths(config, prompts=("train_files", "val_files"))  # before the imports, which take seconds
    from megatron_retool.cluster.checks import check_extensions, check_model, check_run
    from megatron_retool.loop.validation_metrics import check_named_metrics

    check_run(config.trainer, config.learner, config.cluster)
    if not is_made_by_the_demo(config.demo, config.model.path):
        check_model(config, learns=True)
    check_extensions(config)
    check_named_metrics(config.trainer, config.data, config.rollout)
    config = running.on_base(config, options)
    with naming_the_base(config):
        check_model_path(config.model.path)
        check_model(config, learns=True)
    from megatron_retool.commands.stages import Stages, run_training

    with naming_the_base(config), LeaveRequest() as leave, interrupts(), run_lock(config.trainer.run_dir, "train"):
        return run_training(config, Stages(config.trainer.run_dir, console, leave), running.train)
