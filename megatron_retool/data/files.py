"""Opening data files: one clear error for each way in which a file can be wrong."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq

from megatron_retool.data.folders import DataError as DataError
from megatron_retool.data.folders import data_files as data_files
from run_files.atomic_files import atomic_write
from run_files.parquet_files import UnreadableFile, check_expansion, damage_named, read_parquet
from untrusted import MOST_LEVELS, load_json


def read_table(path: str | Path) -> pa.Table:
    """A parquet, JSON Lines or JSON (an array of objects) file as an Arrow table.

    Raises:
        DataError: the file is missing, of another kind, damaged, empty, names a column twice, or holds text that is no
            UTF-8 or JSON that is nested too deeply; with row and column where they are known.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: the file does not exist")
    if path.suffix not in _READERS:
        raise DataError(f"{path}: expected a .parquet, .jsonl or .json file")
    try:
        with damage_named(path):
            table = _READERS[path.suffix](path)
    except DataError:
        raise
    except UnreadableFile as error:
        raise DataError(str(error)) from error
    if table.num_rows == 0:
        raise DataError(f"{path}: no rows")
    return table


def _read_parquet(path: Path) -> pa.Table:
    check_expansion(path)
    return read_parquet(path)


def _read_json_lines(path: Path) -> pa.Table:
    return json_lines_table(path, path.read_bytes())


def json_lines_table(path: str | Path, content: bytes, first: int = 0) -> pa.Table:
    """The table of some lines of ``path``; the first one is row ``first``.

    Raises:
        DataError: a line is nested too deeply, or its text is no UTF-8.
    """
    for row, line in enumerate(content.splitlines(), first):
        # Arrow's parser crashes on deep nesting. Most lines have too few brackets to be looked at.
        if line.count(b"[") + line.count(b"{") >= MOST_LEVELS:
            try:
                load_json(line, finite=False)
            except ValueError as error:
                raise DataError(f"{path}, row {row}: {error}: correct the row or leave it out") from error
    table = pyarrow.json.read_json(io.BytesIO(content))
    check_values(path, table, first)
    return table


def check_values(path: str | Path, table: pa.Table | pa.RecordBatch, first: int = 0) -> None:
    """Raise DataError where text of ``table``, whose first row is row ``first`` of ``path``, is no UTF-8."""
    for name in table.schema.names:
        for row, value in enumerate(_invalid(table.column(name)), first):
            if value:
                raise DataError(f"{path}, row {row}, column {name!r}: the text is no UTF-8: write the file as UTF-8")


def _invalid(column: pa.ChunkedArray | pa.Array) -> Iterator[bool]:
    """Whether each value is not what its type says; nothing where all are."""
    try:
        column.validate(full=True)
    except pa.ArrowException:
        for row in range(len(column)):
            try:
                column.slice(row, 1).validate(full=True)
            except pa.ArrowException:
                yield True
            else:
                yield False


def _read_json(path: Path) -> pa.Table:
    try:
        rows = load_json(path.read_bytes(), finite=False)
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path}: expected an array of objects")
    try:
        return pa.Table.from_pylist(rows)
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise DataError(f"{path}{_place_of_value(rows)}: {str(error).splitlines()[0]}") from error


def _place_of_value(rows: list[dict[str, Any]]) -> str:
    """ ", row 3, column 'answer'": the value that Arrow refuses, or less where only several together are refused."""
    for name in {name: None for row in rows for name in row}:
        for number, row in enumerate(rows):
            try:
                pa.array([row.get(name)])
            except (pa.ArrowException, ValueError, OverflowError):
                return f", row {number}, column {name!r}"
        try:
            pa.array([row.get(name) for row in rows])
        except (pa.ArrowException, ValueError, OverflowError):
            return f", column {name!r}"
    return ""


_READERS: dict[str, Callable[[Path], pa.Table]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
}


def require_columns(path: str | Path, table: pa.Table, names: Iterable[str], cure: str = "") -> None:
    """Raise DataError where one of ``names`` is not a column; ``cure`` ends its message."""
    missing = [name for name in names if name not in table.column_names]
    if missing:
        has = ", ".join(table.column_names)
        raise DataError(f"{path}: column {missing[0]!r} is missing; the file has {has}{cure}")


def decode_json(value: Any, path: str | Path, row: int, column: str) -> Any:
    """``value``, decoded if it is JSON text.

    Raises:
        DataError: it is text and no JSON, or holds what no tokenizer and no file takes.
    """
    if not isinstance(value, str):
        return value
    try:
        return load_json(value, finite=False)
    except ValueError as error:
        raise DataError(f"{path}, row {row}, column {column!r}: not valid JSON: {error}") from error


def check_text(value: Any, path: str | Path, row: int, column: str) -> None:
    """Raise DataError where text in ``value``, at any depth, holds half of a surrogate pair, as JSON's "\\ud800"."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        result = error.object[error.start]
        raise DataError(
            f"{path}, row {row}, column {column!r}: the text holds half of a surrogate pair ({result!r}), which is no "
            "character: take it out"
        ) from error


def write_parquet(path: str | Path, table: pa.Table) -> None:
    """Write a table under a temporary name, and rename it."""
    with atomic_write(path) as handle:
        pq.write_table(table, handle, compression="zstd", write_page_checksum=True)
