"""A run's checkpoints of only the weights: checkpoints/weights_step_N, beside the complete ones, global_step_N.

One is a Megatron-Core checkpoint as ``conversion/hf_to_mcore.py`` makes it, of the policy:
``conversion/mcore_to_hf.py`` exports it, ``megatron-retool evaluate`` takes it as model.path, and as model.mcore_path
another run begins from it. It has no optimizer, no data position and no step, so no run resumes from it.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from conversion.files.checksums import COMPLETE_NAME, WEIGHTS_NAME
from conversion.files.directory import publish
from megatron_retool.config import ModelConfig, TrainerConfig

WORKSPACES = ".weights_step_*.partial*"
_MODEL = "learner"


@dataclass(frozen=True)
class WeightsCheckpoint:
    """A complete one on disk."""

    path: Path
    step: int


def weights_checkpoint(path: Path) -> WeightsCheckpoint | None:
    """``path``, where it is one."""
    match = WEIGHTS_NAME.fullmatch(path.name)
    return WeightsCheckpoint(path, int(match[1])) if match and (path / COMPLETE_NAME).exists() else None


def weights_checkpoints(run_dir: Path) -> list[WeightsCheckpoint]:
    """All complete ones of a run, oldest first."""
    result = [weights_checkpoint(path) for path in (run_dir / "checkpoints").glob("weights_step_*")]
    return sorted((each for each in result if each is not None), key=lambda each: each.step)


def weights_workspace_path(run_dir: Path, step: int) -> Path:
    """Where the weights of ``step`` are written before they have their name."""
    return run_dir / "checkpoints" / f".weights_step_{step}.partial"


def weights_workspace(run_dir: Path, step: int) -> Path:
    """An empty directory; in it, under a name that is returned, the weights of ``step`` are built."""
    directory = weights_workspace_path(run_dir, step)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory / _MODEL


def publish_weights(run_dir: Path, step: int) -> WeightsCheckpoint:
    """Give what was built in ``weights_workspace`` its name; an earlier one of the same step is replaced."""
    workspace = weights_workspace_path(run_dir, step)
    final = workspace.with_name(f"weights_step_{step}")
    publish(workspace / _MODEL, final)
    workspace.rmdir()
    return WeightsCheckpoint(final, step)


def prune_weights(trainer: TrainerConfig, model: ModelConfig, written: WeightsCheckpoint) -> None:
    """Delete those that ``trainer.keep_weights`` does not keep.

    The one just ``written`` and the one that ``model.mcore_path`` names are never deleted.
    """
    keep, start = trainer.keep_weights, model.mcore_path
    if keep < 1:
        return
    kept = {written.path.resolve()} | ({Path(start).resolve()} if start is not None else set())
    for old in weights_checkpoints(trainer.run_dir)[:-keep]:
        if old.path.resolve() not in kept:
            # The marker goes first: a deletion that is cut short must not leave a directory that looks complete.
            (old.path / COMPLETE_NAME).unlink()
            shutil.rmtree(old.path)
