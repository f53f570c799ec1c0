"""Data files read a few thousand rows at a time: what is in memory does not grow with the file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_retool.data.files import DataError, check_values, json_lines_table, read_table
from run_files.parquet_files import UnreadableFile, check_expansion, damage_named

BATCH_ROWS = 4096
_READ_BYTES = 1 << 20
"""Of a parquet column at once. Without a limit pyarrow reads a row group's whole column, and files such as
DAPO-Math-17k have row groups of hundreds of thousands of rows."""
SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".json")
"""Of the files that can be read, those that are preferred first."""


@dataclass(frozen=True)
class Batch:
    """Some rows of a file."""

    file: str
    first: int
    """Row of the file that ``rows`` begins with."""
    rows: pa.RecordBatch


class RowFile:
    """A parquet, JSON Lines or JSON file.

    Args:
        path: where it lies.
        name: what messages call it.

    Raises:
        DataError: it is missing, damaged, or of another kind.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._path, self.name = path, name
        if path.suffix not in SUFFIXES:
            raise DataError(f"{name}: expected a {', '.join(SUFFIXES)} file")
        self.schema, self.rows = _parquet_head(path, name) if path.suffix == ".parquet" else _json_head(path, name)

    @property
    def columns(self) -> list[str]:
        """Names of the file's columns."""
        return self.schema.names

    def batches(self, columns: Sequence[str]) -> Iterator[Batch]:
        """Its rows in order, only with ``columns``, which it has.

        Raises:
            DataError: naming the file and where in it the damage is.
        """
        first = 0
        batches = self._parquet(columns) if self._path.suffix == ".parquet" else self._json(columns)
        while True:
            try:
                with damage_named(f"{self.name}, from row {first} on"):
                    rows = next(batches)
            except StopIteration:
                return
            except DataError:
                raise
            except UnreadableFile as error:
                raise DataError(f"{error}{self._damaged_column(columns)}") from error
            check_values(self.name, rows, first)
            yield Batch(self.name, first, rows)
            first += rows.num_rows

    def _parquet(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        with pq.ParquetFile(
            self._path, buffer_size=_READ_BYTES, pre_buffer=False, page_checksum_verification=True
        ) as file:
            yield from file.iter_batches(BATCH_ROWS, columns=list(columns), use_threads=False)

    def _damaged_column(self, columns: Sequence[str]) -> str:
        """Which of ``columns`` cannot be read, for the end of a message."""
        for name in columns if self._path.suffix == ".parquet" else ():
            try:
                for _ in self._parquet([name]):
                    pass
            except (pa.ArrowException, OSError, ValueError):
                return f" (column {name!r})"
        return ""

    def _json(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        missing = [pa.field(name, self.schema.field(name).type) for name in columns]
        for table in _json_tables(self._path, self.name):
            for field in missing:
                if field.name not in table.column_names:
                    table = table.append_column(field, pa.nulls(len(table), field.type))
            yield from table.select(list(columns)).combine_chunks().to_batches()


def _parquet_head(path: Path, name: str) -> tuple[pa.Schema, int]:
    try:
        check_expansion(path)
        with damage_named(name), pq.ParquetFile(path) as file:
            return file.schema_arrow, file.metadata.num_rows
    except UnreadableFile as error:
        raise DataError(str(error)) from error


def _json_head(path: Path, name: str) -> tuple[pa.Schema, int]:
    """The schema of its first rows, and its number of lines."""
    try:
        with damage_named(name):
            first = next(_json_tables(path, name), None)
            with path.open("rb") as file:
                lines = sum(1 for _ in file) if path.suffix != ".json" else 0
    except DataError:
        raise
    except UnreadableFile as error:
        raise DataError(str(error)) from error
    if first is None:
        raise DataError(f"{name}: no rows")
    return first.schema, lines or len(first)


def _json_tables(path: Path, name: str) -> Iterator[pa.Table]:
    if path.suffix == ".json":
        yield read_table(path)
        return
    first = 0
    with path.open("rb") as file:
        while lines := list(itertools.islice(file, BATCH_ROWS)):
            yield json_lines_table(name, b"".join(lines), first)
            first += len(lines)
