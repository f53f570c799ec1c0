"""Processes of one group: whose answer comes back, and whose error."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_retool.parity.ranks import RankFailed, answer_of_ranks


def run(function: Callable[..., Any], directory: Path, *arguments: Any, timeout: float | None = None) -> Any:
    return answer_of_ranks(multiprocessing.get_context("fork"), function, 2, arguments, directory, timeout=timeout)


def surroundings(what: str) -> dict[str, Any]:
    return {what: os.environ["RANK"], "world": os.environ["WORLD_SIZE"], "threads": os.environ["OMP_NUM_THREADS"]}


def fail_in_turn(first: str) -> None:
    if os.environ["RANK"] != first:
        time.sleep(0.5)
        raise ConnectionError("the other rank is gone")
    raise ValueError("what went wrong")


def stay(rank: str) -> None:
    if os.environ["RANK"] == rank:
        time.sleep(60)


def leave() -> None:
    os._exit(3)


def test_the_first_ranks_answer(tmp_path: Path) -> None:
    assert run(surroundings, tmp_path, "rank") == {"rank": "0", "world": "2", "threads": "1"}


@pytest.mark.parametrize("first", ["0", "1"])
def test_the_error_that_came_first_is_told(tmp_path: Path, first: str) -> None:
    with pytest.raises(RankFailed, match=rf"rank {first} failed:[\s\S]*fail_in_turn[\s\S]*what went wrong") as error:
        run(fail_in_turn, tmp_path, first)
    assert error.value.summary == f"rank {first}: ValueError: what went wrong"
    sent = pickle.loads(pickle.dumps(error.value))
    assert (str(sent), sent.summary) == (str(error.value), error.value.summary)


def test_ranks_that_do_not_end_are_killed_and_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 ended with exit code -9 and without an answer, given 8 s"):
        run(stay, tmp_path, "1", timeout=8)
    assert capfd.readouterr().err.count(" in stay\n") == 1, "what it was doing, and only of the one that stayed"
    with pytest.raises(RankFailed, match=r"rank 0 ended with exit code 3"):
        run(leave, tmp_path)
