"""What the model did: runs, curves, steps, responses and their tokens on a web page of this machine, or as text.

The page shows the run, or all runs, in PATH, and what a run that is at work adds. Its address is printed; keys are
listed under ? there.

With --text a run's step is printed: a line for each group, or with --group a response with every token in a colour.
The colours show loss_mask, turn, weight_version, surprise, log_ratio, entropy, advantage, importance_weight or
rejected; what they mean is printed below the response.

examples:
  megatron-retool view runs
  megatron-retool view runs/demo --port 8800
  megatron-retool view runs/demo --export demo.html --step 1 20
  megatron-retool view --text runs/demo
  megatron-retool view --text runs/demo --step 12 --group 3 --color log_ratio
"""

from __future__ import annotations

import argparse

from rich.console import Console

from megatron_retool.interruption import interrupts
from run_viewer import command
from run_viewer.command import add_arguments

__all__ = ["add_arguments", "run"]


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out ``view``; the exit status."""
    with interrupts():
        return command.run(options, console)
