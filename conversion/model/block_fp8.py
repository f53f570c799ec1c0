"""Block-FP8: DeepSeek-V3's scheme (arXiv:2412.19437, section 3.3.2), and the weights that it holds for.

e4m3 weights with one float32 scale for each 128 x 128 block; activations are quantised by the engine as it runs. SGLang
and transformers read it. Export, weight sync, engines and ``--verify`` all ask here which weights are concerned:

    linear      the matrices of linear layers: what FP8 serving computes in FP8, and what an imitation of it rounds
    quantized   those of them that are stored in FP8: both sides are multiples of 128

The other linear layers keep their dtype and are listed in the ``modules_to_not_convert`` of
``blockwise_quantization_config``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conversion.model.weight_map import Mapping, WeightMap

BLOCK = 128
E4M3_MAX = 448.0
SCALE_SUFFIX = "_scale_inv"
"""A weight's scales carry its name with this suffix: ``….q_proj.weight_scale_inv``."""


def is_linear(mapping: Mapping) -> bool:
    """Whether the parameter is the matrix of a linear layer: not embedding, router, output layer, norm or bias."""
    return mapping.tp_dim is not None and mapping.layer is not None and len(mapping.mcore_shape) == 2


def is_quantized(mapping: Mapping) -> bool:
    """Whether a checkpoint of the scheme, and an engine that serves it, holds the parameter in FP8.

    Both sides of every matrix have to be multiples of 128: transformers takes the block size from the ratio of the
    shapes and would otherwise scale with the wrong blocks, and SGLang refuses layers that it merges (q, k, v; gate, up)
    or splits over ranks. Matrices that Megatron-Core merges are quantised together or not at all, as engines want it.
    """
    return is_linear(mapping) and all(size % BLOCK == 0 for shape in mapping.hf_shapes for size in shape)


def linear_names(weight_map: WeightMap) -> frozenset[str]:
    """Hugging Face names of the matrices of linear layers, whatever their sizes."""
    return frozenset(name for mapping in weight_map if is_linear(mapping) for name in mapping.hf_names)


def quantized_names(weight_map: WeightMap) -> frozenset[str]:
    """Hugging Face names of the weights that the scheme quantises.

    Raises:
        ValueError: none, because the model's sizes are not multiples of 128.
    """
    names = frozenset(name for mapping in weight_map if is_quantized(mapping) for name in mapping.hf_names)
    if not names:
        architecture = weight_map.architecture
        raise ValueError(
            f"no linear layer can be quantised in {BLOCK} x {BLOCK} blocks: hidden_size={architecture.hidden_size} and "
            f"the other sizes of this {architecture.family} model are not multiples of {BLOCK}"
        )
    return names


def quantize_blockwise(weight: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Quantise a matrix in blocks of ``block`` x ``block``; blocks at the edges may be smaller.

    Args:
        weight: [out, in], any floating dtype.

    Returns:
        (quantised float8_e4m3fn [out, in], scale float32 [ceil(out / block), ceil(in / block)]) with
        ``weight = quantised * scale``, block by block: the scale is the block's largest magnitude / 448. An all-zero
        block has scale 1.
    """
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % block, 0, -rows % block))
    blocks = padded.view(padded.shape[0] // block, block, padded.shape[1] // block, block)
    largest = blocks.abs().amax(dim=(1, 3))
    scale = torch.where(largest > 0, largest / E4M3_MAX, torch.ones_like(largest))
    # Rounding in the division may land a hair above 448, which e4m3fn turns into NaN.
    scaled = (blocks / scale[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX)
    quantized = scaled.view(padded.shape)[:rows, :columns].to(torch.float8_e4m3fn).contiguous()
    return quantized, scale


def dequantize_blockwise(quantized: Tensor, scale: Tensor, block: int = BLOCK) -> Tensor:
    """The float32 matrix that ``quantize_blockwise``'s result stands for."""
    rows, columns = quantized.shape
    full = scale.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
    return quantized.float() * full


def round_to_blocks(weight: Tensor) -> Tensor:
    """What is left of a matrix after ``quantize_blockwise``, in its own dtype: for the names of ``linear_names``."""
    return dequantize_blockwise(*quantize_blockwise(weight)).to(weight.dtype)


def quantize_named(name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    """``quantize_blockwise`` under the names of a block-FP8 checkpoint.

    At a weight sync: for the names that ``quantized_names`` gives, and for no others.
    """
    quantized, scale = quantize_blockwise(weight)
    return [(name, quantized), (name + SCALE_SUFFIX, scale)]


def blockwise_quantization_config(weight_map: WeightMap) -> dict[str, Any]:
    """config.json's ``quantization_config``: the scheme, and the linear layers that stay as they are."""
    kept = {
        name.removesuffix(".weight")
        for mapping in weight_map
        if mapping.layer is not None and len(mapping.mcore_shape) == 2 and not is_quantized(mapping)
        for name in mapping.hf_names
    }
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [weight_map.output_name.removesuffix(".weight"), *sorted(kept)],
    }
