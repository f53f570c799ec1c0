"""Start learner processes on this machine and bring back what rank 0 found."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch

from megatron_retool.doctor.ranks import answer_of_ranks


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
        RankFailed: with the traceback of the rank that failed first.
    """
    directory.mkdir(parents=True, exist_ok=True)
    context: Any = multiprocessing.get_context(start_method) if start_method else _context()
    return answer_of_ranks(context, function, world_size, args, directory, timeout=timeout)


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
