"""What a step leaves in rollouts/: its trajectories, and what the learner computed of those it trained on.

``python -m megatron_retool report mismatch`` reads both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from megatron_retool.parquet_files import check_lists, read_parquet, write_row_groups
from megatron_retool.routed_experts import row_groups
from megatron_retool.runs.files import atomic_write, write_text
from megatron_retool.trajectory import (
    KEY_COLUMNS,
    TOKEN_GROUP_BYTES,
    RowKey,
    Trajectory,
    TrajectoryBatch,
    keys_of,
    write_trajectories,
)

if TYPE_CHECKING:
    from megatron_retool.cluster.deployment import Deployment
    from megatron_retool.monitor.metrics import StepTimer
    from megatron_retool.monitor.write_errors import WriteErrors


_ENDINGS = {"trajectories": "parquet", "learner": "learner.parquet", "times": "time.json"}
_STEP_FILE = re.compile(r"step_(\d+)\.parquet")


def step_path(folder: Path, step: int, part: Literal["trajectories", "learner", "times"] = "trajectories") -> Path:
    """Where a folder of rollouts or of validations has a step's trajectories, or what ``part`` names."""
    return folder / f"step_{step:06d}.{_ENDINGS[part]}"


def stored_steps(rollouts: Path) -> list[int]:
    """Numbers of the steps whose trajectories lie in ``rollouts``, ascending."""
    result = (_STEP_FILE.fullmatch(path.name) for path in rollouts.glob("step_*.parquet"))
    return sorted(int(match[1]) for match in result if match)


def store_step(run: Deployment, step: int, generated: Sequence[Trajectory], batch: TrajectoryBatch) -> None:
    """rollouts/step_N.parquet of all trajectories and step_N.learner.parquet of those in ``batch``, each where the disk
    has room for it."""
    folder = run.config.trainer.run_dir / "rollouts"
    trajectories, learner = step_path(folder, step), step_path(folder, step, "learner")
    texts = [run.decode(t) for t in generated]
    with run.write_errors.tolerated(trajectories):
        write_trajectories(generated, trajectories, texts)
    with run.write_errors.tolerated(learner):
        write_estimates(batch, learner)


def store_times(
    run_dir: Path, write_errors: WriteErrors, step: int, timer: StepTimer, rank_seconds: Mapping[str, Sequence[float]]
) -> None:
    """rollouts/step_N.time.json: when each phase of the step began and how long it took, and the ranks' own seconds.

    Args:
        rank_seconds: by role (learner, critic), of each rank in the step's updates.
    """
    path = step_path(run_dir / "rollouts", step, "times")
    result = {"phases": [[phase.value, *span] for phase, *span in timer.spans], "ranks": dict(rank_seconds)}
    with write_errors.tolerated(path):
        write_text(path, json.dumps(result))


def write_estimates(batch: TrajectoryBatch, path: str | Path) -> None:
    """Write the batch's columns to a parquet file, one row a trajectory, named by group_id, index and segment.

    To a temporary name, fsynced, renamed; in row groups of bounded size, as the trajectories' file.
    """
    import pyarrow as pa

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    ends = np.cumsum(batch.response_lengths, dtype=np.int32)
    offsets = pa.array(np.concatenate([np.zeros(1, np.int32), ends]))
    keys = (batch.group_ids, batch.indices, batch.segments)
    columns = {name: pa.array(column) for name, column in zip(KEY_COLUMNS, keys, strict=True)}
    for name, column in sorted(batch.columns.items()):
        columns[name] = pa.ListArray.from_arrays(offsets, pa.array(column))
    table = pa.table(columns)
    token_bytes = sum(column.itemsize for column in batch.columns.values())
    parts = row_groups([token_bytes * int(length) for length in batch.response_lengths], TOKEN_GROUP_BYTES)
    with atomic_write(path) as handle:
        write_row_groups(handle, table.schema, (_rows(table, part) for part in parts))


def _rows(table: Any, part: slice) -> dict[str, Any]:
    rows = table.slice(part.start, part.stop - part.start)
    return {name: rows[name] for name in rows.column_names}


def read_estimates(path: str | Path) -> dict[RowKey, dict[str, npt.NDArray[np.float32]]]:
    """What ``write_estimates`` wrote: the row's key (``Trajectory.key``) -> column -> float32 [R].

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
