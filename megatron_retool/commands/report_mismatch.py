"""Where the engine's and the learner's probabilities differ: a page in the run's directory, from its rollouts/.

example:
  megatron-retool report mismatch runs/demo
"""

from __future__ import annotations

import argparse

from rich.console import Console

from megatron_retool.interruption import interrupts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``report mismatch`` takes on the command line."""
    parser.add_argument("run_dir", metavar="RUN", help="the run's directory, runs/<experiment_name>")


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out ``report mismatch``; the exit status."""
    from megatron_retool.parity.mismatch import write_mismatch_report

    with interrupts():
        page, problems = write_mismatch_report(options.run_dir)
    console.print(f"wrote {page}", markup=False, highlight=False)
    for problem in problems:
        console.print(f"note: {problem}", markup=False, highlight=False)
    return 0
