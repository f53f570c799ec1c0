"""Which operator makes engine and learner differ: both compute the same texts with one after another made equal.

For a model directory in the Hugging Face format, on a CPU. A real SGLang engine is started for each form, two for each
operator; docs/mismatch.md tells how to read the table.

examples:
  megatron-retool report operators runs/demo/export
  megatron-retool report operators runs/demo/export --round-to int3 --output operators.json
  megatron-retool report operators runs/demo/export --operator qkv --operator norm
"""

from __future__ import annotations

import argparse

from rich.console import Console

from megatron_retool.commands.settings import at_least
from megatron_retool.interruption import interrupts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``report operators`` takes on the command line."""
    parser.add_argument("model", metavar="MODEL", help="a model directory in the Hugging Face format")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of engine and learner")
    parser.add_argument(
        "--round-to",
        choices=("fp8", "int8", "int4", "int3"),
        help="round the engine's matrices, but those of operators that are made equal (default: not at all)",
    )
    parser.add_argument(
        "--texts", metavar="N", type=at_least(2), default=48, help="sampled from the engine (default: 48)"
    )
    parser.add_argument("--tokens", metavar="N", type=at_least(1), default=64, help="of each text (default: 64)")
    parser.add_argument("--seed", metavar="N", type=at_least(0), default=0, help="of the texts (default: 0)")
    parser.add_argument(
        "--operator", metavar="NAME", action="append", default=[], help="only this one; may be repeated (default: all)"
    )
    parser.add_argument("--output", metavar="FILE", help="write the figures there too, as JSON")


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out ``report operators``; the exit status."""
    from megatron_retool.parity import mismatch_by_operator

    with interrupts(), console.status("starting") as status:
        result = mismatch_by_operator.report(
            mismatch_by_operator.model_directory(options.model),
            dtype=options.dtype,
            round_to=options.round_to,
            texts=options.texts,
            tokens=options.tokens,
            seed=options.seed,
            only=options.operator,
            on_round=lambda done, of: status.update(f"{done} of {of} engines asked"),
        )
    console.print(mismatch_by_operator.table(result))
    if options.output is not None:
        mismatch_by_operator.write(result, options.output)
        console.print(f"wrote {options.output}")
    return 0
