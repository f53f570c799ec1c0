"""Start learner processes on this machine and bring back what rank 0 found."""

from __future__ import annotations

import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from megatron_retool.doctor.ranks import set_rank_environment


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    directory: Path,
    *args: Any,
    timeout: float = 400,
    start_method: str | None = None,
) -> Any:
    """Call ``function(*args)`` in ``world_size`` new processes set up as torchrun would; rank 0's answer.

    Args:
        start_method: multiprocessing's, where the usual one (see ``_context``) does not do.

    Raises:
        RuntimeError: with the traceback of a rank that failed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context: Any = multiprocessing.get_context(start_method) if start_method else _context()
    processes = [
        context.Process(target=_rank, args=(function, rank, world_size, port, directory, args))
        for rank in range(world_size)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    for rank in range(world_size):
        failure = directory / f"failure_{rank}.txt"
        if failure.exists():
            raise RuntimeError(f"rank {rank} failed:\n{failure.read_text()}")
    answer = directory / "answer.pt"
    if not answer.exists():
        raise RuntimeError(f"no answer within {timeout} s; exit codes {[p.exitcode for p in processes]}")
    return torch.load(answer, weights_only=False)


def _context() -> Any:
    """Where there is no GPU, ranks are forked from one process of the session that has done the imports: they take
    seconds and are the same in each. CUDA, which imports may open, does not survive a fork."""
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megatron_retool.learner.learner", "megatron_retool.admission.parity"])
    scratch = tempfile.tempdir
    try:
        # Its socket is removed after the process's scratch directory is.
        tempfile.tempdir = str(Path(tempfile.gettempdir()).parent)
        forkserver.ensure_running()
    finally:
        tempfile.tempdir = scratch
    return context


def _rank(
    function: Callable[..., Any], rank: int, world_size: int, port: int, directory: Path, args: tuple[Any, ...]
) -> None:
    set_rank_environment(rank, world_size, port)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    try:
        answer = function(*args)
        if rank == 0:
            torch.save(answer, directory / "answer.pt")
    except BaseException:
        (directory / f"failure_{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)  # the other ranks wait in a collective: leave without goodbye
    os._exit(0)
