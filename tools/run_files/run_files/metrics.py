"""metrics.jsonl, the record of a run: one JSON object per step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from untrusted import load_own_json


def read_metrics_and_problems(path: str | Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows in order, none where there is no such file, and a sentence for each line or value that is left out.

    Every row has a whole number as its step. A line that a crash cut off, or a disk damaged, is left out, and so is a
    value that is no number.
    """
    rows, problems = [], []
    path = Path(path)
    if path.is_file():
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            row = row_of_line(line)
            if row is None:
                problems.append(f"{path}, line {number} is no JSON object, or only half of one: it is left out")
            elif type(row.get("step")) is not int:
                problems.append(f"{path}, line {number} has no whole number as its step: it is left out")
            else:
                wrong = [name for name, value in row.items() if isinstance(value, str | list | dict)]
                problems += [f"{path}, line {number}: {name} is no number: it is left out" for name in wrong]
                rows.append({name: value for name, value in row.items() if name not in wrong})
    return rows, problems


def row_of_line(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None where it is none. Zeros, which a crash leaves of a file's end, are passed over."""
    try:
        row = load_own_json(line.strip(b"\0 \t\r\n").decode())
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
