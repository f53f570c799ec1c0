"""Trajectory: the only thing that crosses rooms, and TrajectoryBatch, its ragged column form.

A trajectory is token ids, never text: ``prompt_ids`` are tokenised once, and ``response_ids`` are the ids that the
engine sampled with the ids of tool results and template glue between them.  What the engine sampled is what the
learner trains on.

``TrajectoryBatch`` lays many trajectories end to end: a response column is one array of length T (all responses
concatenated) with ``sequence_ids`` saying whose each token is.  No padding exists anywhere in the project, and every
function in ``algorithms/`` speaks this layout.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_retool.routed_experts import (
    ExpertArray,
    RoutedExperts,
    check_rows,
    from_stored,
    row_groups,
    split_stored,
    stored_type,
    to_stored,
)
from run_files.atomic_files import atomic_write
from run_files.parquet_files import damage_named, read_parquet, write_row_groups
from run_files.steps import RowKey
from untrusted import load_own_json, without_surrogates

IntArray = npt.NDArray[np.int32]


class FinishReason(StrEnum):
    """Why a trajectory ended. Every trajectory has exactly one."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_LIMIT = "tool_limit"
    ABORTED = "aborted"


@dataclass
class ToolCall:
    """One tool call as it happened: ``status`` is ok, error, timeout, parse_error, unknown_tool or bad_arguments."""

    name: str
    arguments: str
    status: str
    seconds: float
    output_truncated: bool = False
    output_tokens: int = 0
    position: int = -1
    """Response tokens before its text; -1: not recorded."""
    started: float | None = None
    """When it began to run, in seconds since 1970; None: not recorded, or it never ran."""


@dataclass(frozen=True)
class RolloutTiming:
    """Where the time of a trajectory went: seconds, over all steps that worked on it; a fork has its parent's too.

    Attributes:
        generation: from sending requests to engines to their answers, the engines' own queues included.
        tools: opening tools, and from a turn's calls to the last of their results.
        waiting: for a place at an engine, and for what engines that failed have cost.
        started, ended: when the first of these seconds began and the last of them ended, since 1970 by the driver's
            clock. None: not recorded.
        engine: the one that answered last, by its number. None: not recorded.
    """

    generation: float = 0.0
    tools: float = 0.0
    waiting: float = 0.0
    started: float | None = None
    ended: float | None = None
    engine: int | None = None

    @property
    def total(self) -> float:
        """Seconds of generation, tools and waiting together."""
        return self.generation + self.tools + self.waiting

    def plus(
        self, *, generation: float = 0.0, tools: float = 0.0, waiting: float = 0.0, engine: int | None = None
    ) -> RolloutTiming:
        """With so many seconds more, which end now."""
        ended = time.time()
        began = ended - generation - tools - waiting
        return RolloutTiming(
            self.generation + generation,
            self.tools + tools,
            self.waiting + waiting,
            began if self.started is None else self.started,
            ended,
            self.engine if engine is None else engine,
        )

    def with_times_of(self, other: RolloutTiming) -> RolloutTiming:
        """Both, of which ``other`` began later."""
        return RolloutTiming(
            self.generation + other.generation,
            self.tools + other.tools,
            self.waiting + other.waiting,
            min((each for each in (self.started, other.started) if each is not None), default=None),
            max((each for each in (self.ended, other.ended) if each is not None), default=None),
            self.engine if other.engine is None else other.engine,
        )


RESPONSE_COLUMNS: dict[str, Any] = {
    "response_ids": np.int32,
    "loss_mask": np.bool_,
    "rollout_log_probs": np.float32,
    "turn_ids": np.int16,
    "weight_versions": np.int32,
}
"""What a row has of each response token, with its dtype."""
TOKEN_COLUMNS: dict[str, Any] = {"prompt_ids": np.int32, **RESPONSE_COLUMNS}


