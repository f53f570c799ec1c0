"""Train: the RL loop, and for the demo (demo.enable) every stage from made-up data to the report.

Where demo.enable is on, as in configs/demo_cpu.yaml, stages run one after another:
make-demo, evaluation of the random model, SFT, conversion to Hugging Face and
back, RL, export, report. A stage whose result is there is not run again, and a
run under another name starts with RL, from the data and the fine-tuned model of
an earlier one (demo.base).

A run that was stopped resumes from its last checkpoint when the same command is
given again (trainer.resume_mode). Everything it leaves is in
runs/<trainer.experiment_name>.

examples:
  megatron-retool pipeline
  megatron-retool pipeline trainer.experiment_name=mine trainer.total_steps=40
  megatron-retool pipeline --config configs/retool_qwen2.5_32b_8xh200.yaml
  megatron-retool pipeline --config configs/smollm2_135m_cpu.yaml --quick
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from megatron_retool.commands.running import LEFT, train
from megatron_retool.commands.settings import add_config, config_file
from megatron_retool.config import ConfigError, load_config
from megatron_retool.data.path_checks import check_paths
from megatron_retool.interruption import interrupts
from megatron_retool.runs.leave import LeaveRequest
from megatron_retool.runs.lock import run_lock

SETTINGS = (
    "trainer", "model", "data", "rollout", "tools", "reward", "algorithm", "learner", "weight_sync", "cluster",
    "sft", "demo",
)  # fmt: skip
EXIT_STATUS = LEFT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``pipeline`` takes on the command line."""
    add_config(parser)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the configuration's short form, FILE_quick.yaml beside it: every stage in minutes",
    )


def quick_form(config_file: str) -> str:
    """``configs/demo_cpu_quick.yaml`` for ``configs/demo_cpu.yaml``.

    Raises:
        ConfigError: there is none.
    """
    path = Path(config_file)
    quick = path.with_name(f"{path.stem}_quick{path.suffix}")
    if not quick.is_file():
        others = sorted(other.name.replace("_quick", "") for other in path.parent.glob("*_quick.yaml"))
        raise ConfigError(
            f"--quick: there is no {quick}. "
            + (f"Configurations with a short form: {', '.join(others)}" if others else "Write one that `extends` it")
        )
    return str(quick)


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out ``pipeline``; the exit status."""
    path = quick_form(config_file(options)) if options.quick else config_file(options)
    config = load_config(path, options.overrides)
    # Before the imports, which take seconds.
    check_paths(config, prompts=("train_files", "val_files"), stages=config.demo.enable)
    from megatron_retool.cluster.checks import check_extensions, check_model, check_run
    from megatron_retool.loop.validation_metrics import check_named_metrics

    check_run(config.trainer, config.learner, config.cluster)
    check_extensions(config)
    check_named_metrics(config.trainer, config.data, config.rollout)
    if not config.demo.enable:
        check_model(config, learns=True)
    from megatron_retool.commands.stages import run_pipeline

    with LeaveRequest() as leave, interrupts(), run_lock(config.trainer.run_dir, "pipeline"):
        return run_pipeline(config, path, options.overrides, console, train, leave)
