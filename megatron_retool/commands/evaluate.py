"""Validation of model.path: engines and tools without a learner.

Answers every prompt of data.val_files rollout.val.n times. Leaves metrics.jsonl
(step 0) and validation/ in runs/<trainer.experiment_name>. model.path is a
Hugging Face model, or a run's checkpoint (global_step_N, weights_step_N).

examples:
  megatron-retool evaluate model.path=runs/demo/export trainer.experiment_name=check
  megatron-retool evaluate model.path=runs/demo/checkpoints/weights_step_20 trainer.experiment_name=at_20
  megatron-retool evaluate --config my.yaml rollout.val.n=30 rollout.val.temperature=0.6
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from pathlib import Path

from rich.console import Console

from megatron_retool.commands.running import is_checkpoint, on_base, run_async, with_exported_model
from megatron_retool.commands.settings import add_config, load
from megatron_retool.config.model import check_model_path
from megatron_retool.data.path_checks import check_paths, is_made_by_the_demo
from megatron_retool.runs.demo_base import naming_the_base
from megatron_retool.runs.leave import LeaveRequest
from megatron_retool.runs.lock import run_lock

SETTINGS = (
    "trainer.experiment_name", "trainer.runs_dir", "trainer.seed", "trainer.log_val_generations", "trainer.loggers",
    "model", "data.val_files", "data.max_prompt_length", "data.max_response_length", "rollout.val",
    "rollout.multi_turn", "rollout.engine", "tools", "reward", "cluster",
    "demo.enable", "demo.directory", "demo.base",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``evaluate`` takes on the command line."""
    add_config(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out ``evaluate``; the exit status."""
    config = load(options)
    check_paths(config, prompts=["val_files"])  # before the imports, which take seconds
    from megatron_retool.cluster.checks import check_evaluation, check_extensions, check_model, check_run

    check_run(config.trainer, config.learner, config.cluster)
    check_evaluation(config.trainer.run_dir)
    if not is_checkpoint(Path(config.model.path)) and not is_made_by_the_demo(config.demo, config.model.path):
        check_model(config, learns=False)
    check_extensions(config)
    config = on_base(config, options)
    with naming_the_base(config):
        check_model_path(config.model.path)
    from megatron_retool.loop.validation import evaluate_model

    with naming_the_base(config), LeaveRequest(), tempfile.TemporaryDirectory() as scratch:
        config = with_exported_model(
            config, Path(scratch) / "model", functools.partial(console.print, markup=False, highlight=False)
        )
        check_model(config, learns=False)
        with run_lock(config.trainer.run_dir, "evaluate"):
            run_async(evaluate_model(config, console))
    return 0
