"""What a run shows of work that takes a while, on a terminal and elsewhere."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from megatron_retool.runs import progress
from megatron_retool.runs.progress import Activities, progress_line


def output_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def wait_for(text: str, console: Console) -> None:
    deadline = time.monotonic() + 10
    while text not in output_of(console):
        assert time.monotonic() < deadline, output_of(console)
        time.sleep(0.005)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Console:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.02)
    return Console(file=io.StringIO(), soft_wrap=True)


@pytest.fixture
def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100)


def test_counts_in_a_file_now_and_then(plain: Console) -> None:
    with progress_line(plain, "step 1 rollout", 0) as line:
        line.extend(64)
        line.advance(8)
        line.note("round 1, 0 groups so far")
        wait_for("step 1 rollout: 8 of 64 after 0 s, round 1, 0 groups so far\n", plain)
        line.advance()
        wait_for("step 1 rollout: 9 of 64", plain)
    before = output_of(plain)
    time.sleep(0.1)
    assert output_of(plain) == before, "nothing is said after the end"


def test_short_work_leaves_no_line_in_a_file() -> None:
    console = Console(file=io.StringIO())
    with progress_line(console, "step 1 rollout", 4) as line:
        line.advance(4)
    assert output_of(console) == ""


def test_pauses_grow_with_the_time_gone_by() -> None:
    assert [progress.pause(seconds) for seconds in (0.0, 200.0, 3600.0)] == [20.0, 20.0, 360.0]


def test_bar_on_a_terminal(terminal: Console) -> None:
    with progress_line(terminal, "validation", 2) as line:
        line.advance()
        line.extend(1)
        line.note("half")
    text = output_of(terminal)
    assert "validation" in text and "1/3" in text and "half" in text
    assert "after" not in text


def test_what_is_being_started_in_a_file(plain: Console) -> None:
    activities = Activities(plain)
    with activities.part("starting 2 engines"):
        with activities.part("building the learner"):
            wait_for("still starting 2 engines, building the learner after 0 s\n", plain)
        assert "building the learner: done after 0." in output_of(plain)
        assert "starting 2 engines: done" not in output_of(plain)
    assert output_of(plain).startswith("starting 2 engines\nbuilding the learner\nstill ")
    assert output_of(plain).endswith("s\n")
    with pytest.raises(OSError), activities.part("sending the weights"):
        raise OSError
    assert output_of(plain).endswith("sending the weights\n"), "what failed is not done"


def test_what_is_being_started_on_a_terminal(terminal: Console) -> None:
    activities = Activities(terminal)
    with activities.part("starting Ray"):
        pass
    with activities.part("starting 1 engine"), activities.part("building the learner"):
        time.sleep(0.2)
    with progress_line(terminal, "rollout", 3), activities.part("starting 1 engine"):
        pass  # two live lines at once
    text = output_of(terminal)
    assert "starting Ray" in text and "starting 1 engine, building the learner" in text
    assert "done" not in text
