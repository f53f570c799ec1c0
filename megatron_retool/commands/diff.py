"""Runs side by side: the settings in which they differ, what each came to, and where they part.

Each further run is held against the first one: its curves, and the first step, response, token and column that are not
equal in both. What the clock measures is left out.

examples:
  megatron-retool diff runs/demo runs/gspo
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``diff`` takes on the command line."""
    parser.add_argument("first", metavar="RUN", type=Path, help="a run's directory, runs/<experiment_name>")
    parser.add_argument("others", metavar="RUN", type=Path, nargs="+", help="one more, or several")


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out ``diff``; the exit status."""
    from megatron_retool.reports.compare import compare_runs
    from run_viewer.compare_runs import print_comparison

    compare_runs([options.first, *options.others], console)
    for other in options.others:
        print_comparison(options.first, other, console)
    return 0
