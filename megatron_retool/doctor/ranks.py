"""Several learner processes on this host, as a step starts them, and what rank 0 of them found."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_retool.doctor.outcome import StepFailed
from megatron_retool.doctor.session import Nodes, Session
from megatron_retool.ports import free_port

LOOPBACK = "127.0.0.1"


def run_ranks(
    session: Session, function: Callable[..., Any], world_size: int, *arguments: Any, nodes: Nodes | None = None
) -> Any:
    """Call ``function(*arguments)`` in ``world_size`` processes that are set up as torchrun does; the first's answer.

    With ``nodes`` each of them starts as many, and all are one group.

    Where there is no GPU they are forked from the step's process, which may not have used torch's threads before. They
    belong to the step's process group, and end with it.

    Raises:
        StepFailed: with the error of a rank that failed.
    """
    context: Any = multiprocessing.get_context("spawn" if session.gpus else "fork")
    port = free_port(LOOPBACK) if nodes is None else nodes.port
    answers = [session.directory / f"rank_{os.getpid()}_{port}_{rank}.pickle" for rank in range(world_size)]
    processes = [
        context.Process(target=_rank, args=(function, rank, world_size, port, answers[rank], arguments, nodes))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    failures = []
    for rank, (process, answer) in enumerate(zip(processes, answers, strict=True)):
        if not answer.exists():
            failures.append(f"rank {rank} ended with exit code {process.exitcode} and without an answer")
        elif isinstance(found := pickle.loads(answer.read_bytes()), _Failure):
            failures.insert(0, f"rank {rank}: {found.message}")
    if failures:
        raise StepFailed(failures[0])
    return pickle.loads(answers[0].read_bytes())


def set_rank_environment(rank: int, world_size: int, port: int, nodes: Nodes | None = None) -> None:
    """What torchrun gives a rank: number ``rank`` of ``world_size`` on this host, alone or as one of ``nodes``."""
    hosts, host, address = (nodes.count, nodes.rank, nodes.address) if nodes else (1, 0, LOOPBACK)
    os.environ.update(
        RANK=str(host * world_size + rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(hosts * world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    )
    if address == LOOPBACK and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may not resolve


class _Failure:
    def __init__(self, message: str) -> None:
        self.message = message


def _rank(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    answer: Path,
    arguments: tuple[Any, ...],
    nodes: Nodes | None,
) -> None:
    set_rank_environment(rank, world_size, port, nodes)
    import torch

    torch.set_num_threads(1)
    try:
        found = function(*arguments)
        answer.write_bytes(pickle.dumps(found if rank == 0 else None))
    except BaseException as error:
        traceback.print_exc()
        answer.write_bytes(pickle.dumps(_Failure(f"{type(error).__name__}: {error}")))
        os._exit(1)  # the others wait in a collective: leave without goodbye
    os._exit(0)
