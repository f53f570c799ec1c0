"""Paused groups on disk: what a checkpoint keeps of trajectories that partial rollout left unfinished.

One parquet file, one row a trajectory; what concerns a whole group lies in the schema's metadata. Prompts are not
stored, but those of environments: the data position gives each group id its prompt again. Routed experts are, the
prompt's rows too: an engine that continues the trajectory sends only what comes after them. Nothing of the tools is
stored either: a run that reads them opens sessions again, which learn which calls were made before, and makes calls
whose results are missing again. A task agent keeps its state to itself: its rollouts in a group that is not complete
start again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from megatron_retool.routed_experts import (
    ROW_GROUP_BYTES,
    from_stored,
    row_groups,
    split_stored,
    stored_type,
    to_stored,
)
from megatron_retool.trajectory import FinishReason, RolloutTiming, ToolCall
from run_files.atomic_files import atomic_write
from run_files.parquet_files import damage_named, read_parquet, write_row_groups
from sglang_rollout.agent.trajectory_state import TrajectoryState
from sglang_rollout.agent.written_calls import ParsedCall
from untrusted import load_own_json

_TOKEN_COLUMNS = {
    "response_ids": pa.int32(),
    "loss_mask": pa.bool_(),
    # As wide as the numbers in memory, so that what is read equals what was written.
    "log_probs": pa.float64(),
    "turn_ids": pa.int16(),
    "weight_versions": pa.int32(),
}
_SCHEMA = pa.schema(
    [
        ("group_id", pa.int64()),
        ("index", pa.int64()),
        *((name, pa.list_(kind)) for name, kind in _TOKEN_COLUMNS.items()),
        ("progress", pa.string()),
        ("routed_experts", stored_type()),
    ]
)
_OPTIONAL = ("routed_experts",)
"""Columns of files that were written since there are such."""


@dataclass(frozen=True)
class PausedGroup:
    """The trajectories of one prompt, some of them unfinished.

    Attributes:
        size: trajectories that the group will have; with branching ``states`` may be fewer.
        age: training steps for which it was paused.
        branching: state of its EntropyBranching, where it has one.
    """

    group_id: int
    size: int
    age: int
    states: list[TrajectoryState]
    branching: dict[str, Any] | None = None


def write_paused_groups(groups: Sequence[PausedGroup], path: str | Path) -> None:
    """Write one file (to a temporary name, fsynced, renamed). Prompts and their extra_info are left out."""
    about = [{"group_id": g.group_id, "size": g.size, "age": g.age, "branching": g.branching} for g in groups]
    states = [(group.group_id, state) for group in groups for state in group.states]
    sizes = [sum(chunk.nbytes for chunk in state.routed_experts) for _, state in states]
    parts = row_groups(sizes, ROW_GROUP_BYTES)
    with atomic_write(path) as handle:
        schema = _SCHEMA.with_metadata({"groups": json.dumps(about)})
        write_row_groups(handle, schema, (_stored_rows(states[part]) for part in parts))


def _stored_rows(states: Sequence[tuple[int, TrajectoryState]]) -> dict[str, list[Any]]:
    rows: dict[str, list[Any]] = {name: [] for name in _SCHEMA.names}
    for group_id, known in states:
        state = known.unstarted() if known.rows else known
        rows["group_id"].append(group_id)
        rows["index"].append(state.index)
        for name in _TOKEN_COLUMNS:
            rows[name].append(getattr(state, name))
        progress = {
            "seed": state.seed,
            "turn": state.turn,
            "turn_start": state.turn_start,
            "seconds": state.seconds,
            "timing": vars(state.timing),
            "finish_reason": state.finish_reason,
            "tool_calls": [vars(call) for call in state.tool_calls],
            "pending_calls": [vars(call) for call in state.pending_calls],
            "reward_info": state.reward_info,
            "own_prompt_ids": state.prompt_ids if state.own_prompt else None,
        }
        rows["progress"].append(json.dumps(progress))
        rows["routed_experts"].append(to_stored(state.routed_experts))
    return rows


def read_paused_groups(path: str | Path) -> list[PausedGroup]:
    """Read what ``write_paused_groups`` wrote; the states' ``prompt_ids`` are empty where they are the data's.

    Raises:
        UnreadableFile: the file is missing or damaged, or holds something else; naming it and the row.
    """
    table = read_parquet(path, [name for name in _SCHEMA.names if name not in _OPTIONAL], _OPTIONAL)
    with damage_named(path):
        table, experts = split_stored(table)
        about_groups = load_own_json((table.schema.metadata or {})[b"groups"])
        groups = {about["group_id"]: PausedGroup(states=[], **about) for about in about_groups}
    for number, (row, stored) in enumerate(zip(table.to_pylist(), experts, strict=True)):
        with damage_named(f"{path}, row {number}"):
            progress = load_own_json(row.pop("progress"))
            reason = progress.pop("finish_reason")
            group = groups[row["group_id"]]
            rows = from_stored(stored)
            own_prompt = progress.pop("own_prompt_ids", None)
            state = TrajectoryState(
                prompt_ids=own_prompt or [],
                own_prompt=own_prompt is not None,
                age=group.age,
                finish_reason=None if reason is None else FinishReason(reason),
                timing=RolloutTiming(**progress.pop("timing", {})),
                tool_calls=[ToolCall(**call) for call in progress.pop("tool_calls")],
                pending_calls=[ParsedCall(**call) for call in progress.pop("pending_calls")],
                routed_experts=[] if rows is None else [rows],
                **progress,
                **row,
            )
            state.check_contract(state.finish_reason is not None)
        group.states.append(state)
    return list(groups.values())
