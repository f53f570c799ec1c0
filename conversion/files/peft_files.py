"""Adapters as ``peft`` and engines read and write them: adapter_config.json and adapter_model.safetensors.

Only safetensors are read. Older files (adapter_model.bin) are pickled, and reading one may run code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from conversion.model.adapter_map import factor_mappings, peft_tensor, target_of
from conversion.model.weight_map import Mapping as WeightMapping
from megatron_retool.errors import InputError
from megatron_retool.runs.files import write_text
from megatron_retool.untrusted import load_json, quoted

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_PICKLED_NAME = "adapter_model.bin"
_PREFIX = "base_model.model."
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
}
"""Settings of peft that change what an adapter is, and their values that do not."""


class PeftFilesError(InputError):
    """A directory's adapter cannot be read, or is not of this model. The message names the file and what to do."""


def write_peft(directory: Path, tensors: Mapping[str, Tensor], rank: int, alpha: float, base: str) -> None:
    """Write an adapter into ``directory``, which is made.

    Experts have a tensor each, as engines take them; transformers fuses experts, and ``peft`` does not load those.

    Args:
        tensors: by the names of ``factor_mappings``, without peft's prefix and each of them whole.
        base: what its base model is, a directory or a name.
    """
    directory.mkdir()
    named = {_PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}
    # Not save_file, whose files no other user may read.
    (directory / WEIGHTS_NAME).write_bytes(save(named, metadata={"format": "pt"}))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    write_text(directory / CONFIG_NAME, json.dumps(config, indent=2) + "\n")


class PeftFiles:
    """An adapter that ``peft``, an engine's tool or this project wrote; its configuration is checked, its tensors are
    read when they are asked for.

    Attributes:
        directory: where it lies.
        rank, alpha: of its factors.

    Raises:
        PeftFilesError: a file is missing or damaged, or the adapter is of a kind that the learner does not compute.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        config = self._config()
        rank = self._number(config, "r")
        if not (rank >= 1 and rank == int(rank)):
            raise PeftFilesError(f"{self._in_config('r', config)}: give a whole number of at least 1")
        self.rank = int(rank)
        self.alpha = self._number(config, "lora_alpha")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise PeftFilesError(f"{self._in_config('lora_alpha', config)}: give a number above 0")
        self._path = self.directory / WEIGHTS_NAME
        if not self._path.is_file():
            pickled = (self.directory / _PICKLED_NAME).is_file()
            why = (
                f"{_PICKLED_NAME} is pickled and not read: save the adapter with peft again" if pickled else "fetch it"
            )
            raise PeftFilesError(f"{self.directory} has no {WEIGHTS_NAME}: {why}")
        try:
            file: Any = safe_open(self._path, "pt")
            self._file = file
            self._names = set(self._file.keys())
        except (SafetensorError, OSError) as error:
            raise PeftFilesError(f"{self._path} is damaged: {error}: fetch it again") from error

    def check(self, mappings: Iterable[WeightMapping], targets: Collection[str]) -> None:
        """Hold the names and shapes of the tensors against those of a model's adapters.

        Args:
            mappings: the model's.
            targets: of learner.lora.targets.

        Raises:
            PeftFilesError: a tensor is missing, superfluous, of another shape or no float.
        """
        shapes = factor_shapes(mappings, targets, self.rank)
        expected = {_PREFIX + name: shape for name, shape in shapes.items()}
        missing, more = sorted(expected.keys() - self._names), sorted(self._names - expected.keys())
        for names, what in ((missing, "lacks"), (more, "also has")):
            if names:
                raise PeftFilesError(
                    f"{self._path} {what} {quoted(names[0])}{f' and {len(names) - 1} more' if names[1:] else ''}: it "
                    f"adapts other matrices than learner.lora.targets=[{', '.join(targets)}] of this model"
                )
        for name, shape in expected.items():
            found = self._file.get_slice(name)
            if tuple(found.get_shape()) != shape:
                raise PeftFilesError(
                    f"{self._path}: {name} has shape {found.get_shape()}, and rank {self.rank} of this model needs "
                    f"{list(shape)}: it is of another base model"
                )
            if found.get_dtype() not in ("F32", "F16", "BF16", "F64"):
                raise PeftFilesError(f"{self._path}: {name} is {found.get_dtype()}: save it as float32 or bfloat16")

    def factors(self, mapping: WeightMapping) -> list[Tensor]:
        """One weight's factors, whole, in the order of ``factor_mappings``: float32.

        Raises:
            PeftFilesError: a number is not finite.
        """
        found = []
        for factor in factor_mappings(mapping, self.rank):
            name, first = peft_tensor(factor.hf_names[0])
            tensor = self._file.get_slice(_PREFIX + name)[first : first + factor.hf_shapes[0][0]].float()
            if not bool(torch.isfinite(tensor).all()):
                raise PeftFilesError(f"{self._path}: {_PREFIX + name} holds a number that is not finite")
            found.append(tensor)
        return found

    def _config(self) -> dict[str, Any]:
        path = self.directory / CONFIG_NAME
        if not path.is_file():
            raise PeftFilesError(f"{self.directory} has no {CONFIG_NAME}: give a directory that peft has written")
        try:
            config = load_json(path.read_bytes())
        except (ValueError, OSError) as error:
            raise PeftFilesError(f"{path} cannot be read: {error}") from error
        if not isinstance(config, dict) or config.get("peft_type") != "LORA":
            kind = config.get("peft_type") if isinstance(config, dict) else config
            raise PeftFilesError(f"{path}: peft_type={quoted(kind)}: only LORA is read")
        for name, neutral in _NEUTRAL.items():
            if config.get(name) not in neutral:
                raise PeftFilesError(f"{self._in_config(name, config)}: the learner's adapters are plain LoRA")
        return config

    def _number(self, config: dict[str, Any], name: str) -> float:
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise PeftFilesError(f"{self._in_config(name, config)}: give a number")
        return value

    def _in_config(self, name: str, config: dict[str, Any]) -> str:
        return f"{self.directory / CONFIG_NAME}: {name}={quoted(config.get(name))}"


def factor_shapes(mappings: Iterable[WeightMapping], targets: Collection[str], rank: int) -> dict[str, tuple[int, int]]:
    """Shapes of an adapter's tensors by their names in peft's files, without its prefix."""
    rows: dict[str, int] = {}
    columns: dict[str, int] = {}
    for mapping in mappings:
        for factor in factor_mappings(mapping, rank) if target_of(mapping) in targets else ():
            name, _ = peft_tensor(factor.hf_names[0])
            rows[name] = rows.get(name, 0) + factor.hf_shapes[0][0]
            columns[name] = factor.hf_shapes[0][1]
    return {name: (count, columns[name]) for name, count in rows.items()}
