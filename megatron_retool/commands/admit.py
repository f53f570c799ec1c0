"""Whether the learner can train a model: its shrunk copy with random weights, held against transformers.

Takes a directory with config.json, such a file, or a published model's name. Checks
the round trip between Hugging Face and Megatron-Core, log-probs, loss and every
gradient in every layout that applies, packing, recomputation, checkpoints across
layouts, routing replay, the planner's counts, SGLang's class, the log-probs of its
engine on a CPU, and the chat template.
Needs no GPU and no weights. A model of no family is refused by the name of the part
that is missing.

examples:
  megatron-retool admit models/Qwen3-8B
  megatron-retool admit qwen3-30b-a3b --layouts all --json admission.json
  megatron-retool admit models/mine --family my_family.py:FAMILY
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from megatron_retool.config import ConfigError
from megatron_retool.data.path_checks import check_output_file

EXIT_STATUS = {1: "a check failed, no family covers the model, or an error, which the last line says"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``admit`` takes on the command line."""
    parser.add_argument(
        "models", metavar="HF_DIR_OR_CONFIG", nargs="*", help="directory, config.json, or a published model's name"
    )
    parser.add_argument(
        "--every-family", action="store_true", help="a published model of each built-in family (docs/models.md)"
    )
    parser.add_argument(
        "--family", dest="families", action="append", default=[], metavar="FILE.py:FAMILY", help="a family of your own"
    )
    parser.add_argument(
        "--layouts",
        choices=("few", "named", "all"),
        help="few: up to 2 processes; named: up to 4; all: also every product on up to 4 (default: named; with "
        "--every-family few, and named for two of them)",
    )
    parser.add_argument(
        "--layers",
        type=int,
        choices=(4, 8),
        default=4,
        help="of the shrunk model; virtual pipelines need 8, in which float32 may lose the digits that are compared "
        "(default: 4)",
    )
    parser.add_argument("--without-engine", action="store_true", help="leave SGLang out")
    parser.add_argument("--json", dest="output", metavar="FILE", type=Path, help="write what was found")


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out ``admit``; the exit status."""
    from megatron_retool.parity.admission.layouts import FEW, NAMED
    from megatron_retool.parity.admission.requests import Request, architecture_of, one_of_each_family, read_config

    if options.output is not None:
        check_output_file("--json", options.output)
    names = {"few": FEW, "named": NAMED, "all": None}[options.layouts or "named"]
    requests = one_of_each_family() if options.every_family else []
    if options.layouts:
        requests = [replace(request, names=names) for request in requests]
    for model in options.models:
        hf_config, source = read_config(model)
        requests.append(Request(model, hf_config, source, tuple(options.families), options.layers, names))
    if not requests:
        raise ConfigError("nothing to examine: name a directory, a config.json or a published model, or --every-family")
    for request in requests:  # before the imports, which take seconds
        architecture_of(request)
    from megatron_retool.interruption import interrupts
    from megatron_retool.parity.admission.admit import examine
    from megatron_retool.parity.admission.report import table, write_json

    with interrupts(), tempfile.TemporaryDirectory(prefix="admit_") as directory, console.status("…") as status:
        admissions = examine(
            requests, Path(directory), engine=not options.without_engine, on_progress=lambda text: status.update(text)
        )
    for admission in admissions:
        console.print(table(admission))
        verdict = "admitted" if admission.admitted else f"refused: {len(admission.failures)} checks failed"
        console.print(f"{admission.model} ({admission.family}): {verdict}", highlight=False)
    if options.output is not None:
        write_json(options.output, admissions)
    return 0 if all(admission.admitted for admission in admissions) else 1