@dataclass
class Trajectory:
    """One prompt and one response (several turns), token for token.

    A rollout is all rows of one (group_id, index). It has one row, or several ``segments`` where what it has read was
    rewritten on the way: a segment's prompt is what the engine really read, and only what was sampled after it is in
    the loss. Rows of a rollout share reward, reward_info and extra_info, number its turns together (``turn_ids``), and
    lie together in order of segment.

    All response arrays have length R; see docs/architecture.md for the table. ``rollout_log_probs`` hold
    log pi_rollout of the sampled token under the distribution that was sampled, 0 where ``loss_mask`` is false.
    Sampled tokens that were taken out of the loss (rollout.partial.mask_older_tokens) keep turn and weight version.
    """

    prompt_ids: IntArray
    response_ids: IntArray
    loss_mask: npt.NDArray[np.bool_]
    rollout_log_probs: npt.NDArray[np.float32]
    turn_ids: npt.NDArray[np.int16]
    weight_versions: IntArray
    group_id: int
    index: int
    finish_reason: FinishReason
    reward: float = float("nan")
    reward_info: dict[str, Any] = field(default_factory=dict)
    tool_calls: list[ToolCall] = field(default_factory=list)
    extra_info: dict[str, Any] = field(default_factory=dict)
    """What the prompt's row carried: data_source, ground_truth, index, ..."""
    routed_experts: ExpertArray | None = None
    """[P + R, layers, k]: what the engine chose for each token, prompt first; see megatron_retool/routed_experts.py."""
    timing: RolloutTiming | None = None
    """Of the whole rollout, in its first row; None: not recorded."""
    segment: int = 0
    """Place in the rollout."""

    def __post_init__(self) -> None:
        for name, dtype in TOKEN_COLUMNS.items():
            setattr(self, name, np.asarray(getattr(self, name), dtype=dtype))
        self.check()

    def check(self) -> None:
        """Raise ValueError where the columns do not line up."""
        length = len(self.response_ids)
        label = f"trajectory {self.group_id}/{self.index}" + (f", segment {self.segment}" if self.segment else "")
        for name in RESPONSE_COLUMNS:
            if len(getattr(self, name)) != length:
                raise ValueError(f"{label}: {name} has {len(getattr(self, name))} entries for {length} response tokens")
        if len(self.prompt_ids) == 0:
            raise ValueError(f"{label} has an empty prompt")
        outside = ~self.loss_mask
        unsampled = outside & (self.weight_versions < 0)
        if np.any(self.rollout_log_probs[outside]) or np.any(self.turn_ids[unsampled] != -1):
            raise ValueError(f"{label}: tool tokens must have log-prob 0 and turn -1")
        if self.routed_experts is not None:
            check_rows(self.routed_experts, len(self.prompt_ids) + length, label)

    @property
    def key(self) -> RowKey:
        """What no other row of a step has."""
        return self.group_id, self.index, self.segment

    @property
    def num_turns(self) -> int:
        """Messages after the prompt: assistant turns plus tool results, as verl counts them."""
        assistant = int(self.turn_ids.max()) + 1 if len(self.turn_ids) else 0
        return assistant + len(self.tool_calls)

    @property
    def accuracy(self) -> float:
        """Of a scored trajectory: see ``accuracy_of``."""
        return accuracy_of(self.reward, self.reward_info)


def accuracy_of(reward: float, reward_info: Mapping[str, Any]) -> float:
    """The reward function's acc in [0, 1]; without one, whether the reward is positive."""
    return float(reward_info.get("acc", reward > 0))


