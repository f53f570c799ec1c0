"""The demo's random model, its tokenizer, and made-up conversations and problems, in demo.directory.

examples:
  megatron-retool make-demo
  megatron-retool make-demo demo.directory=/tmp/demo demo.variant=two_tools
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from megatron_retool.commands.settings import add_config, load
from megatron_retool.data.path_checks import check_directory
from megatron_retool.interruption import interrupts

SETTINGS = ("trainer.seed", "demo")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``make demo`` takes on the command line."""
    add_config(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out ``make demo``; the exit status."""
    config = load(options)
    check_directory("demo.directory", Path(config.demo.directory))
    from megatron_retool.data.demo import make_demo

    with interrupts():
        make_demo(config)
    console.print(f"wrote {config.demo.directory}")
    return 0
