"""The settings that a run left on disk, of any version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from megatron_retool.errors import InputError
from run_files.settings import flat_settings


def stored_settings(run_dir: Path) -> dict[str, Any]:
    """A run's settings by dotted key. They are not checked: a run of another version has other keys.

    Raises:
        FileNotFoundError: the directory has no config.yaml.
        ValueError: config.yaml is no YAML, or no mapping.
    """
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: give directories of runs, as runs/demo")
    try:
        settings = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:  # OmegaConf's and YAML's own, of a foreign file
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{path} cannot be read: {reason}: correct it, or name another run") from error
    if not isinstance(settings, dict):
        raise InputError(f"{path} is no mapping of settings: correct it, or name another run")
    return flat_settings(settings)
