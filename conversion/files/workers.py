"""Work spread over threads or given to a process of its own, and its progress bar."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

Job = TypeVar("Job")
Result = TypeVar("Result")


def default_workers(nbytes: int) -> int:
    """One worker for each GiB, at most the cores that this process may use, and 8."""
    return max(1, min(len(os.sched_getaffinity(0)), 8, nbytes // 2**30 + 1))


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


class _Ended(Exception):
    """Another job failed, or the command is stopping."""


def run_jobs[Job, Result](
    function: Callable[[Job, Callable[[int], None]], Result], jobs: Sequence[Job], report: Callable[[int], None]
) -> list[Result]:
    """``function(job, report)`` for every job, each in a thread of its own; the results in the order of ``jobs``.

    Reading, writing, hashing and torch's operations all release the interpreter, so threads run as processes would,
    without the seconds that those take to import torch. ``report`` is called in the caller's thread with what the
    jobs report, and may raise. The first exception ends the other jobs at their next report and is raised here.
    """
    reports: queue.SimpleQueue[int] = queue.SimpleQueue()
    over = threading.Event()

    def note(part: int) -> None:
        if over.is_set():
            raise _Ended
        reports.put(part)

    def pass_on() -> None:
        while not reports.empty():
            report(reports.get())

    threads = torch.get_num_threads()
    with ThreadPoolExecutor(len(jobs), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = [pool.submit(function, job, note) for job in jobs]
        pending = set(futures)
        try:
            while pending:
                done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                pass_on()
                for future in done:
                    future.result()
            pass_on()
        finally:
            over.set()
            torch.set_num_threads(threads)
    return [future.result() for future in futures]


def _start_process() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    torch.set_num_threads(1)


def run_alone[Job, Result](function: Callable[[Job], Result], job: Job) -> Result:
    """``function(job)`` in a process of its own, which is killed where this one is interrupted meanwhile."""
    # spawn: a forked child would inherit locks of torch's threads in whatever state they are.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_start_process) as pool:
        # A process that is half-started when a signal is answered here would complain; and a terminal's Ctrl-C is this
        # process's alone to answer: what is started while it is blocked never sees it.
        signals = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            future = pool.submit(function, job)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        try:
            return future.result()
        except BaseException:
            for process in list((pool._processes or {}).values()):
                process.kill()
            raise


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error; yields a function of (bytes done, bytes in all)."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def counted(
    on_progress: Callable[[int, int], None] | None, total: int, check: Callable[[], object]
) -> Callable[[int], None]:
    """A function that counts parts as they are done, and gives ``on_progress`` their sum; it calls ``check`` first."""
    done = 0

    def report(part: int) -> None:
        nonlocal done
        check()
        done += part
        if on_progress is not None:
            on_progress(done, total)

    return report
