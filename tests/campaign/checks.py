"""What must hold of a run's files, whatever was done to its processes. No process is looked at here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conversion.files.dist_checkpoint import DistCheckpoint
from conversion.model.weight_map import CheckpointPlace
from megatron_retool.runs.checkpoints import complete_checkpoints
from megatron_retool.trajectory import read_trajectories
from run_files.steps import read_estimates

TRAINING_VALUES = ("actor/", "critic/", "rollout_corr/")
ABSOLUTE, RELATIVE = 1e-5, 1e-4


@dataclass(frozen=True)
class Expected:
    """What a run was told to do.

    Attributes:
        groups: prompt groups of a step.
        responses: trajectories of a group.
        validated: steps with a validation.
    """

    steps: int
    groups: int
    responses: int
    validated: frozenset[int]


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; one that is being written is left out."""
    rows = []
    path = run_dir / "metrics.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def violations(
    run_dir: Path, expected: Expected, uninterrupted: Mapping[int, Mapping[str, Any]] | None = None
) -> list[str]:
    """What is wrong with a run that has reached its end; nothing, where all is well.

    Args:
        uninterrupted: rows of a run on the same rollouts that nobody struck, by step: all training values are equal.
    """
    return [
        *_metrics(run_dir, expected),
        *_rollouts(run_dir, expected),
        *_validations(run_dir, expected),
        *_checkpoints(run_dir, expected),
        *_leftovers(run_dir),
        *(differences(rows_of(run_dir), uninterrupted) if uninterrupted is not None else ()),
    ]


def differences(rows: list[dict[str, Any]], uninterrupted: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """Training values of ``rows`` that are not those of the uninterrupted run."""
    for row in rows:
        other = uninterrupted.get(row["step"], {})
        for name in sorted(set(row) | set(other)):
            if row["step"] == 0 or not name.startswith(TRAINING_VALUES):
                continue
            mine, theirs = row.get(name), other.get(name)
            if mine == theirs:
                continue
            same = isinstance(mine, (int, float)) and isinstance(theirs, (int, float))
            if not same or not math.isclose(mine, theirs, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
                yield f"step {row['step']}: {name} is {mine}, without interruption {theirs}"


def _metrics(run_dir: Path, expected: Expected) -> Iterator[str]:
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        yield "metrics.jsonl is missing"
        return
    steps = []
    text = path.read_text(encoding="utf-8")
    if not text.endswith("\n"):
        yield "metrics.jsonl ends within a row"
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            steps.append(json.loads(line)["step"])
        except (ValueError, KeyError):
            yield f"metrics.jsonl, line {number} is no row: {line[:80]}"
    wanted = [*([0] if 0 in expected.validated else []), *range(1, expected.steps + 1)]
    if steps != wanted:
        yield f"metrics.jsonl has the steps {steps}, and not {wanted}"


def _rollouts(run_dir: Path, expected: Expected) -> Iterator[str]:
    folder = run_dir / "rollouts"
    groups: list[int] = []
    for step in range(1, expected.steps + 1):
        path = folder / f"step_{step:06d}.parquet"
        try:
            trajectories = read_trajectories(path)
            estimates = read_estimates(path.with_suffix(".learner.parquet"))
        except (OSError, ValueError, KeyError) as error:
            yield f"{path.name}: {error}"
            continue
        keys = [t.key for t in trajectories]
        if len(set(keys)) != len(keys):
            yield f"{path.name}: trajectories are doubled"
        if len(keys) != expected.groups * expected.responses:
            yield f"{path.name}: {len(keys)} trajectories, and not {expected.groups * expected.responses}"
        if missing := set(estimates) - set(keys):
            yield f"{path.name}: the learner's file has {len(missing)} trajectories that are not there"
        groups += sorted({group for group, *_ in keys})
        for trajectory in trajectories:
            for name, column in estimates.get(trajectory.key, {}).items():
                if len(column) != len(trajectory.response_ids):
                    yield f"{path.name}: {name} of {trajectory.group_id}/{trajectory.index} has another length"
    if sorted(groups) != list(range(expected.steps * expected.groups)):
        yield f"rollouts hold the prompt groups {groups}: some are lost or doubled"


def _validations(run_dir: Path, expected: Expected) -> Iterator[str]:
    for step in sorted(expected.validated):
        path = run_dir / "validation" / f"step_{step:06d}.parquet"
        try:
            trajectories = read_trajectories(path)
        except (OSError, ValueError, KeyError) as error:
            yield f"validation/{path.name}: {error}"
            continue
        if len({t.key for t in trajectories}) != len(trajectories) or not trajectories:
            yield f"validation/{path.name}: trajectories are doubled, or there are none"


def _checkpoints(run_dir: Path, expected: Expected) -> Iterator[str]:
    complete = complete_checkpoints(run_dir)
    if not complete or complete[-1].step != expected.steps:
        yield f"the last complete checkpoint is {complete[-1].path.name if complete else 'none'}"
    for checkpoint in complete:
        try:
            if checkpoint.read("trainer_state.json")["step"] != checkpoint.step:
                yield f"{checkpoint.path.name} holds the state of another step"
            stored = DistCheckpoint(checkpoint.learner)
            for key, tensor in stored.tensors.items():
                stored.read(CheckpointPlace(key, (), ()), tuple(tensor.size))
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            yield f"{checkpoint.path.name} cannot be loaded: {error}"
    known = {checkpoint.path for checkpoint in complete}
    for path in (run_dir / "checkpoints").glob("*"):
        if path not in known:
            yield f"checkpoints/{path.name} is not complete, and is still there"


def _leftovers(run_dir: Path) -> Iterator[str]:
    for path in run_dir.rglob(".*"):
        if path.name.endswith((".partial", ".replaced", ".incomplete")):
            yield f"{path.relative_to(run_dir)} is left over"
