"""What a step leaves in rollouts/: its trajectories, and what the learner computed of those it trained on.

``python -m megatron_retool report mismatch`` reads both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_retool.routed_experts import row_groups
from megatron_retool.trajectory import TOKEN_GROUP_BYTES, Trajectory, TrajectoryBatch, write_trajectories
from run_files.atomic_files import atomic_write, write_text
from run_files.parquet_files import write_row_groups
from run_files.steps import KEY_COLUMNS, step_path

if TYPE_CHECKING:
    from megatron_retool.cluster.deployment import Deployment
    from megatron_retool.runs.step_timer import StepTimer
    from megatron_retool.runs.write_errors import WriteErrors


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
