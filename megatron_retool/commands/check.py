"""Whether what lies on the disk is what was written.

Every file of checkpoints, exports and converted models against its checksum,
every parquet file, every row of metrics.jsonl. Nothing is changed, but by
--renew, which makes the checksums again after files were changed on purpose.

examples:
  megatron-retool check runs/demo
  megatron-retool check runs/demo/checkpoints/global_step_80
  megatron-retool check models/my_model --renew
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from megatron_retool.config import ConfigError
from megatron_retool.interruption import interrupts

EXIT_STATUS = {1: "a fault was found, or an error, which the last line says"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``check`` takes on the command line."""
    parser.add_argument(
        "directories", nargs="+", type=Path, metavar="DIR", help="a run's directory, a checkpoint's or a model's"
    )
    parser.add_argument("--renew", action="store_true", help="make the checksums of these again")


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out ``check``; the exit status."""
    for directory in options.directories:  # before the imports, which take seconds
        if not directory.is_dir():
            raise ConfigError(f"{directory} is no directory: give a run, a checkpoint or a model's directory")
    from megatron_retool.runs.check import renew, show

    with interrupts():
        if not options.renew:
            return max([show(directory, console) for directory in options.directories])
        for directory in options.directories:
            renew(directory)
            console.print(f"{directory}: checksums of the files as they are now", markup=False, highlight=False)
    return 0
