"""The files of a step: its responses, what the learner computed of those that it trained on, and times."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from run_files.parquet_files import UnreadableFile, check_lists, read_parquet

if TYPE_CHECKING:
    import pyarrow as pa

RowKey = tuple[int, int, int]
"""group_id, index and segment of a row."""
KEY_COLUMNS = ("group_id", "index", "segment")
"""What a RowKey is made of in the files of a step; older ones have no segment."""

_ENDINGS = {"trajectories": "parquet", "learner": "learner.parquet", "times": "time.json"}
_STEP_FILE = re.compile(r"step_(\d+)\.parquet")


def step_path(folder: Path, step: int, part: Literal["trajectories", "learner", "times"] = "trajectories") -> Path:
    """Where a folder of rollouts or of validations has a step's trajectories, or what ``part`` names."""
    return folder / f"step_{step:06d}.{_ENDINGS[part]}"


def stored_steps(rollouts: Path) -> list[int]:
    """Numbers of the steps whose trajectories lie in ``rollouts``, ascending."""
    result = (_STEP_FILE.fullmatch(path.name) for path in rollouts.glob("step_*.parquet"))
    return sorted(int(match[1]) for match in result if match)


def keys_of(table: pa.Table, path: str | Path) -> list[RowKey]:
    """Of all rows of a step's table, in its order; without the column segment each row is segment 0.

    Args:
        path: of the file that it was read from.

    Raises:
        UnreadableFile: a column is missing, is not of whole numbers, or lacks one; two rows are of the same response.
    """
    import pyarrow as pa

    columns = []
    for name in KEY_COLUMNS:
        if name not in table.column_names:
            if name != "segment":
                raise UnreadableFile(f"{path}: column {name!r} is missing: name a file of a step here")
            columns.append([0] * len(table))
            continue
        column = table[name]
        if not pa.types.is_integer(column.type):
            raise UnreadableFile(f"{path}: column {name!r} holds {column.type} in place of whole numbers")
        if column.null_count:
            raise UnreadableFile(f"{path}, row {column.is_null().index(True).as_py()}: column {name!r} has no number")
        columns.append(column.to_pylist())
    keys = list(zip(*columns, strict=True))
    if len(set(keys)) < len(keys):
        rows = dict[RowKey, int]()
        for row, key in enumerate(keys):
            if rows.setdefault(key, row) != row:
                raise UnreadableFile(f"{path}, row {row}: response {key[0]}/{key[1]} stands in row {rows[key]} too")
    return keys


def read_estimates(path: str | Path) -> dict[RowKey, dict[str, npt.NDArray[np.float32]]]:
    """The columns of step_N.learner.parquet: the row's key -> column -> float32 [R].

    Files without the column segment are of rollouts of one row.

    Raises:
        UnreadableFile: the file is missing or damaged.
    """
    table = read_parquet(path)
    names = [name for name in table.column_names if name not in KEY_COLUMNS]
    check_lists(path, table, names)
    columns = {name: table[name].combine_chunks() for name in names}
    return {
        key: {name: column[row].values.to_numpy(zero_copy_only=False) for name, column in columns.items()}
        for row, key in enumerate(keys_of(table, path))
    }


def question_of(messages: Sequence[Mapping[str, Any]], prompt: str) -> str:
    """The last user message; the whole ``prompt`` as it was templated where that is no text."""
    for message in reversed(messages):
        if message.get("role") == "user" and isinstance(message.get("content"), str):
            return str(message["content"])
    return prompt
