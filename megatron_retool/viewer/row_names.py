"""How a row of a step is called: by group and response, and by its segment where a rollout has several rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from megatron_retool.parquet_files import UnreadableFile, read_parquet
from megatron_retool.trajectory import RowKey

KEY_COLUMNS = ("group_id", "index", "segment")


def response_name(index: int, segment: int | None = 0) -> int | str:
    """2, or "2.1" for segment 1 of response 2."""
    return f"{index}.{segment}" if segment else index


def named_response(name: str) -> tuple[int, int]:
    """Index and segment of a ``response_name``."""
    index, _, segment = name.partition(".")
    return int(index), int(segment or 0)


def key_of(row: Mapping[str, Any]) -> RowKey:
    """Of a row with the columns group_id, index and, in files that have it, segment."""
    return int(row["group_id"]), int(row["index"]), int(row.get("segment") or 0)


def row_keys(path: Path) -> list[RowKey]:
    """Of all rows of a step's file, in its order.

    Raises:
        UnreadableFile: it is damaged or no file of a step.
    """
    table = read_parquet(path, ["group_id", "index"], ["segment"])
    for name, kind in zip(table.column_names, table.schema.types, strict=True):
        if not pa.types.is_integer(kind):
            raise UnreadableFile(f"{path}: column {name!r} holds {kind} in place of whole numbers")
    return [key_of(row) for row in table.to_pylist()]
