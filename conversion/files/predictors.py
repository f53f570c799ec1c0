"""Layers for multi-token prediction behind a model's own: DeepSeek-V3, GLM-4.5 and Qwen3-Next are published with some.

Conversions carry their tensors along as they are, so that an exported model can still draft for itself:
``hf_to_mcore.py`` stores each under its Hugging Face name behind ``PREFIX``, and ``mcore_to_hf.py`` takes them from
there, or from the model or checkpoint given.  A learner that trains them (learner.mtp.train) reads them there
too, and its own checkpoints have them as parameters of the model, see ``Architecture.with_predictors``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from conversion.files.dist_checkpoint import DistCheckpoint
from conversion.files.hf_checkpoint import HFCheckpoint
from conversion.files.quantized_checkpoint import open_source
from conversion.files.safetensors_headers import HFCheckpointError
from conversion.model.architecture import Architecture
from conversion.model.mapping import Mapping
from conversion.model.rules import BUFFER_SUFFIXES, Arrangement, Rule
from conversion.model.weight_map import CheckpointPlace

PREFIX = "predictors."


@dataclass(frozen=True)
class Predictors:
    """Tensors of a model directory, or of a checkpoint that was converted from one.

    Attributes:
        mappings: of each tensor to itself.
    """

    source: HFCheckpoint | DistCheckpoint
    mappings: tuple[Mapping, ...]

    def without(self, names: Collection[str]) -> Predictors:
        """All but those of these Hugging Face names, which the learner has trained."""
        return replace(self, mappings=tuple(mapping for mapping in self.mappings if mapping.hf_names[0] not in names))

    def blocks(self, mapping: Mapping) -> Iterator[Tensor]:
        """The tensor in blocks of whole rows, as it is stored."""
        rows = mapping.mcore_shape[0]
        if isinstance(self.source, HFCheckpoint):
            return self.source.row_blocks(mapping, 0, rows)
        place = CheckpointPlace(mapping.mcore_name)
        if self.source.lies_in_order(place):
            return self.source.row_blocks(place, mapping.mcore_shape, 0, rows)
        return iter([self.source.read(place, mapping.mcore_shape)])

    def dtype(self, mapping: Mapping) -> str:
        """The dtype that the tensor is stored in, such as "bfloat16"."""
        if isinstance(self.source, HFCheckpoint):
            stored = self.source.entry(mapping.hf_names[0]).dtype
        else:
            stored = self.source.dtype(CheckpointPlace(mapping.mcore_name))
        return str(stored).removeprefix("torch.")


def of_model(checkpoint: HFCheckpoint, architecture: Architecture) -> Predictors:
    """Those of a model directory; none where it has none.

    Raises:
        HFCheckpointError: one of them is no tensor of rows.
    """
    names = checkpoint.predictors(architecture.num_layers)
    return Predictors(checkpoint, tuple(_itself(checkpoint, name) for name in names))


def of_checkpoint(checkpoint: DistCheckpoint) -> Predictors:
    """Those that a converted checkpoint carries; none where it carries none."""
    names = sorted(key.removeprefix(PREFIX) for key in checkpoint.tensors if key.startswith(PREFIX))
    shapes = (tuple(checkpoint.tensors[PREFIX + name].size) for name in names)
    return Predictors(checkpoint, tuple(_mapping(name, shape) for name, shape in zip(names, shapes, strict=True)))


def of_directory(directory: str | Path, architecture: Architecture) -> Predictors:
    """Those of a model directory, or of what ``hf_to_mcore.py`` made of one; none where it has none.

    Raises:
        HFCheckpointError, DistCheckpointError, UnsupportedArchitecture: the directory is neither, or is damaged.
    """
    if (Path(directory) / "metadata.json").is_file():
        return of_checkpoint(DistCheckpoint(directory))
    return of_model(open_source(directory), architecture)


def _itself(checkpoint: HFCheckpoint, name: str) -> Mapping:
    stored = checkpoint.entry(name)
    if not stored.shape:
        raise HFCheckpointError(f"{checkpoint.directory / stored.file}: tensor {name} is a number, not rows of them")
    return _mapping(name, stored.shape)


def _mapping(name: str, shape: tuple[int, ...]) -> Mapping:
    rule = Rule(PREFIX + name, (name,), (), is_buffer=name.endswith(BUFFER_SUFFIXES))
    return Mapping(rule.mcore, (name,), (shape,), Arrangement.COPY, None, rule)
