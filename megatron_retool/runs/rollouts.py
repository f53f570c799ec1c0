"""Where a run's rollouts/ really is: ``trainer.rollout_data_dir`` puts it elsewhere, and a link leads there.

So the report, replay and resume find rollouts below the run's directory in either case.
"""

from __future__ import annotations

import os
from pathlib import Path

from megatron_retool.config import ConfigError, TrainerConfig


def check_rollouts(run_dir: Path, trainer: TrainerConfig) -> None:
    """Check that the run's rollouts can go where ``trainer.rollout_data_dir`` says; nothing is made.

    Raises:
        ConfigError: the run has rollouts in another place already, or another run has some in that one.
    """
    place, key, directory = _place(run_dir), "trainer.rollout_data_dir", trainer.rollout_data_dir
    target = _target(trainer)
    if target is None:
        if place.is_symlink() and not place.exists():
            raise ConfigError(
                f"{place} leads to {os.readlink(place)}, which is gone: bring it back, or remove the link"
            )
    elif place.is_symlink() or _has_files(place):
        if place.resolve() != target:
            raise ConfigError(
                f"{key}={directory}: the run's rollouts lie in {place.resolve()} already: leave the setting as it was, "
                f"or move them to {target} and remove {place}"
            )
    elif _has_files(target):
        raise ConfigError(
            f"{key}={directory}: {target} holds another run's rollouts: choose another trainer.experiment_name or "
            "directory, or move them away"
        )


def prepare_rollouts(trainer: TrainerConfig) -> Path:
    """Make rollouts/ of the run, or a link to the place that ``trainer.rollout_data_dir`` names.

    Raises:
        ConfigError: see ``check_rollouts``.
    """
    check_rollouts(trainer.run_dir, trainer)
    place, target = _place(trainer.run_dir), _target(trainer)
    (target or place).mkdir(parents=True, exist_ok=True)
    if target is not None and not place.is_symlink():
        if place.exists():
            place.rmdir()
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)
    return place


def _place(run_dir: Path) -> Path:
    return run_dir / "rollouts"


def _target(trainer: TrainerConfig) -> Path | None:
    directory = trainer.rollout_data_dir
    return None if directory is None else (Path(directory) / trainer.experiment_name).resolve()


def set_rollouts_aside(run_dir: Path) -> None:
    """After ``run_dir`` was renamed: what its rollouts/ leads to gets the same name, to make room for a new run."""
    place = run_dir / "rollouts"
    if place.is_symlink() and place.exists():
        target = place.resolve()
        moved = target.rename(target.with_name(run_dir.name))
        place.unlink()
        place.symlink_to(moved)


def _has_files(directory: Path) -> bool:
    return directory.is_dir() and any(directory.iterdir())
