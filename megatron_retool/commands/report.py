"""Curves of a run as one page, report/index.html in the run's directory, from its metrics.jsonl.

example:
  megatron-retool report runs/demo
"""

from __future__ import annotations

import argparse

from rich.console import Console

from megatron_retool.interruption import interrupts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", help="the run's directory, runs/<experiment_name>")


def run(options: argparse.Namespace, console: Console) -> int:
    from megatron_retool.reports.run import write_report

    with interrupts():
        console.print(f"wrote {write_report(options.run_dir)}")
    return 0