@dataclass
class TrajectoryBatch:
    """N trajectories as ragged columns.

    Shapes: prompt_ids int32 [sum P], prompt_lengths int32 [N], response_ids int32 [T] with T = sum R,
    response_lengths int32 [N], the other response columns [T], group_ids, indices and segments int32 [N], rewards
    float32 [N]. Without ``segments`` each row is segment 0.
    ``routed_experts`` runs along prompt and response.
    ``columns`` holds what later rooms add along the response ([T]): old_log_probs, ref_log_probs, entropy,
    advantages, returns, values, importance_weights, loss_weights, routing_flips.
    """

    prompt_ids: IntArray
    prompt_lengths: IntArray
    response_ids: IntArray
    response_lengths: IntArray
    loss_mask: npt.NDArray[np.bool_]
    rollout_log_probs: npt.NDArray[np.float32]
    turn_ids: npt.NDArray[np.int16]
    weight_versions: IntArray
    group_ids: IntArray
    indices: IntArray
    rewards: npt.NDArray[np.float32]
    routed_experts: RoutedExperts | None = None
    columns: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    segments: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))

    def __post_init__(self) -> None:
        if not len(self.segments):
            self.segments = np.zeros(len(self), np.int32)

    def __len__(self) -> int:
        return len(self.response_lengths)

    @property
    def num_response_tokens(self) -> int:
        """T, response tokens of all rows."""
        return len(self.response_ids)

    @property
    def total_lengths(self) -> IntArray:
        """int32 [N]: prompt plus response."""
        return (self.prompt_lengths + self.response_lengths).astype(np.int32)

    @property
    def sequence_ids(self) -> npt.NDArray[np.int64]:
        """int64 [T]: the row each response token belongs to."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.response_lengths)

    @functools.cached_property
    def rollout_ids(self) -> npt.NDArray[np.int64]:
        """int64 [N]: the rollout of each row, 0 … M - 1 in order; rows that follow one another may share one.

        Raises:
            ValueError: rows of a rollout do not lie together, or not in order of segment.
        """
        begins = np.ones(len(self), np.bool_)
        same = (self.group_ids[1:] == self.group_ids[:-1]) & (self.indices[1:] == self.indices[:-1])
        begins[1:] = ~(same & (self.segments[1:] > self.segments[:-1]))
        first = np.flatnonzero(begins)
        keys = list(zip(self.group_ids[first].tolist(), self.indices[first].tolist(), strict=True))
        if self.segments.any() and len(set(keys)) < len(keys):
            raise ValueError("rows of a rollout must lie together, in order of segment")
        return np.cumsum(begins, dtype=np.int64) - 1

    @property
    def num_rollouts(self) -> int:
        """M."""
        return int(self.rollout_ids[-1]) + 1 if len(self) else 0

    @property
    def first_rows(self) -> npt.NDArray[np.int64]:
        """int64 [M]: the first row of each rollout."""
        return np.searchsorted(self.rollout_ids, np.arange(self.num_rollouts)).astype(np.int64)

    @property
    def token_rollout_ids(self) -> npt.NDArray[np.int64]:
        """int64 [T]: the rollout that each response token belongs to."""
        return np.repeat(self.rollout_ids, self.response_lengths)

    @property
    def rollout_response_lengths(self) -> IntArray:
        """int32 [M]: response tokens of each rollout, in all its rows."""
        totals = np.bincount(self.rollout_ids, self.response_lengths, minlength=self.num_rollouts)
        return totals.astype(np.int32)

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory]) -> TrajectoryBatch:
        """The rows end to end, in their order; without columns."""

        def cat(name: str, dtype: Any) -> Any:
            parts = [getattr(t, name) for t in trajectories]
            return np.concatenate(parts) if parts else np.zeros(0, dtype)

        return cls(
            **{name: cat(name, dtype) for name, dtype in TOKEN_COLUMNS.items()},
            prompt_lengths=np.array([len(t.prompt_ids) for t in trajectories], np.int32),
            response_lengths=np.array([len(t.response_ids) for t in trajectories], np.int32),
            group_ids=np.array([t.group_id for t in trajectories], np.int32),
            indices=np.array([t.index for t in trajectories], np.int32),
            rewards=np.array([t.reward for t in trajectories], np.float32),
            segments=np.array([t.segment for t in trajectories], np.int32),
            routed_experts=RoutedExperts.of_sequences(
                [t.routed_experts for t in trajectories],
                np.array([len(t.prompt_ids) + len(t.response_ids) for t in trajectories], np.int64),
            ),
        )

    def of_responses(self, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The part [T, ...] of a column along prompts and responses [sum (P + R), ...], prompt first in each row."""
        lengths = np.stack([self.prompt_lengths, self.response_lengths], 1).ravel()
        result: npt.NDArray[Any] = column[np.repeat(np.tile([False, True], len(self)), lengths)]
        return result

    def select(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> TrajectoryBatch:
        """The batch of ``rows``, in that order, with every column."""
        rows = np.asarray(rows, dtype=np.int64)
        prompt_take = _ranges(self.prompt_lengths, rows)
        take = _ranges(self.response_lengths, rows)
        return TrajectoryBatch(
            prompt_ids=self.prompt_ids[prompt_take],
            prompt_lengths=self.prompt_lengths[rows],
            **{name: getattr(self, name)[take] for name in RESPONSE_COLUMNS},
            response_lengths=self.response_lengths[rows],
            group_ids=self.group_ids[rows],
            indices=self.indices[rows],
            rewards=self.rewards[rows],
            segments=self.segments[rows],
            routed_experts=None if self.routed_experts is None else self.routed_experts.select(rows),
            columns={name: column[take] for name, column in self.columns.items()},
        )

    def with_columns(self, **columns: Any) -> TrajectoryBatch:
        """A batch that shares this one's arrays and also has copies of ``columns`` (each [T], stored as float32)."""
        added = {}
        for name, column in columns.items():
            array = np.array(column, dtype=np.float32)  # a copy: arrays that came through Ray are read-only
            if array.shape != (self.num_response_tokens,):
                raise ValueError(f"column {name} has shape {array.shape}, expected ({self.num_response_tokens},)")
            added[name] = array
        return TrajectoryBatch(
            **{name: getattr(self, name) for name in self.__dataclass_fields__ if name != "columns"},
            columns={**self.columns, **added},
        )


def _ranges(lengths: npt.NDArray[Any], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Positions, in an end-to-end layout of ``lengths``, of the elements of ``rows`` in order."""
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[:-1][rows]
    counts = lengths[rows].astype(np.int64)
    shifts: npt.NDArray[np.int64] = np.repeat(starts - np.concatenate([[0], np.cumsum(counts)])[:-1], counts)
    positions: npt.NDArray[np.int64] = np.arange(counts.sum(), dtype=np.int64) + shifts
    return positions


TOKEN_GROUP_BYTES = 8 << 20
"""Of columns with a value for each token, routed experts among them, in a row group: who wants one response reads so
much, and writing a file holds so much beside the trajectories."""


def write_trajectories(
    trajectories: Sequence[Trajectory], path: str | Path, texts: Sequence[tuple[str, str]] | None = None
) -> None:
    """Write one parquet file (to a temporary name, fsynced, renamed). ``texts`` adds decoded prompt and response.

    Row groups are bounded, so that whoever wants one response reads little else.
    """
    import pyarrow as pa

    schema = [(name, kind()) for name, kind in (_PARQUET_COLUMNS | _OPTIONAL_COLUMNS).items()]
    if texts is not None:
        schema += [("prompt", pa.string()), ("response", pa.string())]
    sizes = [_bytes_of(t) for t in trajectories]
    pieces = (
        _stored_rows(trajectories[part], None if texts is None else texts[part])
        for part in row_groups(sizes, TOKEN_GROUP_BYTES)
    )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as handle:
        write_row_groups(handle, pa.schema(schema), pieces)


def _bytes_of(trajectory: Trajectory) -> int:
    """Of its columns with a value for each token."""
    experts = 0 if trajectory.routed_experts is None else trajectory.routed_experts.nbytes
    return experts + sum(int(getattr(trajectory, name).nbytes) for name in TOKEN_COLUMNS)


def _stored_rows(trajectories: Sequence[Trajectory], texts: Sequence[tuple[str, str]] | None) -> dict[str, list[Any]]:
    rows: dict[str, list[Any]] = {name: [] for name in (_PARQUET_COLUMNS | _OPTIONAL_COLUMNS)}
    for t in trajectories:
        for name in TOKEN_COLUMNS:
            rows[name].append(getattr(t, name))
        rows["group_id"].append(t.group_id)
        rows["index"].append(t.index)
        rows["finish_reason"].append(t.finish_reason.value)
        rows["reward"].append(t.reward)
        for name in ("reward_info", "extra_info"):
            rows[name].append(json.dumps(getattr(t, name), default=str))
        rows["tool_calls"].append(json.dumps([vars(call) for call in t.tool_calls]))
        rows["routed_experts"].append(to_stored([] if t.routed_experts is None else [t.routed_experts]))
        rows["segment"].append(t.segment)
        rows["timing"].append(None if t.timing is None else json.dumps(vars(t.timing)))
    if texts is not None:
        rows["prompt"], rows["response"] = ([without_surrogates(t[place]) for t in texts] for place in (0, 1))
    return rows


def read_trajectories(path: str | Path, *, routed_experts: bool = True) -> list[Trajectory]:
    """Read what ``write_trajectories`` wrote.

    Args:
        routed_experts: False leaves that column, which is most of the file where there is one, unread.

    Raises:
        UnreadableFile: the file is missing or damaged, or holds something else; naming it and the row.
    """
    optional = [name for name in _OPTIONAL_COLUMNS if routed_experts or name != "routed_experts"]
    table = read_parquet(path, list(_PARQUET_COLUMNS), optional)
    with damage_named(path):
        table, experts = split_stored(table)
    trajectories = []
    for number, (row, stored) in enumerate(zip(table.to_pylist(), experts, strict=True)):
        with damage_named(f"{path}, row {number}"):
            row["finish_reason"] = FinishReason(row["finish_reason"])
            row["reward_info"], row["extra_info"] = load_own_json(row["reward_info"]), load_own_json(row["extra_info"])
            row["tool_calls"] = [ToolCall(**call) for call in load_own_json(row["tool_calls"])]
            row["routed_experts"] = from_stored(stored)
            timing = row.pop("timing", None)
            row["timing"] = None if timing is None else RolloutTiming(**load_own_json(timing))
            trajectories.append(Trajectory(**row))
    return trajectories


def _arrow(name: str) -> Any:
    def build() -> Any:
        import pyarrow as pa

        return pa.list_(pa.from_numpy_dtype(TOKEN_COLUMNS[name])) if name in TOKEN_COLUMNS else getattr(pa, name)()

    return build


_PARQUET_COLUMNS = {
    **{name: _arrow(name) for name in TOKEN_COLUMNS},
    "group_id": _arrow("int64"),
    "index": _arrow("int64"),
    "finish_reason": _arrow("string"),
    "reward": _arrow("float64"),
    "reward_info": _arrow("string"),
    "tool_calls": _arrow("string"),
    "extra_info": _arrow("string"),
}
_OPTIONAL_COLUMNS = {"routed_experts": stored_type, "timing": _arrow("string"), "segment": _arrow("int64")}
"""Of files that were written since there are such columns."""
