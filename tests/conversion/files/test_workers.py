"""Jobs in threads: results in order, reports in the caller's thread, one failure ends all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from conversion.files.workers import run_jobs


def test_results_are_in_order_and_reports_reach_the_caller() -> None:
    threads, seen = torch.get_num_threads(), list[tuple[int, threading.Thread]]()
    second = threading.Event()

    def work(job: int, report: Callable[[int], None]) -> int:
        assert torch.get_num_threads() == 1
        second.set() if job else second.wait()
        report(job)
        return job * 10

    results = run_jobs(work, [0, 1], lambda part: seen.append((part, threading.current_thread())))
    assert results == [0, 10] and torch.get_num_threads() == threads
    assert sorted(part for part, _ in seen) == [0, 1] and {thread for _, thread in seen} == {threading.main_thread()}


@pytest.mark.parametrize("where", ["job", "report"])
def test_one_failure_ends_the_others(where: str) -> None:
    ended = threading.Event()

    def work(job: int, report: Callable[[int], None]) -> None:
        if job and where == "job":
            raise OSError("disk on fire")
        try:
            while True:
                report(1)
                time.sleep(0.01)
        except Exception:
            ended.set()
            raise

    def report(part: int) -> None:
        if where == "report":
            raise OSError("disk on fire")

    with pytest.raises(OSError, match="disk on fire"):
        run_jobs(work, [0, 1], report)
    assert ended.is_set()
