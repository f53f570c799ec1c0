"""Adapters as ``peft`` and engines read and write them: adapter_config.json and adapter_model.safetensors.

Only safetensors are read. Older files (adapter_model.bin) are pickled, and reading one may run code.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from conversion.model.adapter_map import factor_mappings, peft_tensor, target_of
from conversion.model.mapping import Mapping as WeightMapping
from conversion.model.peft_config import CONFIG_NAME, WEIGHTS_NAME, PeftFilesError, read_peft_config
from run_files.atomic_files import atomic_write, write_text
from untrusted import quoted

PREFIX = "base_model.model."
"""What tensors' names in peft's files begin with."""


def write_peft(directory: Path, tensors: Mapping[str, Tensor], rank: int, alpha: float, base: str) -> None:
    """Write an adapter into ``directory``, which is made.

    Experts have a tensor each, as engines take them; transformers fuses experts, and ``peft`` does not load those.

    Args:
        tensors: by the names of ``factor_mappings``, without peft's prefix and each of them whole.
        base: what its base model is, a directory or a name.
    """
    directory.mkdir()
    named = {PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}
    with atomic_write(directory / WEIGHTS_NAME) as file:  # not save_file, whose files no other user may read
        file.write(save(named, metadata={"format": "pt"}))
    write_text(directory / CONFIG_NAME, json.dumps(peft_config(tensors, rank, alpha, base), indent=2) + "\n")


def peft_config(names: Iterable[str], rank: int, alpha: float, base: str) -> dict[str, Any]:
    """adapter_config.json of an adapter whose tensors have ``names``; the rest as in ``write_peft``."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": sorted({name.split(".")[-3] for name in names}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


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
        config = read_peft_config(self.directory)
        self.rank, self.alpha = config.rank, config.alpha
        self._path = self.directory / WEIGHTS_NAME
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
        expected = {PREFIX + name: shape for name, shape in shapes.items()}
        missing, more = sorted(expected.keys() - self._names), sorted(self._names - expected.keys())
        for names, what in ((missing, "lacks"), (more, "also has")):
            if names:
                raise PeftFilesError(
                    f"{self._path} {what} {quoted(names[0])}{f' and {len(names) - 1} more' if names[1:] else ''}: it "
                    f"adapts other matrices than learner.lora.targets=[{', '.join(targets)}] of this model"
                )
        for name, shape in expected.items():
            result = self._file.get_slice(name)
            if tuple(result.get_shape()) != shape:
                raise PeftFilesError(
                    f"{self._path}: {name} has shape {result.get_shape()}, and rank {self.rank} of this model needs "
                    f"{list(shape)}: it is of another base model"
                )
            if result.get_dtype() not in ("F32", "F16", "BF16", "F64"):
                raise PeftFilesError(f"{self._path}: {name} is {result.get_dtype()}: save it as float32 or bfloat16")

    def factors(self, mapping: WeightMapping) -> list[Tensor]:
        """One weight's factors, whole, in the order of ``factor_mappings``: float32.

        Raises:
            PeftFilesError: a number is not finite.
        """
        result = []
        for factor in factor_mappings(mapping, self.rank):
            name, first = peft_tensor(factor.hf_names[0])
            tensor = self._file.get_slice(PREFIX + name)[first : first + factor.hf_shapes[0][0]].float()
            if not bool(torch.isfinite(tensor).all()):
                raise PeftFilesError(f"{self._path}: {PREFIX + name} holds a number that is not finite")
            result.append(tensor)
        return result


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
