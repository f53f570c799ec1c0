"""A run's place on disk and how it is taken up again.

A checkpoint is a directory checkpoints/global_step_N with learner/ (Megatron's distributed checkpoint), critic/ where
PPO has one, prompt_source.json (data position), trainer_state.json (step, KL coefficient, histories of prompts),
paused_groups.parquet where partial rollout left groups unfinished, buffered_groups.parquet of an asynchronous run, and
COMPLETE, which is written last and holds the checksums of the others. It is built under a temporary name and renamed,
so a directory without COMPLETE is never taken for one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conversion.files.checksums import (
    CHECKPOINT_NAME,
    COMPLETE_NAME,
    WEIGHTS_NAME,
    find_faults,
    has_checksums,
    raise_damaged,
    write_marker,
)
from conversion.files.directory import publish
from megatron_retool.config import ConfigError, TrainerConfig
from megatron_retool.errors import OperationError
from megatron_retool.runs.metrics_file import read_metrics
from megatron_retool.runs.rollouts import set_rollouts_aside
from megatron_retool.runs.weights_checkpoints import (
    WORKSPACES,
    weights_checkpoint,
    weights_checkpoints,
    weights_workspace_path,
)
from run_files.atomic_files import write_text
from untrusted import load_own_json

PAUSED_GROUPS = "paused_groups.parquet"
BUFFERED_GROUPS = "buffered_groups.parquet"

_STEP_FILE = re.compile(r"step_(\d+)\..+")


class SaveError(OperationError):
    """A checkpoint could not be written. Nothing is left of it, and older ones are intact."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int

    @property
    def learner(self) -> Path:
        """The learner's distributed checkpoint."""
        return self.path / "learner"

    @property
    def paused_groups(self) -> Path:
        """Groups that partial rollout left unfinished."""
        return self.path / PAUSED_GROUPS

    @property
    def buffered_groups(self) -> Path:
        """Complete groups that an asynchronous run has not trained yet."""
        return self.path / BUFFERED_GROUPS

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of the checkpoint.

        Raises:
            ConfigError: it is missing or damaged.
        """
        path = self.path / name
        cure = "go back to an older one with trainer.resume_mode=resume_path and trainer.resume_from_path"
        try:
            data = load_own_json(path.read_bytes())
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"{path}: cannot be read: {reason}. The checkpoint is damaged: {cure}") from error
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: expected a mapping, found {data!r:.60}. The checkpoint is damaged: {cure}")
        return data

    def check_quickly(self) -> None:
        """Hold its own files against their checksums, and those of its models against their sizes.

        Raises:
            DamagedError: some are not what they were; the message offers the checkpoint before it.
        """
        faults = [*find_faults(self.path, nested=False), *find_faults(self.path, contents=False)]
        raise_damaged(self.path, faults)

    @property
    def note(self) -> str:
        """What to say of it beside its name where it is resumed from: that nothing can be checked."""
        return "" if has_checksums(self.path) else "; it has no checksums, and is taken as it is"


def complete_checkpoints(run_dir: Path) -> list[Checkpoint]:
    """All complete checkpoints of a run, oldest first."""
    result = []
    for path in (run_dir / "checkpoints").glob("global_step_*"):
        match = CHECKPOINT_NAME.fullmatch(path.name)
        if match and (path / COMPLETE_NAME).exists():
            result.append(Checkpoint(path, int(match[1])))
    return sorted(result, key=lambda checkpoint: checkpoint.step)


def find_resume_point(trainer: TrainerConfig) -> Checkpoint | None:
    """The checkpoint to continue from under ``trainer.resume_mode``; None means from the start.

    Its own files are compared with their checksums, and the models' with their sizes: the rest of these is the
    learner's to check, with all its ranks, when it loads them.

    Raises:
        ConfigError: resume_path names something that is not a complete checkpoint.
        DamagedError: a file of the checkpoint is not what it was; the message offers the checkpoint before it.
    """
    result = _chosen(trainer, trainer.run_dir)
    if result is not None and trainer.verify_checkpoints:
        result.check_quickly()
    return result


def _chosen(trainer: TrainerConfig, run_dir: Path) -> Checkpoint | None:
    mode = trainer.resume_mode
    if mode == "disable":
        return None
    if mode == "auto":
        result = complete_checkpoints(run_dir)
        return result[-1] if result else None
    path = Path(trainer.resume_from_path or "")
    if (weights := weights_checkpoint(path)) is not None:
        raise ConfigError(
            f"trainer.resume_from_path={path} holds only the weights of step {weights.step}: without optimizer, data "
            f"position and step no run continues from it. A new run begins from it with model.mcore_path={path} and "
            "another trainer.experiment_name; the checkpoints to resume from are named global_step_N"
        )
    match = CHECKPOINT_NAME.fullmatch(path.name)
    if match is None or not (path / COMPLETE_NAME).exists():
        raise ConfigError(
            f"trainer.resume_from_path={path}: not a complete checkpoint; give a directory global_step_N that holds "
            f"a file {COMPLETE_NAME}"
        )
    return Checkpoint(path, int(match[1]))


def how_to_go_on(trainer: TrainerConfig) -> str:
    """What a user reads whose run was stopped."""
    complete = complete_checkpoints(trainer.run_dir)
    if not complete:
        weights = weights_checkpoints(trainer.run_dir)
        remark = f" ({weights[-1].path} holds only weights)" if weights else ""
        return f"no checkpoint was complete yet{remark}, so the same command starts over"
    command = "the same command"
    if trainer.resume_mode == "disable":
        command += " with trainer.resume_mode=auto"
    return f"{command} continues after step {complete[-1].step} ({complete[-1].path})"


def remove_unfinished(run_dir: Path) -> list[Path]:
    """Remove what an interrupted save or deletion left among the run's checkpoints; returns what was removed.

    Deleting begins with the marker, and saving ends with it, so a directory without it has no use.
    """
    folder = run_dir / "checkpoints"
    unfinished = [
        path
        for pattern, name in (("global_step_*", CHECKPOINT_NAME), ("weights_step_*", WEIGHTS_NAME))
        for path in folder.glob(pattern)
        if name.fullmatch(path.name) and not (path / COMPLETE_NAME).exists()
    ]
    for leftover in (".global_step_*.partial*", WORKSPACES):
        unfinished += folder.glob(leftover)
    for path in unfinished:
        shutil.rmtree(path, ignore_errors=True)
    return sorted(unfinished)


def set_aside(run_dir: Path) -> Path | None:
    """Move an earlier run of the same name out of the way; returns where it went. Nothing is deleted."""
    if not any((run_dir / name).exists() for name in ("metrics.jsonl", "checkpoints")):
        return None
    target = _name_aside(run_dir)
    os.rename(run_dir, target)
    set_rollouts_aside(target)
    return target


def set_aside_later(run_dir: Path, trainer: TrainerConfig, resume: Checkpoint | None) -> Path | None:
    """With ``trainer.resume_mode=resume_path``: move what the run made after the checkpoint that it goes back to.

    Otherwise resume_mode=auto, retention and export would take the abandoned checkpoints for the newest ones. These,
    rollouts and validations of later steps, export and report come to lie in a directory beside the run's, with a copy
    of metrics.jsonl and metrics.csv. Nothing is deleted.

    Returns:
        That directory; None where the run has no later checkpoint.
    """
    if resume is None or trainer.resume_mode != "resume_path":
        return None
    later = _later_paths(run_dir / "checkpoints", CHECKPOINT_NAME, resume.step)
    later += _later_paths(run_dir / "checkpoints", WEIGHTS_NAME, resume.step)
    if not later:
        return None
    for folder in ("rollouts", "validation", "validation_quick"):
        later += _later_paths(run_dir / folder, _STEP_FILE, resume.step)
    # Made of the last checkpoint; COMPLETE is fine-tuning's.
    later += [path for path in map(run_dir.joinpath, ("export", "report", COMPLETE_NAME)) if path.exists()]
    target = _name_aside(run_dir)
    for path in later:
        place = target / path.relative_to(run_dir)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, place)  # rollouts may lie on another file system
    for path in map(run_dir.joinpath, ("metrics.jsonl", "metrics.csv", "config.yaml")):
        if path.exists():
            shutil.copy2(path, target / path.name)
    return target


def _later_paths(folder: Path, pattern: re.Pattern[str], step: int) -> list[Path]:
    matches = [(path, pattern.fullmatch(path.name)) for path in sorted(folder.glob("*"))]
    return [path for path, match in matches if match and int(match[1]) > step]


def _name_aside(run_dir: Path) -> Path:
    return run_dir.with_name(f"{run_dir.name}.{time.strftime('%Y%m%d-%H%M%S')}")


def workspace_path(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is built before it has its name."""
    return run_dir / "checkpoints" / f".global_step_{step}.partial"


