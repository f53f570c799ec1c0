"""What the policy of a run did: curves, time, steps, responses and their tokens, on a web page or on the terminal.

The page shows the run, or all runs, in PATH, and what a run that is at work adds. Its address is printed; keys are
listed under ? there.

With --text a run's step is printed: a line for each group, or with --group a response with every token in a colour.

examples:
  run-viewer runs
  run-viewer runs/demo --port 8800
  run-viewer runs/demo --export demo.html --step 1 20
  run-viewer --text runs/demo --step 12 --group 3 --color log_ratio
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from untrusted.errors import InputError, UserError

_OF_TEXT = {"group": None, "index": 0, "segment": 0, "color": "surprise", "tokenizer": None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("run_dir", metavar="PATH", type=Path, help="a run's directory, runs/<experiment_name>, or runs")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, only this machine)"
    )
    parser.add_argument("--port", metavar="P", type=_port, default=0, help="default: a free one")
    parser.add_argument("--export", metavar="FILE", type=Path, help="write the page into one HTML file and end")
    parser.add_argument("--text", action="store_true", help="a step of a run, on this terminal")
    parser.add_argument(
        "--step",
        metavar="N",
        type=_at_least(1),
        nargs="+",
        default=[],
        help="of --text and --export (default: the newest)",
    )
    parser.add_argument("--group", metavar="ID", type=_at_least(0), help="show a response of this group")
    parser.add_argument("--index", metavar="N", type=_at_least(0), default=0, help="which response (default: 0)")
    parser.add_argument("--segment", metavar="N", type=_at_least(0), default=0, help="which row of it (default: 0)")
    parser.add_argument(
        "--color", metavar="COLUMN", default="surprise", help="what the colours are (default: surprise)"
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="default: the run's own")


def _at_least(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return whole_number


def _port(text: str) -> int:
    if not text.strip().isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: a whole number from 0 to 65535")
    return int(text)


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out the command; the exit status.

    Raises:
        UserError, OSError: what the person who runs it can mend.
    """
    if options.text:
        return _print(options, console)
    given = [name for name, default in _OF_TEXT.items() if getattr(options, name) != default]
    if given:
        raise InputError(f"--{given[0]} is of --text: add --text, or leave it out")
    return _export(options, console) if options.export else _serve(options, console)


def _export(options: argparse.Namespace, console: Console) -> int:
    from run_files import check_run_directory
    from run_viewer.export import export

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

    from run_files import check_run_directory
    from run_viewer.run_directories import runs_below
    from run_viewer.server import serve

    root = options.run_dir.resolve()
    check_run_directory(root)
    if not runs_below(root):
        raise FileNotFoundError(f"{root} holds no run: a run is a folder with a config.yaml")

    def started(address: str) -> None:
        console.print(f"{address} shows {options.run_dir}; Ctrl-C ends it", highlight=False)

    try:
        asyncio.run(serve(root, options.host, options.port, started))
    except OSError as error:
        raise InputError(
            f"--host {options.host} --port {options.port}: {error.strerror or error}: name an address of this machine "
            "and a free port"
        ) from error
    return 0


def _print(options: argparse.Namespace, console: Console) -> int:
    from run_viewer.columns import KINDS, token_columns
    from run_viewer.stored_step import load_step
    from run_viewer.terminal import print_groups, print_response
    from run_viewer.token_texts import token_texts
    from run_viewer.tokenizers import load_decoder, tokenizer_path

    if options.color not in KINDS:
        raise InputError(f"--color {options.color!r} is not one of {', '.join(KINDS)}")
    if len(options.step) > 1:
        raise InputError("--text shows one --step")
    step = load_step(options.run_dir, *options.step)
    if options.group is None:
        print_groups(console, step)
        return 0
    response = step.find(options.group, options.index, options.segment)
    columns = token_columns(response, step.estimates.get(response.key))
    if options.color not in columns:
        raise InputError(
            f"--color {options.color}: the learner has not computed it for response {response.name} of step "
            f"{step.number}, which has {', '.join(columns)}"
        )
    decode = load_decoder(options.tokenizer or tokenizer_path(options.run_dir))
    prompt = response.prompt or decode(response.prompt_ids.tolist())
    texts = token_texts(response.response_ids.tolist(), decode)
    print_response(console, response, (prompt, texts), columns, KINDS[options.color])
    return 0


def main(arguments: list[str] | None = None) -> int:
    """0 done, 1 an error, which was printed, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="run-viewer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    options = parser.parse_args(arguments)
    console = Console(soft_wrap=not sys.stdout.isatty(), emoji=False)
    try:
        return run(options, console)
    except KeyboardInterrupt:
        return 130
    except (UserError, OSError) as error:
        console.print("[bold red]error:[/]", escape(str(error)), highlight=False)
        return 1


if __name__ == "__main__":
    sys.exit(main())
