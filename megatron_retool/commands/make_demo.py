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
from megatron_retool.interruption import interrupts

SETTINGS = ("trainer.seed", "demo")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    config = load(options)
    from megatron_retool.data.demo import make_demo
    from megatron_retool.loop.checks import check_directory

    check_directory("demo.directory", Path(config.demo.directory))

    with interrupts():
        make_demo(config)
    console.print(f"wrote {config.demo.directory}")
    return 0
