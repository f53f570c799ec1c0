"""Work spread over processes, and its progress bar."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


def default_processes(nbytes: int) -> int:
    """One worker for each 2 GiB, at most the cores that this process may use, and 8."""
    return max(1, min(len(os.sched_getaffinity(0)), 8, nbytes // 2**31 + 1))


def even_ranges(sizes: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """Cut ``range(len(sizes))`` into at most ``parts`` runs of about equal total size; none is empty."""
    ranges: list[tuple[int, int]] = []
    total, start, seen = sum(sizes), 0, 0
    for index, size in enumerate(sizes):
        seen += size
        if seen * parts >= total * (len(ranges) + 1) or index == len(sizes) - 1:
            ranges.append((start, index + 1))
            start = index + 1
    return ranges


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """For the length of the block SIGTERM is what Ctrl-C is, KeyboardInterrupt, and what begins to clean up is not
    interrupted again."""

    def end(number: int, frame: FrameType | None) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_progress_queue: Any = None


def _start_worker(queue: Any) -> None:
    global _progress_queue
    _progress_queue = queue
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to all, and the parent ends its workers
    torch.set_num_threads(1)


def _call_job(function: Callable[..., Any], job: Any) -> Any:
    return function(job, _progress_queue.put)


def run_jobs(function: Callable[..., Any], jobs: Sequence[Any], report: Callable[[int], None]) -> list[Any]:
    """``function(job, report)`` for every job, each in a process of its own; the results in the order of ``jobs``.

    The first exception of a job ends the others and is raised here.
    """
    # spawn: a forked child would inherit locks of torch's threads in whatever state they are.
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with ProcessPoolExecutor(len(jobs), context, initializer=_start_worker, initargs=(queue,)) as pool:
        futures = [pool.submit(_call_job, function, job) for job in jobs]
        pending = set(futures)
        try:
            while pending:
                done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                while not queue.empty():
                    report(queue.get())
                for future in done:
                    future.result()
        except BaseException:
            for process in list((pool._processes or {}).values()):
                process.terminate()
            raise
    return [future.result() for future in futures]


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error; yields a function of (bytes done, bytes in all)."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def counted(on_progress: Callable[[int, int], None] | None, total: int) -> Callable[[int], None]:
    """A function that is told of parts as they are done, and tells ``on_progress`` of their sum."""
    done = 0

    def report(part: int) -> None:
        nonlocal done
        done += part
        if on_progress is not None:
            on_progress(done, total)

    return report
