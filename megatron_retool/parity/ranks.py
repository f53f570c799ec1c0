"""Start learner processes on this host, and bring back what rank 0 found."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from megatron_retool.errors import OperationError
from megatron_retool.ports import free_port

LOOPBACK = "127.0.0.1"
FAILED = 1
"""Exit code of a rank that leaves its error as its answer."""


@dataclass(frozen=True)
class Nodes:
    """The hosts that one doctor each runs on at the same time.

    Attributes:
        count: of hosts.
        rank: of this one, from 0.
        address, port: of the first, where their ranks meet.
    """

    count: int
    rank: int
    address: str
    port: int


class RankFailed(OperationError):
    """A process of a group ended with an error, or without an answer; the message has its traceback.

    Attributes:
        summary: in one line.
    """

    def __init__(self, message: str, summary: str) -> None:
        super().__init__(message)
        self.summary = summary

    def __reduce__(self) -> Any:  # that of exceptions gives the message alone to __init__
        return RankFailed, (str(self), self.summary)


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    directory: Path,
    *args: Any,
    timeout: float = 400,
    start_method: str | None = None,
) -> Any:
    """``answer_of_ranks`` in new processes.

    Args:
        start_method: multiprocessing's, where the usual one (see ``_context``) does not do.

    Raises:
        RankFailed: with the traceback of the rank that failed first.
    """
    directory.mkdir(parents=True, exist_ok=True)
    context: Any = multiprocessing.get_context(start_method) if start_method else _context()
    return answer_of_ranks(context, function, world_size, args, directory, timeout=timeout)


def _context() -> Any:
    """Where there is no GPU, ranks are forked from one process of the session that has done the imports: they take
    seconds and are the same in each. CUDA, which imports may open, does not survive a fork."""
    import torch

    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megatron_retool.learner.learner", "megatron_retool.parity.admission.comparison"])
    scratch = tempfile.tempdir
    try:
        # Its socket is removed after the process's scratch directory is.
        tempfile.tempdir = str(Path(tempfile.gettempdir()).parent)
        forkserver.ensure_running()
    finally:
        tempfile.tempdir = scratch
    return context


def answer_of_ranks(
    context: Any,
    function: Callable[..., Any],
    world_size: int,
    arguments: tuple[Any, ...],
    directory: Path,
    *,
    nodes: Nodes | None = None,
    timeout: float | None = None,
) -> Any:
    """Call ``function(*arguments)`` in ``world_size`` processes that are set up as torchrun does; the first's answer.

    Args:
        context: multiprocessing's, which starts them.
        directory: for their answers.
        nodes: each of which starts as many, and all are one group.
        timeout: seconds for all of them, after which those that still run are killed, and have printed what they were
            doing; None: wait for as long as it takes.

    Raises:
        RankFailed: with the error of the rank that failed first: the others may fail for want of it.
    """
    port = free_port(LOOPBACK) if nodes is None else nodes.port
    answers = [directory / f"rank_{os.getpid()}_{port}_{rank}.pickle" for rank in range(world_size)]
    processes = [
        context.Process(target=_rank, args=(function, rank, world_size, port, answers[rank], arguments, nodes, timeout))
        for rank in range(world_size)
    ]
    end = None if timeout is None else time.monotonic() + timeout
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(end and max(0.0, end - time.monotonic()))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    failed = [rank for rank in range(world_size) if processes[rank].exitcode == FAILED and answers[rank].exists()]
    if failed:
        rank = min(failed, key=lambda rank: answers[rank].stat().st_mtime_ns)
        failure: _Failure = pickle.loads(answers[rank].read_bytes())
        raise RankFailed(f"rank {rank} failed:\n{failure.traceback}", f"rank {rank}: {failure.message}")
    codes = [process.exitcode for process in processes]
    for rank, code in enumerate(codes):
        if code != 0:
            within = "" if timeout is None else f", given {timeout:g} s"
            summary = f"rank {rank} ended with exit code {code} and without an answer"
            raise RankFailed(f"{summary}{within}; exit codes {codes}", summary)
    with open(answers[0], "rb") as file:
        return _AnswerReader(file).load()


class _AnswerReader(pickle.Unpickler):
    """Megatron-Core pickles tensors so that reading one imports it: that takes seconds, and may be too early here."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("megatron.core.safe_globals", "safe_load_from_bytes"):
            module, name = "torch.storage", "_load_from_bytes"
        return super().find_class(module, name)


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


@dataclass(frozen=True)
class _Failure:
    message: str
    traceback: str


def _rank(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    answer: Path,
    arguments: tuple[Any, ...],
    nodes: Nodes | None,
    timeout: float | None,
) -> None:
    if timeout is not None:
        faulthandler.dump_traceback_later(0.95 * timeout)
    set_rank_environment(rank, world_size, port, nodes)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    # A change of the layout asks for a collection: what is imported stays, and would be looked at in each of them.
    gc.freeze()
    try:
        result = function(*arguments)
        answer.write_bytes(pickle.dumps(result if rank == 0 else None))
    except BaseException as error:
        traceback.print_exc()
        answer.write_bytes(pickle.dumps(_Failure(f"{type(error).__name__}: {error}", traceback.format_exc())))
        os._exit(FAILED)  # the others wait in a collective: leave without goodbye
    os._exit(0)
