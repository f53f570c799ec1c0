"""FP8 in a weight sync: linear weights travel block-quantised, or as the values that block quantisation leaves.

Which weights these are says ``conversion.model.block_fp8``, for exported checkpoints and for engines too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from conversion.files.directory import local_directory
from conversion.model.architecture import Architecture
from conversion.model.block_fp8 import linear_names, quantize_named, quantized_names, round_to_blocks
from conversion.model.weight_map import WeightMap
from megatron_retool.config import Config, ModelConfig

Bucket = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Fp8:
    """What becomes of a bucket.

    Attributes:
        model: whose weights are sent.
        rounded: True: linear weights of any size keep their names and dtype, and lose what FP8 cannot hold. False:
            block-FP8 form, named as in FP8 checkpoints: a weight [out, in] becomes weight (float8_e4m3fn [out, in]) and
            weight_scale_inv (inverse scales, float32 [out/128, in/128]).
    """

    model: ModelConfig
    rounded: bool = False

    @cached_property
    def names(self) -> frozenset[str]:
        """Hugging Face names of the weights that are converted.

        Raises:
            ValueError: the model's sizes allow no block.
        """
        architecture = Architecture.from_pretrained(local_directory(self.model.path), self.model.families)
        weight_map = WeightMap(architecture)
        return linear_names(weight_map) if self.rounded else quantized_names(weight_map)

    def __call__(self, bucket: Bucket) -> Bucket:
        converted: Bucket = []
        for name, tensor in bucket:
            if name not in self.names:
                converted.append((name, tensor))
            elif self.rounded:
                converted.append((name, round_to_blocks(tensor)))
            else:
                converted += quantize_named(name, tensor)
        return converted


def fp8_conversion(config: Config) -> Fp8 | None:
    """What weight_sync.round_to_fp8 and rollout.engine.quantization make of weights on their way; None: nothing."""
    if config.weight_sync.round_to_fp8:
        return Fp8(config.model, rounded=True)
    return Fp8(config.model) if config.rollout.engine.quantization == "fp8" else None
