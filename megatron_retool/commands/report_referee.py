"""Which side is off where engine and learner disagree: transformers in float32 or float64 computes a sample again.

Needs the weights that a step was sampled with: the checkpoint of the step before, or the model that the run started
from. Writes report/referee_step_N.html and .json in the run's directory; docs/mismatch.md tells how to read them.

examples:
  megatron-retool report referee runs/demo
  megatron-retool report referee runs/demo --step 31 --sample 10000
"""

from __future__ import annotations

import argparse

from rich.console import Console

from megatron_retool.commands.settings import at_least
from megatron_retool.interruption import interrupts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``report referee`` takes on the command line."""
    parser.add_argument("run_dir", metavar="RUN", help="the run's directory, runs/<experiment_name>")
    parser.add_argument("--step", metavar="N", type=at_least(1), help="default: the newest that can be judged")
    parser.add_argument(
        "--sample", metavar="TOKENS", type=at_least(1), default=4000, help="sampled tokens to judge (default: 4000)"
    )
    parser.add_argument("--seed", metavar="N", type=at_least(0), default=0, help="of which tokens (default: 0)")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "float64"),
        default="auto",
        help="of the referee (default: auto, float64 up to 50 million parameters)",
    )


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out ``report referee``; the exit status."""
    from megatron_retool.parity.referee.page import print_summary
    from megatron_retool.parity.referee.report import write_referee_report

    with interrupts():
        page, result = write_referee_report(
            options.run_dir,
            options.step,
            tokens=options.sample,
            seed=options.seed,
            dtype=options.dtype,
            console=console,
        )
        print_summary(console, result)
        console.print(f"wrote {page}")
    return 0
