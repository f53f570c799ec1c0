"""What a step leaves in rollouts/: its trajectories, and what the learner computed of those it trained on.

``python -m megatron_retool report mismatch`` reads both.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatron_retool.parquet_files import read_parquet
from megatron_retool.runs.files import atomic_write
from megatron_retool.trajectory import TrajectoryBatch, write_trajectories

if TYPE_CHECKING:
    from megatron_retool.cluster.deployment import Deployment
    from megatron_retool.loop.experience import Collected


_STEP_FILE = re.compile(r"step_(\d+)\.parquet")


def stored_steps(rollouts: Path) -> list[int]:
    """Numbers of the steps whose trajectories lie in ``rollouts``, ascending."""
    found = (_STEP_FILE.fullmatch(path.name) for path in rollouts.glob("step_*.parquet"))
    return sorted(int(match[1]) for match in found if match)


def store_step(run: Deployment, step: int, collected: Collected, batch: TrajectoryBatch) -> None:
    """rollouts/step_N.parquet and step_N.learner.parquet, each where the disk has room for it."""
    stored = run.config.run_dir / "rollouts" / f"step_{step:06d}"
    texts = [run.decode(t) for t in collected.generated]
    with run.write_errors.tolerated(stored.with_suffix(".parquet")):
        write_trajectories(collected.generated, stored.with_suffix(".parquet"), texts)
    with run.write_errors.tolerated(stored.with_suffix(".learner.parquet")):
        write_estimates(batch, stored.with_suffix(".learner.parquet"))


def write_estimates(batch: TrajectoryBatch, path: str | Path) -> None:
    """Write the batch's columns to a parquet file, one row a trajectory, named by group_id and index.

    To a temporary name, fsynced, renamed.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    ends = np.cumsum(batch.response_lengths, dtype=np.int32)
    offsets = pa.array(np.concatenate([np.zeros(1, np.int32), ends]))
    table = {"group_id": pa.array(batch.group_ids), "index": pa.array(batch.indices)}
    for name, column in sorted(batch.columns.items()):
        table[name] = pa.ListArray.from_arrays(offsets, pa.array(column))
    with atomic_write(path) as handle:
        pq.write_table(pa.table(table), handle, compression="zstd", write_page_checksum=True)


def read_estimates(path: str | Path) -> dict[tuple[int, int], dict[str, npt.NDArray[np.float32]]]:
    """What ``write_estimates`` wrote: (group_id, index) -> column -> float32 [R].

    Raises:
        UnreadableFile: the file is missing or damaged.
    """
    table = read_parquet(path)
    names = [name for name in table.column_names if name not in ("group_id", "index")]
    keys = zip(table["group_id"].to_pylist(), table["index"].to_pylist(), strict=True)
    columns = {name: table[name].combine_chunks() for name in names}
    return {
        key: {name: columns[name][row].values.to_numpy(zero_copy_only=False) for name in names}
        for row, key in enumerate(keys)
    }
