"""metrics.jsonl, the record of a run: one JSON object per step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from run_files import METRICS_FILE, check_run_directory
from run_files.atomic_files import atomic_write
from run_files.metrics import read_metrics_and_problems, row_of_line


def require_rows(run_dir: Path, purpose: str) -> tuple[list[dict[str, Any]], list[str]]:
    """As ``read_metrics_and_problems`` of a run's directory, which has to have a row.

    Args:
        purpose: what there would be without one, such as "nothing to report".

    Raises:
        FileNotFoundError: there is no such directory, or its metrics.jsonl is missing, no file, or has no row that can
            be read; the message says which, and names the first damaged line.
    """
    check_run_directory(run_dir)
    path = run_dir / METRICS_FILE
    if not path.is_file():
        state = "is a directory" if path.is_dir() else "is missing"
        raise FileNotFoundError(f"{path} {state}: {purpose} before the run has finished a step; or name another run")
    rows, problems = read_metrics_and_problems(path)
    if not rows:
        reason = f" ({problems[0]})" if problems else ""
        raise FileNotFoundError(f"{path} has no rows{reason}: {purpose}; name another run, or restore the file")
    return rows, problems


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl in order; none where there is no such file. Every row has a whole number as its step.
    A line that a crash cut off, or a disk damaged, is left out, and so is a value that is no number."""
    return read_metrics_and_problems(path)[0]


def step_of_line(line: bytes) -> int | None:
    """The step of a line's row; None where the line is damaged."""
    step = (row_of_line(line) or {}).get("step")
    return step if type(step) is int else None


def drop_rows_from(path: Path, step: int) -> list[str]:
    """Take the rows of ``step`` and later out of metrics.jsonl, and a last line that a crash cut off.

    Damaged lines between the rows that stay are kept as they are.

    Returns:
        A sentence for each line that is damaged or was cut off.
    """
    if not path.exists():
        return []
    problems = read_metrics_and_problems(path)[1]

    def stays(line: bytes) -> bool:
        own = step_of_line(line)
        return line.endswith(b"\n") and step > 0 if own is None else own < step

    drop_lines(path, stays)
    return problems


def drop_lines(path: Path, keep: Callable[[bytes], bool]) -> None:
    """Leave the lines of ``path`` that ``keep`` says, each of which then ends with a line break.

    Where these are the first ones, the file is only cut: that needs no room, which a disk may lack when a run resumes.

    Raises:
        OSError: there is no room for the lines that stay; the file is as it was.
    """
    with open(path, "rb+") as handle:
        lines = handle.readlines()
        kept = [line for line in lines if keep(line)]
        size = sum(map(len, kept))
        if kept == lines[: len(kept)]:
            handle.truncate(size)
            if kept and not kept[-1].endswith(b"\n"):
                handle.seek(size)
                handle.write(b"\n")
            return
    with atomic_write(path) as whole:
        whole.writelines(line if line.endswith(b"\n") else line + b"\n" for line in kept)
