"""CSV: all steps in one table, metrics.csv in the run's folder, for spreadsheets and ``pandas.read_csv``.

The first column is the step, the others are metrics in the order of their first appearance. A metric that a step does
not have is an empty cell, and one that is not finite is nan, inf or -inf. Where a metric appears for the first time,
the file is written again under a temporary name, with one more column at its right end; other rows are appended. So
whoever reads it finds whole rows under one header, also after a crash.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megatron_retool.runs.append_file import AppendFile
from megatron_retool.runs.loggers import LoggedRun, Logger
from megatron_retool.runs.metrics_file import drop_lines
from run_files.atomic_files import atomic_write


class CsvLogger(Logger):
    """Rows of steps that the run is about to repeat, and a row that a crash cut off, are dropped first."""

    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        self._columns: list[str] = []
        self._waiting: list[dict[str, str]] = []
        """Rows that the disk had no room for; they come with the next."""
        if self.path.exists():
            self._columns = _drop_rows_from(self.path, run.first_step)

    @property
    def path(self) -> Path:
        """The file that is written."""
        return self.run.directory / "metrics.csv"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """
        Raises:
            OSError: nothing was written; the row comes with the next.
        """
        values = {" ".join(name.split()): repr(float(value)) for name, value in metrics.items()}
        self._waiting.append({"step": str(step), **values})
        self._write()

    def close(self) -> None:
        """Write the rows that wait for a column."""
        if self._waiting:
            self._write()

    def _write(self) -> None:
        columns = list(dict.fromkeys([*self._columns, *(name for row in self._waiting for name in row)]))
        if columns == self._columns:
            AppendFile(self.path).append(_encoded(self._waiting, columns))
        else:
            written = _read(self.path) if self._columns else []
            with atomic_write(self.path) as handle:
                handle.write(_encoded([dict(zip(columns, columns, strict=True)), *written, *self._waiting], columns))
        self._columns, self._waiting = columns, []


def _encoded(rows: Iterable[Mapping[str, str]], columns: Sequence[str]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([row.get(name, "") for name in columns] for row in rows)
    return text.getvalue().encode()


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle))


def _drop_rows_from(path: Path, step: int) -> list[str]:
    """Take the rows of ``step`` and later out of the file, and those that are not whole: metrics.jsonl has them.

    Returns:
        The columns of what is left; none where nothing is.
    """
    with path.open("rb") as handle:
        header = handle.readline()
    columns = _cells(header)
    if columns[:1] != ["step"]:
        columns = []

    def stays(line: bytes) -> bool:
        cells = _cells(line)
        return len(cells) == len(columns) and cells[:1] != [] and cells[0].isdecimal() and int(cells[0]) < step

    drop_lines(path, lambda line: bool(columns) and (line == header or stays(line)))
    return columns


def _cells(line: bytes) -> list[str]:
    """A row's cells; none where a crash or the disk has damaged it. No cell holds a line break."""
    if not line.endswith(b"\n"):
        return []
    try:
        return next(csv.reader([line.decode()]), [])
    except (UnicodeDecodeError, csv.Error):
        return []
