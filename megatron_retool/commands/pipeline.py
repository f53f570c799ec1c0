"""Train: the RL loop, and for the demo (demo.enable) every stage from made-up data to the report.

Where demo.enable is on, as in configs/demo_cpu.yaml, stages run one after another:
make-demo, evaluation of the random model, SFT, conversion to Hugging Face and
back, RL, export, report. A stage whose result is there is not run again, and a
run under another name starts with RL, from the data and the fine-tuned model of
an earlier one (demo.base).

A run that was stopped goes on from its last checkpoint when the same command is
given again (trainer.resume_mode). Everything it leaves is in
runs/<trainer.experiment_name>.

examples:
  megatron-retool pipeline
  megatron-retool pipeline trainer.experiment_name=mine trainer.total_steps=40
  megatron-retool pipeline --config configs/retool_qwen2.5_32b_8xh200.yaml
"""

from __future__ import annotations

import argparse

from rich.console import Console

from megatron_retool.commands.running import LEFT, train
from megatron_retool.commands.settings import add_config, config_file, load
from megatron_retool.interruption import interrupts
from megatron_retool.runs.leave import LeaveRequest

SETTINGS = (
    "trainer", "model", "data", "rollout", "tools", "reward", "algorithm", "learner", "weight_sync", "cluster",
    "sft", "demo",
)  # fmt: skip
EXIT_STATUS = LEFT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    config = load(options)
    from megatron_retool.loop.checks import check_extensions, check_model, check_run
    from megatron_retool.loop.validation_metrics import check_early_stopping

    check_run(config)
    check_extensions(config)
    check_early_stopping(config)
    if not config.demo.enable:
        check_model(config, learns=True)
    from megatron_retool.pipeline import run_pipeline

    with LeaveRequest() as leave, interrupts():
        return run_pipeline(config, config_file(options), options.overrides, console, train, leave)
