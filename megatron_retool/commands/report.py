"""A run as one page that opens without a server, report/index.html in its directory: what it came to, curves, time, and
the newest step's responses.

Beside it lie plots.html with the curves as PNG files, and the accuracy of each held-out problem.

example:
  megatron-retool report runs/demo
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from megatron_retool.interruption import interrupts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``report`` takes on the command line."""
    parser.add_argument("run_dir", metavar="RUN", help="the run's directory, runs/<experiment_name>")


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out ``report``; the exit status."""
    from megatron_retool.reports.run_page import write_report
    from megatron_retool.reports.summary import summarise

    with interrupts():
        report = write_report(options.run_dir, summarise(Path(options.run_dir)).text())
    console.print(f"wrote {report.page}", markup=False, highlight=False)
    for problem in report.problems:
        console.print(f"note: {problem}", markup=False, highlight=False)
    return 0
