"""Opening data files: one clear error for each way in which a file can be wrong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq

from megatron_retool.runs.files import atomic_write


class DataError(ValueError):
    """A data file cannot be used. The message names the file, the row and the column, and says what to do."""


def read_table(path: str | Path) -> pa.Table:
    """A parquet, JSON Lines or JSON (an array of objects) file as an Arrow table.

    Raises:
        DataError: the file is missing, of another kind, damaged, empty, or names a column twice.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: the file does not exist")
    try:
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as file:
                _refuse_repeated(path, file.schema_arrow.names)
                table = file.read()
        elif path.suffix in (".jsonl", ".ndjson"):
            table = pyarrow.json.read_json(path)
        elif path.suffix == ".json":
            rows = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise DataError(f"{path}: expected an array of objects")
            table = pa.Table.from_pylist(rows)
        else:
            raise DataError(f"{path}: expected a .parquet, .jsonl or .json file")
    except (pa.ArrowException, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from error
    if table.num_rows == 0:
        raise DataError(f"{path}: no rows")
    return table


def _refuse_repeated(path: Path, names: list[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise DataError(f"{path}: column {name!r} appears {count} times")


def require_columns(path: str | Path, table: pa.Table, names: Iterable[str]) -> None:
    """Raise DataError where one of ``names`` is not a column."""
    missing = [name for name in names if name not in table.column_names]
    if missing:
        raise DataError(f"{path}: column {missing[0]!r} is missing; the file has {', '.join(table.column_names)}")


def decode_json(value: Any, path: str | Path, row: int, column: str) -> Any:
    """``value``, decoded if it is JSON text.

    Raises:
        DataError: it is text and no JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, row {row}, column {column!r}: not valid JSON: {error}") from error


def write_parquet(path: str | Path, table: pa.Table) -> None:
    with atomic_write(path) as handle:
        pq.write_table(table, handle, compression="zstd", write_page_checksum=True)
