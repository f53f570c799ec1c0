"""metrics.jsonl, the record of a run: one JSON object per step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def check_run_directory(run_dir: Path) -> None:
    """Raise FileNotFoundError where there is no such directory."""
    if not run_dir.is_dir():
        raise FileNotFoundError(f"{run_dir} is no directory: name that of a run, runs/<experiment_name>")


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl in order; none where there is no such file. A line that a crash cut off, or a disk
    damaged, is left out."""
    return read_metrics_and_problems(path)[0]


def read_metrics_and_problems(path: str | Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows, as ``read_metrics``, and a sentence for each line that is none."""
    rows, problems = [], []
    path = Path(path)
    if path.is_file():
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            try:
                row = json.loads(line)
            except ValueError:  # JSON's or UTF-8's
                row = None
            if isinstance(row, dict):
                rows.append(row)
            else:
                problems.append(f"{path}, line {number} is no JSON object, or only half of one: it is left out")
    return rows, problems


def drop_rows_from(path: Path, step: int) -> None:
    """Cut metrics.jsonl off before the first row of ``step`` or later, or before a half-written line.

    This needs no room, which a disk may lack when a run resumes.
    """
    if not path.exists():
        return
    end = 0
    with open(path, "rb+") as handle:
        for line in handle:
            try:
                if not line.endswith(b"\n") or json.loads(line)["step"] >= step:
                    break
            except json.JSONDecodeError:
                break
            end += len(line)
        handle.truncate(end)
