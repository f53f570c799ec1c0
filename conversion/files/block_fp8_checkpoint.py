"""Block-FP8 checkpoints (``model.block_fp8``) as sources: read as the bfloat16 models that they stand for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from conversion.files.hf_checkpoint import HFCheckpoint, HFCheckpointError, StoredTensor
from conversion.model.block_fp8 import BLOCK, Form, dequantize_blockwise, form_of_source
from conversion.model.hf_config import UnsupportedArchitecture

FULL_PRECISION = torch.bfloat16
"""What the weights were before they were quantised, in every model that is published so."""


def open_source(directory: str | Path) -> HFCheckpoint:
    """The weights of a directory, dequantised where config.json says that they are block FP8.

    Raises:
        HFCheckpointError: as ``HFCheckpoint`` and ``BlockFP8Checkpoint``.
        UnsupportedArchitecture: they are quantised in another way.
    """
    config = Path(directory) / "config.json"
    try:
        form = form_of_source(json.loads(config.read_text(encoding="utf-8")))
    except UnsupportedArchitecture as error:
        raise UnsupportedArchitecture(f"{config}: {error}") from None
    return HFCheckpoint(directory) if form is None else BlockFP8Checkpoint(directory, form)


class BlockFP8Checkpoint(HFCheckpoint):
    """A directory with e4m3 weights and their scales, whose weights are bfloat16 to those who read it.

    Which weights are quantised is what their dtype says; the others are as they are stored.  No scales are among
    ``tensors``.

    Raises:
        HFCheckpointError: as ``HFCheckpoint``; nothing is quantised; scales are missing, belong to no FP8 weight, or
            are of another shape or dtype.
    """

    def __init__(self, directory: str | Path, form: Form) -> None:
        super().__init__(directory)
        self._suffix = form.suffix
        quantized = {t.name: t for t in self.on_disk.values() if t.dtype == torch.float8_e4m3fn}
        if not quantized:
            raise HFCheckpointError(
                f"{self.directory}: config.json has quantization_config, but no tensor is float8_e4m3fn: the two do "
                "not belong together"
            )
        for weight in quantized.values():
            self._check_scales(weight)
        scales = {name + form.suffix for name in quantized}
        for name, stored in self.on_disk.items():
            if name.endswith(form.suffix) and name not in scales:
                raise HFCheckpointError(
                    f"{self.directory / stored.file} holds the scales {name}, but {name.removesuffix(form.suffix)} is "
                    "no float8_e4m3fn weight"
                )
        self.tensors = {
            name: replace(stored, dtype=FULL_PRECISION) if name in quantized else stored
            for name, stored in self.on_disk.items()
            if name not in scales
        }

    def _check_scales(self, weight: StoredTensor) -> None:
        name = weight.name + self._suffix
        scales = self.on_disk.get(name)
        if scales is None:
            raise HFCheckpointError(
                f"{self.directory} lacks tensor {name}, the scales of the FP8 weight {weight.name} in {weight.file}"
            )
        expected = tuple(-(-size // BLOCK) for size in weight.shape)
        if len(weight.shape) != 2 or scales.shape != expected:
            raise HFCheckpointError(
                f"{self.directory / scales.file}: {name} has shape {scales.shape}, but {weight.name} of shape "
                f"{weight.shape} has {expected} blocks of {BLOCK} x {BLOCK}"
            )
        if scales.dtype != torch.float32:
            raise HFCheckpointError(f"{self.directory / scales.file}: {name} has dtype {scales.dtype}, not float32")

    def read(self, name: str, rows: tuple[int, int] | None = None, out: Tensor | None = None) -> Tensor:
        """As ``HFCheckpoint.read``: bfloat16 of a quantised weight, rounded once from e4m3 times float32.

        Raises:
            HFCheckpointError: also where a scale is no finite number from 0 on.
        """
        if name not in self.tensors or self.on_disk[name].dtype == self.tensors[name].dtype:
            return super().read(name, rows, out)
        first, stop = rows or (0, self.on_disk[name].shape[0])
        quantized = super().read(name, (first, stop))
        scales = super().read(name + self._suffix, (first // BLOCK, -(-stop // BLOCK)))
        if not bool((torch.isfinite(scales) & (scales >= 0)).all()):
            stored = self.on_disk[name + self._suffix]
            raise HFCheckpointError(
                f"{self.directory / stored.file}: {stored.name} has a scale that is no finite number from 0 on"
            )
        found = dequantize_blockwise(quantized, scales, first_row=first % BLOCK).to(FULL_PRECISION)
        return found if out is None else out.copy_(found)
