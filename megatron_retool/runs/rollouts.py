"""Where a run's rollouts/ really is: ``trainer.rollout_data_dir`` puts it elsewhere, and a link leads there.

So the report, replay and resume find rollouts below the run's directory in either case.
"""

from __future__ import annotations

import os
from pathlib import Path

from megatron_retool.config import Config, ConfigError


def prepare_rollouts(config: Config) -> Path:
    """Make rollouts/ of the run, or a link to the place that ``trainer.rollout_data_dir`` names.

    Raises:
        ConfigError: the run has rollouts in another place already, or another run has some in that one.
    """
    place, key = config.run_dir / "rollouts", "trainer.rollout_data_dir"
    if config.trainer.rollout_data_dir is None:
        if not place.is_symlink():
            place.mkdir(parents=True, exist_ok=True)
        elif not place.exists():
            raise ConfigError(
                f"{place} leads to {os.readlink(place)}, which is gone: bring it back, or remove the link"
            )
        return place
    target = (Path(config.trainer.rollout_data_dir) / config.trainer.experiment_name).resolve()
    if place.is_symlink() or _has_files(place):
        if place.resolve() == target:
            target.mkdir(parents=True, exist_ok=True)
            return place
        raise ConfigError(
            f"{key}={config.trainer.rollout_data_dir}: the run's rollouts lie in {place.resolve()} already: leave the "
            f"setting as it was, or move them to {target} and remove {place}"
        )
    if _has_files(target):
        raise ConfigError(
            f"{key}={config.trainer.rollout_data_dir}: {target} holds another run's rollouts: choose another "
            "trainer.experiment_name or directory, or move them away"
        )
    target.mkdir(parents=True, exist_ok=True)
    if place.exists():
        place.rmdir()
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)
    return place


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
