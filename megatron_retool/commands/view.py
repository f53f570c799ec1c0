"""What the model did: runs, curves, steps, responses and their tokens on a web page of this machine, or as text.

The page shows the run, or all runs, in PATH, and what a run that is at work adds. Its address is printed; keys are
listed under ? there.

With --text a run's step is printed: a line for each group, or with --group a response with every token in a colour.
The colours show loss_mask, turn, weight_version, surprise, log_ratio, entropy, advantage, importance_weight or
rejected; what they mean is printed below the response.

examples:
  megatron-retool view runs
  megatron-retool view runs/demo --port 8800
  megatron-retool view runs/demo --export demo.html --step 1 20
  megatron-retool view --text runs/demo
  megatron-retool view --text runs/demo --step 12 --group 3 --color log_ratio
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_retool.commands.settings import at_least, port_number
from megatron_retool.errors import InputError

_OF_TEXT = {"group": None, "index": 0, "segment": 0, "color": "surprise", "tokenizer": None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``view`` takes on the command line."""
    parser.add_argument("run_dir", metavar="PATH", type=Path, help="a run's directory, runs/<experiment_name>, or runs")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, only this machine)"
    )
    parser.add_argument("--port", metavar="P", type=port_number, default=0, help="default: a free one")
    parser.add_argument("--export", metavar="FILE", type=Path, help="write the page into one HTML file and end")
    parser.add_argument("--text", action="store_true", help="a step of a run, on this terminal")
    parser.add_argument(
        "--step",
        metavar="N",
        type=at_least(1),
        nargs="+",
        default=[],
        help="of --text and --export (default: the newest)",
    )
    parser.add_argument("--group", metavar="ID", type=at_least(0), help="show a response of this group")
    parser.add_argument("--index", metavar="N", type=at_least(0), default=0, help="which response (default: 0)")
    parser.add_argument("--segment", metavar="N", type=at_least(0), default=0, help="which row of it (default: 0)")
    parser.add_argument(
        "--color", metavar="COLUMN", default="surprise", help="what the colours are (default: surprise)"
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="default: the run's own")


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out ``view``; the exit status."""
    if options.text:
        return _print(options, console)
    given = [name for name, default in _OF_TEXT.items() if getattr(options, name) != default]
    if given:
        raise InputError(f"--{given[0]} is of --text: add --text, or leave it out")
    return _export(options, console) if options.export else _serve(options, console)


def _export(options: argparse.Namespace, console: Console) -> int:
    from megatron_retool.runs.metrics_file import check_run_directory
    from megatron_retool.viewer.export import export

    check_run_directory(options.run_dir)
    made = export(options.run_dir.resolve(), options.export, options.step)
    left = f", {made.left_out} left out for their length" if made.left_out else ""
    console.print(
        f"wrote {options.export}: {made.size / 2**20:.1f} MiB, {made.responses} responses{left}", highlight=False
    )
    for problem in made.problems:
        console.print(f"note: {problem}", markup=False, highlight=False)
    return 0


def _serve(options: argparse.Namespace, console: Console) -> int:
    import asyncio

    from megatron_retool.interruption import interrupts
    from megatron_retool.runs.metrics_file import check_run_directory
    from megatron_retool.viewer.run_directories import runs_below
    from megatron_retool.viewer.server import serve

    root = options.run_dir.resolve()
    check_run_directory(root)
    if not runs_below(root):
        raise FileNotFoundError(f"{root} holds no run: a run is a folder with a config.yaml")

    def started(address: str) -> None:
        console.print(f"{address} shows {options.run_dir}; Ctrl-C ends it", highlight=False)

    try:
        with interrupts():
            asyncio.run(serve(root, options.host, options.port, started))
    except OSError as error:
        raise InputError(
            f"--host {options.host} --port {options.port}: {error.strerror or error}: name an address of this machine "
            "and a free port"
        ) from error
    return 0


def _print(options: argparse.Namespace, console: Console) -> int:
    from megatron_retool.viewer.columns import KINDS, token_columns
    from megatron_retool.viewer.stored_step import load_step
    from megatron_retool.viewer.terminal import print_groups, print_response
    from megatron_retool.viewer.token_texts import token_texts

    if options.color not in KINDS:
        raise InputError(f"--color {options.color!r} is not one of {', '.join(KINDS)}")
    if len(options.step) > 1:
        raise InputError("--text shows one --step")
    step = load_step(options.run_dir, *options.step)
    if options.group is None:
        print_groups(console, step)
        return 0
    row = step.find(options.group, options.index, options.segment)
    trajectory = step.trajectories[row]
    columns = token_columns(trajectory, step.estimates.get(trajectory.key))
    if options.color not in columns:
        raise InputError(
            f"--color {options.color}: the learner has not computed it for response {options.group}/{options.index} of "
            f"step {step.number}, which has {', '.join(columns)}"
        )
    tokenizer = _tokenizer(options.run_dir, options.tokenizer)
    texts = token_texts(trajectory.response_ids.tolist(), lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
    prompt = step.prompts[row] or tokenizer.decode(trajectory.prompt_ids.tolist(), skip_special_tokens=False)
    print_response(console, trajectory, (prompt, texts), columns, KINDS[options.color])
    return 0


def _tokenizer(run_dir: Path, given: str | None) -> Any:
    from megatron_retool.config import ModelConfig
    from megatron_retool.data.tokenizer import load_tokenizer
    from megatron_retool.viewer.tokenizers import tokenizer_directory

    return load_tokenizer(ModelConfig(path=given) if given is not None else tokenizer_directory(run_dir))
