"""Lists the engines of a run that is training, and adds or removes some without a restart.

Without --add and --remove the engines are listed. --add starts engines on GPUs
that the run does not use yet, also of a node that joined the run's Ray later;
each gets the current weights before its first request. --remove ends engines by
their numbers; their trajectories continue on other engines from the tokens they
have. Training continues meanwhile. A run that is started again begins with
rollout.engine.count engines.

examples:
  megatron-retool engines runs/demo
  megatron-retool engines runs/demo --add 1
  megatron-retool engines runs/demo --remove 0 2
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_retool.commands.settings import at_least
from megatron_retool.errors import InputError, OperationError
from megatron_retool.runs.engines import MOST_ADDED, EngineRequest, ask, read_engines, take_answer, withdraw
from run_files import check_run_directory

LOOK_SECONDS = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``engines`` takes on the command line."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="runs/<experiment_name>")
    change = parser.add_mutually_exclusive_group()
    change.add_argument("--add", metavar="N", type=at_least(1), help=f"start N more, at most {MOST_ADDED}")
    change.add_argument("--remove", metavar="NUMBER", type=at_least(0), nargs="+", help="end these")


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out ``engines``; the exit status."""
    check_run_directory(options.run_dir)
    read_engines(options.run_dir)
    if options.add or options.remove:
        if (options.add or 0) > MOST_ADDED:
            raise InputError(f"--add {options.add}: at most {MOST_ADDED} at a time")
        request = EngineRequest(add=options.add or 0, remove=tuple(dict.fromkeys(options.remove or ())))
        console.print(_carried_out(options.run_dir, request, console), markup=False, highlight=False)
    table = Table("number", "URL", "node", "GPUs")
    for engine in read_engines(options.run_dir):
        gpus = ", ".join(map(str, engine.gpus)) or "CPU"
        table.add_row(str(engine.number), engine.url, str(engine.node), gpus)
    console.print(table)
    return 0


def _carried_out(run_dir: Path, request: EngineRequest, console: Console) -> str:
    """What the run says once it has carried ``request`` out.

    Raises:
        OperationError: it could not.
        InputError: it ended meanwhile.
    """
    path = ask(run_dir, request)
    try:
        with console.status("the run starts what was asked for" if request.add else "the run moves trajectories"):
            while (said := take_answer(path)) is None:
                read_engines(run_dir)  # raises where the run has ended
                time.sleep(LOOK_SECONDS)
    except BaseException:
        withdraw(path)
        raise
    if not said.done:
        raise OperationError(said.text)
    return said.text
