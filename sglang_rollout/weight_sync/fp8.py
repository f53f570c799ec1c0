"""FP8 in a weight sync: linear weights travel block-quantised, or as the values that block quantisation leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_retool.config import Config

Bucket = list[tuple[str, torch.Tensor]]


def is_linear(name: str) -> bool:
    """Whether FP8 serving quantises it: not embeddings, the output layer, norms, biases and MoE routers."""
    return name.endswith("_proj.weight")


@dataclass(frozen=True)
class Fp8:
    """What becomes of a bucket.

    Attributes:
        rounded: True: weights keep their names and dtype, and lose what FP8 cannot hold. False: block-FP8 form, named
            as in FP8 checkpoints: a linear weight [out, in] becomes weight (float8_e4m3fn [out, in]) and
            weight_scale_inv (inverse scales, float32 [ceil(out/128), ceil(in/128)]).
        is_quantized: which tensors, by Hugging Face name.
    """

    rounded: bool = False
    is_quantized: Callable[[str], bool] = is_linear

    def __call__(self, bucket: Bucket) -> Bucket:
        from conversion.fp8_export import dequantize_blockwise, quantize_blockwise

        converted: Bucket = []
        for name, tensor in bucket:
            if not self.is_quantized(name):
                converted.append((name, tensor))
            elif self.rounded:
                converted.append((name, dequantize_blockwise(*quantize_blockwise(tensor)).to(tensor.dtype)))
            else:
                weight, scale_inv = quantize_blockwise(tensor)
                converted += [(name, weight), (f"{name}_scale_inv", scale_inv)]
        return converted


def fp8_conversion(config: Config) -> Fp8 | None:
    """What weight_sync.round_to_fp8 and rollout.engine.quantization make of weights on their way; None: nothing."""
    if config.weight_sync.round_to_fp8:
        return Fp8(rounded=True)
    return Fp8() if config.rollout.engine.quantization == "fp8" else None
