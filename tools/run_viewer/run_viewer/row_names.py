"""How a row of a step is called: by group and response, and by its segment where a rollout has several rows."""

from __future__ import annotations

from pathlib import Path

from run_files.parquet_files import read_parquet
from run_files.steps import RowKey, keys_of


def response_name(index: int, segment: int | None = 0) -> int | str:
    """2, or "2.1" for segment 1 of response 2."""
    return f"{index}.{segment}" if segment else index


def named_response(name: str) -> tuple[int, int]:
    """Index and segment of a ``response_name``."""
    index, _, segment = name.partition(".")
    return int(index), int(segment or 0)


def row_keys(path: Path) -> list[RowKey]:
    """Of all rows of a step's file, in its order.

    Raises:
        UnreadableFile: it is damaged or no file of a step.
    """
    return keys_of(read_parquet(path, ["group_id", "index"], ["segment"]), path)