def checkpoint_workspace(run_dir: Path, step: int) -> Path:
    """An empty directory to build the checkpoint of ``step`` in."""
    path = workspace_path(run_dir, step)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


@contextmanager
def removed_on_failure(run_dir: Path, step: int) -> Iterator[Path]:
    """The workspace of the checkpoint of ``step``, which is removed where the block cannot write; that of its weights
    alone goes with it.

    Raises:
        SaveError: the disk is full or fails.
    """
    workspace = workspace_path(run_dir, step)
    try:
        yield workspace
    except (OSError, SaveError) as error:
        for built in (workspace, weights_workspace_path(run_dir, step)):
            shutil.rmtree(built, ignore_errors=True)
        older = complete_checkpoints(run_dir)
        raise SaveError(
            f"the checkpoint of step {step} was not written: {error}. "
            + (f"{older[-1].path} is intact" if older else "There is no older one")
            + "; free some space, or lower trainer.keep_checkpoints or trainer.keep_weights"
        ) from error


def seal_checkpoint(workspace: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the JSON ``files`` and then COMPLETE into the workspace: only its name is missing.

    The models' directories have markers of their own: COMPLETE holds the checksums only of these.
    """
    for name, content in files.items():
        write_text(workspace / name, json.dumps(content, indent=1))
    write_marker(workspace)


def publish_checkpoint(workspace: Path, step: int) -> Checkpoint:
    """Give a sealed workspace its final name.

    An earlier attempt at the same step, taken again after a resume, is replaced.
    """
    final = workspace.with_name(f"global_step_{step}")
    publish(workspace, final)
    return Checkpoint(final, step)


def retained_steps(
    steps: Iterable[int],
    *,
    keep_last: int,
    keep_every: int | None = None,
    best: Mapping[int, float] | None = None,
    keep_best: int = 0,
    higher_is_better: bool = True,
) -> set[int]:
    """Which checkpoints to keep: the union of the last ``keep_last``, the multiples of ``keep_every``, the best.

    Args:
        steps: steps that have a complete checkpoint.
        keep_last: at least 1: the newest one is what a run resumes from.
        keep_every: None or 0: no step is kept for its number.
        best: validation metric by step; steps without one, or with NaN, are not candidates. Of equals the later wins.
        keep_best: how many of the best to keep.

    Raises:
        ValueError: ``keep_last`` is below 1.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last} must be at least 1: the newest checkpoint is the one to resume from")
    ordered = sorted(set(steps))
    kept = set(ordered[-keep_last:])
    if keep_every:
        kept.update(step for step in ordered if step % keep_every == 0)
    sign = 1.0 if higher_is_better else -1.0
    scored = [(sign * best[step], step) for step in ordered if best and step in best and best[step] == best[step]]
    kept.update(step for _, step in sorted(scored, reverse=True)[:keep_best])
    return kept


