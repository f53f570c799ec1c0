"""Every setting with its type, default, range and meaning, as Markdown: docs/configuration.md.

example:
  megatron-retool config reference
"""

from __future__ import annotations

import argparse

from rich.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``config reference`` takes on the command line."""
    del parser  # it has none


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out ``config reference``; the exit status."""
    from megatron_retool.config.reference import reference_page

    print(reference_page(), end="")
    return 0
