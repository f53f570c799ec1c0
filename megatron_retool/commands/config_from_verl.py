"""Translate a verl configuration or start script into this project's words.

FILE is a verl YAML (a resolved Hydra configuration, or some of its keys) or a
shell script that starts verl, such as verl's examples. What is written is what
`train --config` reads. What verl does where FILE is silent is written out where
the default here is another. docs/verl.md has the whole table.

examples:
  megatron-retool config from-verl run_qwen2-7b_math_megatron.sh
  megatron-retool config from-verl ppo_trainer.yaml --output my_run.yaml
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

EXIT_STATUS = {1: "an error, which the last line says, or the file that was written needs a change before it loads"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``config from-verl`` takes on the command line."""
    parser.add_argument("file", metavar="FILE", type=Path, help="verl's configuration or script")
    parser.add_argument(
        "--output", metavar="OUT", type=Path, help="default: FILE's name with .yaml, in the working directory"
    )


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out ``config from-verl``; the exit status."""
    from megatron_retool.from_verl.command import translate_file

    return translate_file(options.file, options.output, console)
