"""FP8 in a weight sync: linear weights travel block-quantised, or as the values that block quantisation leaves.

Which weights these are says ``conversion.model.block_fp8``, for exported checkpoints and for engines too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from conversion.files.directory import local_directory
from conversion.model.architecture import Architecture
from conversion.model.block_fp8 import Form, form_of, linear_names, quantize_named, quantized_names, round_to_blocks
from conversion.model.weight_map import WeightMap
from megatron_retool.config import Config, ModelConfig

Bucket = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Fp8:
    """What becomes of a bucket.

    Attributes:
        model: whose weights are sent.
        rounded: True: linear weights of any size keep their names and dtype, and lose what FP8 cannot hold. False:
            block-FP8, named as in FP8 checkpoints of the family: a weight [out, in] becomes weight (float8_e4m3fn
            [out, in]) and weight_scale_inv or weight_scale (what to multiply with, float32 [out/128, in/128]).
    """

    model: ModelConfig
    rounded: bool = False

    @cached_property
    def _weight_map(self) -> WeightMap:
        return WeightMap(Architecture.from_pretrained(local_directory(self.model.path), self.model.families))

    @cached_property
    def _form(self) -> Form:
        return form_of(self._weight_map)

    @cached_property
    def names(self) -> frozenset[str]:
        """Hugging Face names of the weights that are converted.

        Raises:
            ValueError: the model's sizes allow no block.
        """
        return linear_names(self._weight_map) if self.rounded else quantized_names(self._weight_map)

    def __call__(self, bucket: Bucket) -> Bucket:
        converted: Bucket = []
        for name, tensor in bucket:
            if name not in self.names:
                converted.append((name, tensor))
            elif self.rounded:
                converted.append((name, round_to_blocks(tensor)))
            else:
                converted += quantize_named(name, tensor, self._form)
        return converted


def fp8_conversion(config: Config) -> Fp8 | None:
    """What weight_sync.round_to_fp8 and rollout.engine.quantization make of weights on their way; None: nothing."""
    if config.weight_sync.round_to_fp8:
        return Fp8(config.model, rounded=True)
    return Fp8(config.model) if config.rollout.engine.quantization == "fp8" else None
