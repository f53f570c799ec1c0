"""Proves the stack on this machine, layer by layer: what works, what does not, and the cure.

Host, driver and versions; kernels; the learner's log-probs, loss and gradients
against the CPU's; every parallel layout; SGLang against the learner; every way of
new weights; sleep and wake; checkpoints; speed; a run. Each step has a process and
a time-out of its own. Needs no model and no data. On a host without GPUs it runs
what there is. docs/gpu_first_run.md says what each step adds.

examples:
  megatron-retool doctor
  megatron-retool doctor --gpus 8 --output doctor_8xh100.json
  megatron-retool doctor --steps kernels learner_bf16
  megatron-retool doctor --slurm "--nodes=2 --gpus-per-node=8 --partition=h100"
  megatron-retool doctor --nodes 2 --node-rank 0 --rendezvous node1:29400
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from megatron_retool.commands.settings import at_least
from megatron_retool.config import ConfigError
from megatron_retool.data.path_checks import check_directory, check_output_file
from megatron_retool.interruption import interrupts
from megatron_retool.parity.doctor.catalogue import select
from megatron_retool.parity.ranks import Nodes

EXIT_STATUS = {1: "a step failed, or an error, which the last line says"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``doctor`` takes on the command line."""
    parser.add_argument("--gpus", metavar="N", type=at_least(0), help="GPUs to use (default: all; 0: none)")
    parser.add_argument(
        "--steps", dest="chosen", metavar="NAME", nargs="+", help="these steps or groups, with what they need"
    )
    parser.add_argument("--list", action="store_true", help="the steps, and what each proves")
    parser.add_argument(
        "--output", metavar="FILE", type=Path, default=Path("doctor.json"), help="report (default: doctor.json)"
    )
    parser.add_argument("--keep", metavar="DIR", type=Path, help="leave logs and files of the steps in DIR")
    parser.add_argument(
        "--nodes", metavar="N", type=at_least(2), help="measure the network too, between N hosts that all call this"
    )
    parser.add_argument("--node-rank", metavar="R", type=at_least(0), help="with --nodes: this host's number, from 0")
    parser.add_argument(
        "--rendezvous", metavar="HOST:PORT", help="with --nodes: the first host, and a port that is free there"
    )
    parser.add_argument(
        "--slurm",
        metavar="OPTIONS",
        nargs="?",
        const="",
        help="submit it to Slurm with these options of sbatch, for each node of the allocation",
    )


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out ``doctor``; the exit status."""
    # Before the imports, which take seconds, and before the steps, which take minutes.
    select(options.chosen)
    nodes = _nodes(options)
    check_output_file("--output", options.output)
    if options.keep is not None:
        check_directory("--keep", options.keep.absolute())
    from megatron_retool.parity.doctor import run as doctor

    if options.list:
        doctor.show_steps(options.chosen, console)
        return 0
    if options.slurm is not None:
        return doctor.submit(options.slurm, options.gpus, options.chosen, options.output)
    with interrupts():
        return doctor.examine(options.gpus, options.chosen, options.output, options.keep, console, nodes)


def _nodes(options: argparse.Namespace) -> Nodes | None:
    """What --nodes, --node-rank and --rendezvous say together.

    Raises:
        ConfigError: one of them is missing or does not fit the others.
    """
    given = {"--nodes": options.nodes, "--node-rank": options.node_rank, "--rendezvous": options.rendezvous}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if missing:
        raise ConfigError(f"{', '.join(missing)}: --nodes, --node-rank and --rendezvous belong together")
    if options.slurm is not None:
        raise ConfigError("--slurm counts the nodes of its allocation itself: leave out --nodes")
    if options.node_rank >= options.nodes:
        raise ConfigError(
            f"--node-rank {options.node_rank}: {options.nodes} nodes have the numbers 0 to {options.nodes - 1}"
        )
    host, _, port = options.rendezvous.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--rendezvous {options.rendezvous}: it has to be of the form HOST:PORT, as in node1:29400")
    return Nodes(options.nodes, options.node_rank, host, int(port))
