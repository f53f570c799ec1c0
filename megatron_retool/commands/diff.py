"""Runs side by side: the settings in which they differ, and what each came to.

example:
  megatron-retool diff runs/demo runs/gspo
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="RUN", type=Path, help="a run's directory, runs/<experiment_name>")
    parser.add_argument("others", metavar="RUN", type=Path, nargs="+", help="one more, or several")


def run(options: argparse.Namespace, console: Console) -> int:
    from megatron_retool.reports.compare import compare_runs

    compare_runs([options.first, *options.others], console)
    return 0
