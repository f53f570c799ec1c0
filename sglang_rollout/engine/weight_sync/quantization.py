"""What becomes of linear weights on their way to engines: quantised for those that serve FP8, rounded for a study.

Which weights these are says ``conversion.model.block_fp8``, for exported checkpoints and for engines too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from conversion.files.directory import local_directory
from conversion.model.architecture import Architecture
from conversion.model.block_fp8 import (
    Form,
    form_of,
    linear_names,
    quantize_named,
    quantized_names,
    round_to_blocks,
    takes_power_of_two,
)
from conversion.model.weight_map import WeightMap
from megatron_retool.config import ModelConfig, RolloutConfig, WeightSyncConfig

Bucket = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Fp8:
    """``rollout.engine.quantization=fp8``: weights named as in FP8 checkpoints of the family.

    A weight [out, in] becomes weight (float8_e4m3fn [out, in]) and weight_scale_inv or weight_scale (what to multiply
    with, float32 [out/128, in/128]). The scales are of the kind that an FP8 learner on the same GPU computes with.

    Attributes:
        model: whose weights are sent.
        scales: weight_sync.fp8_scales.
    """

    model: ModelConfig
    scales: str = "auto"

    @cached_property
    def _form(self) -> Form:
        return form_of(_weight_map(self.model))

    @cached_property
    def names(self) -> frozenset[str]:
        """Hugging Face names of the weights that are converted.

        Raises:
            ValueError: the model's sizes allow no block.
        """
        return quantized_names(_weight_map(self.model))

    def __call__(self, bucket: Bucket) -> Bucket:
        """The bucket with its linear weights in blocks of FP8, each followed by its scales."""
        converted: Bucket = []
        for name, tensor in bucket:
            if name in self.names:
                power_of_two = takes_power_of_two(self.scales, tensor.device)
                converted += quantize_named(name, tensor, self._form, power_of_two=power_of_two)
            else:
                converted.append((name, tensor))
        return converted


@dataclass(frozen=True)
class Rounding:
    """``weight_sync.round_to``: weights keep name, shape and dtype, and lose what a quantised engine could not hold.

    Attributes:
        model: whose weights are sent.
        grid: "fp8" (``round_to_blocks``), or "int8", "int4", "int3" (``round_to_integers``).
        group_size: inputs that share a scale; only with integers.
        scales: weight_sync.fp8_scales; only with "fp8".
    """

    model: ModelConfig
    grid: str
    group_size: int = 32
    scales: str = "auto"

    @cached_property
    def names(self) -> frozenset[str]:
        """Hugging Face names of the weights that are rounded: the matrices of linear layers, experts included, of any
        size."""
        return linear_names(_weight_map(self.model))

    def __call__(self, bucket: Bucket) -> Bucket:
        """The bucket with its linear weights rounded, in the dtype that they had."""
        return [(name, self._round(tensor) if name in self.names else tensor) for name, tensor in bucket]

    def _round(self, weight: torch.Tensor) -> torch.Tensor:
        if self.grid == "fp8":
            return round_to_blocks(weight, power_of_two=takes_power_of_two(self.scales, weight.device))
        return round_to_integers(weight, int(self.grid.removeprefix("int")), self.group_size)


def round_to_integers(weight: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """What is left of a matrix that integers of ``bits`` bits hold, symmetric, rounded to the nearest.

    Args:
        weight: [out, in], any floating dtype.
        bits: 2 or more; the integers are -(2^(bits-1) - 1) … 2^(bits-1) - 1.
        group_size: consecutive inputs of a row that share a scale, which is their largest magnitude over the largest
            integer; the last group of a row may be smaller.

    Returns:
        [out, in] in the dtype of ``weight``.
    """
    rows, columns = weight.shape
    largest_integer = 2 ** (bits - 1) - 1
    group_size = min(group_size, columns)
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % group_size))
    groups = padded.view(rows, -1, group_size)
    largest = groups.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest / largest_integer, torch.ones_like(largest))
    rounded = (groups / scale).round().clamp(-largest_integer, largest_integer) * scale
    return rounded.view(rows, -1)[:, :columns].to(weight.dtype).contiguous()


def weight_conversion(
    sync: WeightSyncConfig, model: ModelConfig, rollout: RolloutConfig
) -> Callable[[Bucket], Bucket] | None:
    """What weight_sync.round_to or rollout.engine.quantization make of weights on their way; None: nothing."""
    if sync.round_to is not None:
        return Rounding(model, sync.round_to, sync.round_group_size, sync.fp8_scales)
    return Fp8(model, sync.fp8_scales) if rollout.engine.quantization == "fp8" else None


def _weight_map(model: ModelConfig) -> WeightMap:
    return WeightMap(Architecture.from_pretrained(local_directory(model.path), model.families))
