"""A teacher's most probable tokens at each token of stored responses, as files for fine-tuning (``scored_dataset.py``).

The output is a directory of parquet files, each of the same number of rows and complete when it has its name, and a
manifest.  The same call continues where an earlier one ended.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import batched
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_retool.data.files import DataError, data_files, read_table, require_columns
from megatron_retool.data.scored_dataset import COLUMNS, MASK, MOST_TOKENS, checked_response
from run_files.atomic_files import atomic_write
from untrusted import load_own_json

MANIFEST = "manifest.json"
ROWS = 256
"""Of one file: what an interruption costs at most."""
REWARD = "reward"
_SCHEMA = pa.schema(
    [
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        (MASK, pa.list_(pa.bool_())),
        ("top_ids", pa.list_(pa.list_(pa.int32()))),
        ("top_log_probs", pa.list_(pa.list_(pa.float32()))),
    ]
)


class Teacher(Protocol):
    """Whoever knows the teacher's distribution."""

    async def likeliest(self, ids: Sequence[int], start: int, count: int) -> list[list[tuple[int, float]]]:
        """(id, log-prob) of the ``count`` most probable tokens in the place of each of ``ids`` from ``start`` on."""


@dataclass(frozen=True)
class Scoring:
    """What is scored, and how; a directory holds the results of one.

    Attributes:
        files: parquet, JSON Lines or JSON files, folders or patterns, whose rows have prompt_ids and response_ids.
        teacher: its address.
        top_k: tokens of the teacher in each place.
        min_reward: of the responses that are kept (column reward); None: all.
    """

    files: tuple[str, ...]
    teacher: str
    top_k: int
    min_reward: float | None


@dataclass
class ScoringCounts:
    """Rows read, left out for their reward or because nothing of them is trained, and scored; ``found`` of the latter
    by an earlier call."""

    rows: int = 0
    left_out: int = 0
    scored: int = 0
    found: int = 0


async def score(
    scoring: Scoring, directory: Path, teacher: Teacher, note: Callable[[ScoringCounts], None]
) -> ScoringCounts:
    """Score every response; ``note`` is told of each file.

    Raises:
        DataError: a row is no response, or the directory holds the results of another scoring.
        TeacherFailure: the teacher fails again and again; what has been scored stays.
    """
    _claim(directory, scoring)
    counts = ScoringCounts()
    for number, rows in enumerate(batched(_responses(scoring, counts), ROWS)):
        path = directory / f"scored_{number:06d}.parquet"
        if path.exists():
            counts.found += len(rows)
        else:
            scored = await _all(rows, teacher, scoring.top_k)
            table = pa.Table.from_pylist(scored, schema=_SCHEMA)
            with atomic_write(path) as handle:
                await asyncio.to_thread(pq.write_table, table, handle, compression="zstd")
        counts.scored += len(rows)
        note(counts)
    if not counts.scored:
        raise DataError(f"{', '.join(scoring.files)}: none of the {counts.rows} rows is to be scored")
    return counts


def check(scoring: Scoring) -> None:
    """Read every row, so that a fault in any of them is found before the teacher is asked; raises ``DataError``."""
    for _ in _responses(scoring, ScoringCounts()):
        pass


def _claim(directory: Path, scoring: Scoring) -> None:
    wanted = json.loads(json.dumps(asdict(scoring)))
    path = directory / MANIFEST
    directory.mkdir(parents=True, exist_ok=True)
    if path.exists():
        try:
            there = load_own_json(path.read_bytes())
        except ValueError as error:
            raise DataError(f"{path}: {error}: choose another directory") from error
        if there != wanted:
            raise DataError(f"{directory} has the results of another scoring ({MANIFEST}): choose another directory")
    elif any(directory.iterdir()):
        raise DataError(f"{directory} is not empty: choose another directory")
    else:
        with atomic_write(path) as handle:
            handle.write(json.dumps(wanted, indent=1).encode())


def _responses(scoring: Scoring, counts: ScoringCounts) -> Iterator[dict[str, Any]]:
    """The rows that are scored, in their order, with a whole loss mask."""
    for path in [file for source in scoring.files for file in data_files(source)]:
        table = read_table(path)
        require_columns(path, table, COLUMNS[:2], ": rows of a run's rollouts have them")
        if scoring.min_reward is not None:
            require_columns(path, table, (REWARD,), ", which --min-reward reads")
        names = [name for name in (*COLUMNS[:2], MASK, REWARD) if name in table.column_names]
        for row, cells in enumerate(table.select(names).to_pylist()):
            counts.rows += 1
            prompt, response, mask = checked_response(cells, f"{path}, row {row}")
            if not any(mask) or (scoring.min_reward is not None and _below(cells, scoring.min_reward)):
                counts.left_out += 1
                continue
            yield {"prompt_ids": prompt, "response_ids": response, MASK: mask}


def _below(cells: dict[str, Any], least: float) -> bool:
    return cells[REWARD] is None or not cells[REWARD] >= least


async def _all(rows: Sequence[dict[str, Any]], teacher: Teacher, top_k: int) -> list[dict[str, Any]]:
    tasks = [asyncio.ensure_future(_scored(row, teacher, top_k)) for row in rows]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _scored(row: dict[str, Any], teacher: Teacher, top_k: int) -> dict[str, Any]:
    """The row with what the teacher says of the tokens that are trained; nothing of the others."""
    trained = [place for place, taken in enumerate(row[MASK]) if taken]
    first, end = trained[0], trained[-1] + 1
    ids = [*row["prompt_ids"], *row["response_ids"][:end]]
    result = await teacher.likeliest(ids, len(row["prompt_ids"]) + first, min(top_k, MOST_TOKENS))
    ids_of: list[list[int]] = [[] for _ in row["response_ids"]]
    log_probs_of: list[list[float]] = [[] for _ in row["response_ids"]]
    for place in trained:
        likeliest = result[place - first]
        ids_of[place] = [token for token, _ in likeliest]
        log_probs_of[place] = [min(log_prob, 0.0) for _, log_prob in likeliest]
    return {**row, "top_ids": ids_of, "top_log_probs": log_probs_of}
