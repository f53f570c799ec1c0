"""adapter_config.json of an adapter that ``peft`` wrote: read and checked without torch, before anything is started."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_retool.errors import InputError
from untrusted import load_json, quoted

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_PICKLED_NAME = "adapter_model.bin"
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "use_rslora": (None, False),
    "use_dora": (None, False),
    "fan_in_fan_out": (None, False),
    "bias": (None, "none"),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "lora_bias": (None, False),
    "use_qalora": (None, False),
    "alora_invocation_tokens": (None, []),
    "layer_replication": (None, []),
    # The others (PiSSA, OLoRA, LoftQ, …) change the base model, and their factors are relative to what they leave.
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}
"""Settings of peft that change what an adapter is, and their values that do not."""


class PeftFilesError(InputError):
    """A directory's adapter cannot be read, or is not of this model. The message names the file and what to do."""


@dataclass(frozen=True)
class PeftConfig:
    """What an adapter's factors are."""

    rank: int
    alpha: float


def read_peft_config(directory: str | Path) -> PeftConfig:
    """The rank and alpha of the adapter in ``directory``.

    Raises:
        PeftFilesError: a file is missing or damaged, or the adapter is of a kind that the learner does not compute.
    """
    directory = Path(directory)
    path = directory / CONFIG_NAME
    if not path.is_file():
        raise PeftFilesError(f"{directory} has no {CONFIG_NAME}: give a directory that peft has written")
    try:
        config = load_json(path.read_bytes())
    except (ValueError, OSError) as error:
        raise PeftFilesError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else config
        raise PeftFilesError(f"{path}: peft_type={quoted(kind)}: only LORA is read")
    for name, neutral in _NEUTRAL.items():
        if config.get(name) not in neutral:
            raise PeftFilesError(f"{path}: {name}={quoted(config[name])}: the learner's adapters are plain LoRA")
    rank, alpha = (_number(path, config, name) for name in ("r", "lora_alpha"))
    if rank < 1 or rank != int(rank):
        raise PeftFilesError(f"{path}: r={quoted(rank)}: give a whole number of at least 1")
    if alpha <= 0:
        raise PeftFilesError(f"{path}: lora_alpha={quoted(alpha)}: give a number above 0")
    if not (directory / WEIGHTS_NAME).is_file():
        pickled = (directory / _PICKLED_NAME).is_file()
        why = f"{_PICKLED_NAME} is pickled and not read: save the adapter with peft again" if pickled else "fetch it"
        raise PeftFilesError(f"{directory} has no {WEIGHTS_NAME}: {why}")
    return PeftConfig(int(rank), float(alpha))


def _number(path: Path, config: Mapping[str, Any], name: str) -> float:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise PeftFilesError(f"{path}: {name}={quoted(value)}: give a number")
    return value
