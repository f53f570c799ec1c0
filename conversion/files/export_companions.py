"""config.json and the tokenizer's files of an exported directory."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from conversion.files.adapter_checkpoint import RECORD_NAME
from conversion.files.companions import copy_companions
from conversion.files.directory import COMPANIONS
from conversion.files.dist_checkpoint import DistCheckpointError
from conversion.model.block_fp8 import blockwise_quantization_config
from conversion.model.config_reader import PREDICTORS
from conversion.model.weight_map import WeightMap
from run_files.atomic_files import write_text


def companion_directory(mcore_dir: Path, hf_config_dir: str | Path | None = None) -> Path:
    """Where config.json and the tokenizer of a checkpoint are.

    Raises:
        DistCheckpointError: nowhere.
    """
    directory = mcore_dir / COMPANIONS if hf_config_dir is None else Path(hf_config_dir)
    if not (directory / "config.json").is_file():
        raise DistCheckpointError(
            f"{directory} has no config.json: pass --hf-config-dir with the model directory that training started from"
        )
    return directory


def _announce_no_predictors(directory: Path) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    announced = {key: 0 for key in PREDICTORS if config.get(key)}
    if announced:
        write_text(path, json.dumps({**config, **announced}, indent=2) + "\n")


def write_companions(
    companions: Path,
    directory: Path,
    weight_map: WeightMap,
    dtype: torch.dtype | None,
    *,
    fp8: bool,
    predictors: bool,
) -> None:
    """config.json of what was written, and the tokenizer's files as they are."""
    copy_companions(companions, directory, keep=lambda name: name != RECORD_NAME)
    _write_config(companions, directory, weight_map, dtype, fp8)
    if not predictors:
        _announce_no_predictors(directory)


def _write_config(
    companions: Path, directory: Path, weight_map: WeightMap, dtype: torch.dtype | None, fp8: bool
) -> None:
    if dtype is None and not fp8:
        return
    config = json.loads((companions / "config.json").read_text(encoding="utf-8"))
    if dtype is not None:
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = str(dtype).removeprefix("torch.")
    if fp8:
        config["quantization_config"] = blockwise_quantization_config(weight_map)
    write_text(directory / "config.json", json.dumps(config, indent=2) + "\n")
