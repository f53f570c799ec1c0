"""A disk without room for what only describes a run: nothing is half-written, the run is told, and it goes on."""

from __future__ import annotations

import contextlib
import errno
import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_retool.runs.append_file import AppendFile
from megatron_retool.runs.logger import MetricLogger
from megatron_retool.runs.metrics_file import read_metrics
from megatron_retool.runs.write_errors import WriteErrors
from run_files.atomic_files import atomic_write


@contextlib.contextmanager
def room_for(size: int) -> Iterator[None]:
    """The kernel lets no file of this process grow beyond ``size`` bytes: a write is cut short, the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_record_is_written_whole_or_later(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "records")
    file.append(b"first\n")
    with room_for(9), pytest.raises(OSError):
        file.append(b"second\n")
    assert file.path.read_bytes() == b"first\n"
    with room_for(9), pytest.raises(OSError):
        file.append(b"third\n")
    file.append(b"fourth\n")
    assert file.path.read_bytes() == b"first\nsecond\nthird\nfourth\n"
    with room_for(9), pytest.raises(OSError):
        file.append(b"last\n")
    file.close()
    assert file.path.read_bytes().endswith(b"fourth\nlast\n")


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "step.parquet"
    path.write_bytes(b"old")
    with room_for(100), pytest.raises(OSError), atomic_write(path) as handle:
        handle.write(bytes(10_000))
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_metrics_and_events_miss_no_step_once_there_is_room(tmp_path: Path) -> None:
    console = Console(record=True, width=300)
    with MetricLogger(tmp_path, ["jsonl", "tensorboard"], console=console) as log:
        log.log(1, {"loss": 1.0})
        (events,) = (tmp_path / "tensorboard").iterdir()
        sizes = events.stat().st_size, (tmp_path / "metrics.jsonl").stat().st_size
        with room_for(min(sizes) + 5):
            log.log(2, {"loss": 2.0})
            log.log(3, {"loss": 3.0})
        # No half of a row or of an event.
        assert sizes == (events.stat().st_size, (tmp_path / "metrics.jsonl").stat().st_size)
        log.log(4, {"loss": 4.0})
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert [row.get("monitor/write_errors") for row in rows] == [None, None, 2.0, 4.0]
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert [(event.step, event.value) for event in accumulator.Scalars("loss")] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    printed = console.export_text()
    assert printed.count("was not written: File too large") == 2, printed  # once for each of the two places
    assert "metrics.jsonl was not written" in printed and "events.out.tfevents" in printed


def test_rows_are_dropped_on_a_full_disk(tmp_path: Path) -> None:
    rows = [json.dumps({"step": step, "loss": 0.5}) + "\n" for step in range(100)]
    (tmp_path / "metrics.jsonl").write_text("".join(rows) + '{"step": 100, "lo')
    with room_for(10), MetricLogger(tmp_path, ["jsonl"], first_step=60):
        pass
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(rows[:60])


def test_a_cause_is_named_once_until_something_is_written_again(tmp_path: Path) -> None:
    console = Console(record=True, width=300)
    errors = WriteErrors(console)

    def write(name: str, number: int | None) -> None:
        with errors.tolerated(tmp_path / name):
            if number is not None:
                raise OSError(number, "it failed")

    for name, number in (("a/1", errno.ENOSPC), ("a/2", errno.ENOSPC), ("a/3", errno.EIO), ("b/1", errno.ENOSPC)):
        write(name, number)
    write("a/4", None)
    write("a/5", errno.ENOSPC)
    write("b/2", errno.ENOSPC)
    assert errors.count == 6
    named = [line.split(" was not written")[0] for line in console.export_text().splitlines() if "was not" in line]
    assert named == [str(tmp_path / name) for name in ("a/1", "a/3", "b/1", "a/5")]
    with pytest.raises(ValueError), errors.tolerated(tmp_path):
        raise ValueError("a bug, not a disk")


FULL = """
import resource, sys
from rich.console import Console
from megatron_retool.runs.write_errors import print_to_full_disks
print_to_full_disks()
resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))
console = Console()
for number in range(9):
    console.print(f"line {number}")
    print("error", number, file=sys.stderr)
sys.exit(7)
"""


def test_output_to_a_full_disk_is_lost_and_nothing_else(tmp_path: Path) -> None:
    with open(tmp_path / "run.log", "wb") as log:
        code = subprocess.run([sys.executable, "-c", FULL], stdout=log, stderr=log, timeout=60).returncode
    assert code == 7
    assert (tmp_path / "run.log").read_text().startswith("line 0\nerror 0\n")