def prune_checkpoints(trainer: TrainerConfig, written: Checkpoint) -> None:
    """Delete the checkpoints that ``trainer.keep_*`` do not keep, and leftovers of interrupted saves.

    The one just ``written`` and the one that ``trainer.resume_from_path`` names are never deleted.
    """
    run_dir = trainer.run_dir
    for leftover in (run_dir / "checkpoints").glob(".global_step_*.partial*"):
        shutil.rmtree(leftover, ignore_errors=True)
    complete = complete_checkpoints(run_dir)
    if trainer.keep_checkpoints < 1:
        return
    rows = read_metrics(run_dir / "metrics.jsonl") if trainer.keep_best else []
    best = {row["step"]: row[trainer.best_metric] for row in rows if row.get(trainer.best_metric) is not None}
    kept = retained_steps(
        [checkpoint.step for checkpoint in complete],
        keep_last=trainer.keep_checkpoints,
        keep_every=trainer.keep_every,
        best=best,
        keep_best=trainer.keep_best,
    )
    kept.add(written.step)
    origin = Path(trainer.resume_from_path).resolve() if trainer.resume_from_path else None
    for checkpoint in complete:
        if checkpoint.step not in kept and checkpoint.path.resolve() != origin:
            # The marker goes first: a deletion that is cut short must not leave a directory that looks complete.
            (checkpoint.path / COMPLETE_NAME).unlink()
            shutil.rmtree(checkpoint.path)
