"""A published data set as this project's parquet files, with a manifest of what became of every row.

NAME is one of retool-sft (conversations for supervised fine-tuning),
dapo-math-17k (training prompts: 1.79 million rows become the distinct ones),
aime-2024, aime-2025, math-500 (validation prompts), gsm8k (both). The files come
from the hub (HF_ENDPOINT names another one, HF_TOKEN a token) or from a local
copy. What is there already is not made again. docs/data.md tells what is
dropped and why.

examples:
  megatron-retool data prepare dapo-math-17k
  megatron-retool data prepare aime-2024 --repo HuggingFaceH4/aime_2024
  megatron-retool data prepare gsm8k --from /data/gsm8k --output data/gsm8k
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from megatron_retool.data.prepare import NAMES
from megatron_retool.errors import InputError
from megatron_retool.interruption import interrupts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``data prepare`` takes on the command line."""
    parser.add_argument("name", metavar="NAME", choices=NAMES, help=", ".join(NAMES))
    parser.add_argument("--output", metavar="DIR", type=Path, help="default: data/NAME")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--from", dest="local", metavar="PATH", type=Path, help="a local copy: directory or file, instead of the hub"
    )
    source.add_argument("--repo", metavar="OWNER/NAME", help="another repository of the hub with the same problems")
    parser.add_argument("--revision", help="branch, tag or commit on the hub (default: main)")
    parser.add_argument(
        "--instruction",
        metavar="TEXT",
        help="added below bare questions (default: that of data.question_instruction; prompts that are messages stay)",
    )


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out ``data prepare``; the exit status."""
    from megatron_retool.config import DataConfig
    from megatron_retool.data.path_checks import check_directory
    from megatron_retool.data.prepare.datasets import DATA_SETS
    from megatron_retool.data.prepare.run import prepare
    from megatron_retool.data.prepare.source import hub_source, local_source
    from megatron_retool.data.prepare.summary import show

    if options.local is not None and options.revision is not None:
        raise InputError("--revision is the hub's: leave it out with --from")
    check_directory("--output", (options.output or Path("data") / options.name).absolute())
    data_set = DATA_SETS[options.name]
    directory = options.output or Path("data") / options.name
    instruction = DataConfig().question_instruction if options.instruction is None else options.instruction
    repository = options.repo or data_set.repository
    with interrupts():
        if options.local is not None:
            wanted, source = "", lambda: local_source(data_set, options.local)
        else:
            wanted = f"{repository}@{options.revision or 'main'}"
            source = lambda: hub_source(data_set, repository, options.revision)  # noqa: E731
        manifest = prepare(data_set, directory, source, wanted, instruction, console)
    show(manifest, directory, console)
    return 0
