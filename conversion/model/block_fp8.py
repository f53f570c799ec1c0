"""Block-FP8: DeepSeek-V3's scheme (arXiv:2412.19437, section 3.3.2), and the weights that it holds for.

e4m3 weights with one float32 scale for each 128 x 128 block; activations are quantised by the engine as it runs. SGLang
and transformers read it. Export, weight sync, engines and ``--verify`` all ask here which weights are concerned:

    linear      the matrices of linear layers: what FP8 serving computes in FP8, and what an imitation of it rounds
    quantized   those of them that are stored in FP8: both sides are multiples of 128

The other linear layers keep their dtype and are listed in ``blockwise_quantization_config``.

Scales are those of Transformer Engine's blockwise recipe, in two kinds: any float32, or powers of two
alone. ``has_power_of_two_scales`` says which a GPU's kernels take, for the learner's layers, engines' weights, what
imitates them and exported checkpoints alike, so that FP8 learners and FP8 engines compute with the same e4m3 numbers.

The numbers are the same in both ``FORMS``; what the scales are called, and what config.json says, is the form's. The
family declares the one that SGLang's class of the model loads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from conversion.model.low_precision import MERGED_BY_ENGINES
from conversion.model.mapping import Mapping as WeightMapping
from conversion.model.stacked import tensor_of
from conversion.model.weight_map import WeightMap
from megatron_retool.errors import InputError

if TYPE_CHECKING:  # the checks of a model's directory import this module, and torch takes seconds
    import torch
    from torch import Tensor

BLOCK = 128
E4M3_MAX = 448.0


@dataclass(frozen=True)
class Form:
    """How a block-FP8 checkpoint is written down.

    Attributes:
        suffix: a weight's scales carry its name with this suffix, as in ``….q_proj.weight_scale_inv``.
        describe: names of the modules that stay as they are -> config.json's ``quantization_config``.
    """

    suffix: str
    describe: Callable[[Sequence[str]], dict[str, Any]]


def _describe_fp8(kept: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": list(kept),
    }


def _describe_compressed_tensors(kept: Sequence[str]) -> dict[str, Any]:
    # SGLang looks modules up under the names of its own merged ones too.
    parts = [name.rpartition(".") for name in kept]
    merged = {f"{path}.{MERGED_BY_ENGINES[last]}" for path, _, last in parts if last in MERGED_BY_ENGINES}
    float8 = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**float8, "strategy": "block", "block_structure": [BLOCK, BLOCK], "dynamic": False},
                "input_activations": {**float8, "strategy": "group", "group_size": BLOCK, "dynamic": True},
            }
        },
        "ignore": [*kept, *sorted(merged)],
    }


FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "fp8": Form("_scale_inv", _describe_fp8),
        "compressed-tensors": Form("_scale", _describe_compressed_tensors),
    }
)
"""By quant_method: DeepSeek's own, and compressed-tensors' float-quantized with the strategy "block"."""
SCALE_SUFFIXES = tuple(form.suffix for form in FORMS.values())


def form_of(weight_map: WeightMap) -> Form:
    """The form that the model's family is written in."""
    return FORMS[weight_map.architecture.declaration.block_fp8]


def is_linear(mapping: WeightMapping) -> bool:
    """Whether the parameter is the matrix of a linear layer: not embedding, router, output layer, norm or bias, nor one
    of several experts in one tensor, which the scheme does not know."""
    return (
        not mapping.is_stacked
        and mapping.tp_dim is not None
        and mapping.layer is not None
        and len(mapping.mcore_shape) == 2
    )


def is_quantized(mapping: WeightMapping) -> bool:
    """Whether a checkpoint of the scheme, and an engine that serves it, holds the parameter in FP8.

    Both sides of every matrix have to be multiples of 128: transformers takes the block size from the ratio of the
    shapes and would otherwise scale with the wrong blocks, and SGLang refuses layers that it merges (q, k, v; gate, up)
    or splits over ranks. Matrices that Megatron-Core merges are quantised together or not at all, as engines want it.
    """
    return is_linear(mapping) and all(size % BLOCK == 0 for shape in mapping.hf_shapes for size in shape)


def linear_names(weight_map: WeightMap) -> frozenset[str]:
    """Hugging Face names of the matrices of linear layers, whatever their sizes.

    Raises:
        ValueError: experts lie in one tensor.
    """
    _refuse_stacks(weight_map)
    return frozenset(name for mapping in weight_map if is_linear(mapping) for name in mapping.hf_names)


def _refuse_stacks(weight_map: WeightMap) -> None:
    stacked = next((mapping for mapping in weight_map if mapping.is_stacked), None)
    if stacked is not None:
        raise InputError(
            f"{tensor_of(stacked.hf_names[0])} holds all experts of a layer: the experts of a "
            f"{weight_map.architecture.family} model are neither quantised nor rounded"
        )


def quantized_names(weight_map: WeightMap) -> frozenset[str]:
    """Hugging Face names of the weights that the scheme quantises.

    Raises:
        ValueError: none, because the model's sizes are not multiples of 128; or experts lie in one tensor.
    """
    _refuse_stacks(weight_map)
    names = frozenset(name for mapping in weight_map if is_quantized(mapping) for name in mapping.hf_names)
    if not names:
        architecture = weight_map.architecture
        raise InputError(
            f"no linear layer can be quantised in {BLOCK} x {BLOCK} blocks: hidden_size={architecture.hidden_size} and "
            f"the other sizes of this {architecture.family} model are not multiples of {BLOCK}"
        )
    return names


def has_power_of_two_scales(capability: tuple[int, int] | None) -> bool:
    """Whether FP8 kernels of a GPU of this compute capability take only block scales that are powers of two.

    From Blackwell (10.0) on tensor cores multiply with scales that have an exponent and nothing else: Transformer
    Engine and SGLang then make such scales. Hopper's kernels take any float32, which loses less. None: no GPU.
    """
    return capability is not None and capability >= (10, 0)


SCALES = ("auto", "float32", "power_of_two")
"""Kinds of scales that a setting or an option asks for; auto: by the GPU."""


def takes_power_of_two(kind: str, device: torch.device) -> bool:
    """Whether block scales are to be powers of two, for weights that a user of ``device`` computes with.

    Args:
        kind: of SCALES; auto: ``has_power_of_two_scales`` of the GPU, and float32 without one.
    """
    import torch

    if kind != "auto":
        return kind == "power_of_two"
    return has_power_of_two_scales(torch.cuda.get_device_capability(device) if device.type == "cuda" else None)


def are_powers_of_two(scales: Tensor) -> bool:
    """Whether all of some positive float32 scales are."""
    import torch

    return bool((torch.frexp(scales).mantissa == 0.5).all())


def block_scales(largest: Tensor, *, power_of_two: bool = False) -> Tensor:
    """What each block is multiplied with before it is rounded to e4m3, as Transformer Engine computes it.

    Args:
        largest: float32, the largest magnitude of each block.
        power_of_two: take the next power of two below.

    Returns:
        float32 of the same shape: 448 / largest, and 1 where a block is all zero.
    """
    import torch

    # A number over a tensor would be the number times the reciprocal, which is rounded twice.
    scale = torch.div(torch.tensor(E4M3_MAX), largest).clamp_max_(torch.finfo(torch.float32).max)
    if power_of_two:
        scale = torch.ldexp(torch.ones_like(scale), torch.frexp(scale).exponent - 1)
    return torch.where(largest > 0, scale, torch.ones_like(scale))


def quantize_blockwise(weight: Tensor, block: int = BLOCK, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise a matrix in blocks of ``block`` x ``block``; blocks at the edges may be smaller.

    Args:
        weight: [out, in], any floating dtype.
        power_of_two: scales that are powers of two (see ``has_power_of_two_scales``).

    Returns:
        (quantised float8_e4m3fn [out, in], scale float32 [ceil(out / block), ceil(in / block)]) with
        ``weight = quantised * scale``, block by block: the scale is the block's largest magnitude / 448, or the next
        power of two above it. An all-zero block has scale 1.
    """
    import torch

    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % block, 0, -rows % block))
    blocks = padded.view(padded.shape[0] // block, block, padded.shape[1] // block, block)
    largest = blocks.abs().amax(dim=(1, 3))
    scale = block_scales(largest, power_of_two=power_of_two)
    # Rounding in the product may land a hair above 448, which e4m3fn turns into NaN.
    scaled = (blocks * scale[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX)
    quantized = scaled.view(padded.shape)[:rows, :columns].to(torch.float8_e4m3fn).contiguous()
    return quantized, scale.reciprocal_()


def dequantize_blockwise(quantized: Tensor, scale: Tensor, block: int = BLOCK, *, first_row: int = 0) -> Tensor:
    """The float32 matrix that ``quantize_blockwise``'s result stands for.

    Args:
        first_row: of a part of its rows: how many rows of their first block lie before them.
    """
    rows, columns = quantized.shape
    by_row = scale.repeat_interleave(block, 0)[first_row : first_row + rows]
    return quantized.float() * by_row.repeat_interleave(block, 1)[:, :columns]


def round_to_blocks(weight: Tensor, *, power_of_two: bool = False) -> Tensor:
    """What is left of a matrix after ``quantize_blockwise``, in its own dtype: for the names of ``linear_names``."""
    return dequantize_blockwise(*quantize_blockwise(weight, power_of_two=power_of_two)).to(weight.dtype)


def quantize_named(name: str, weight: Tensor, form: Form, *, power_of_two: bool = False) -> list[tuple[str, Tensor]]:
    """``quantize_blockwise`` under the names of a block-FP8 checkpoint of a form.

    At a weight sync: for the names that ``quantized_names`` gives, and for no others.
    """
    quantized, scale = quantize_blockwise(weight, power_of_two=power_of_two)
    return [(name, quantized), (name + form.suffix, scale)]


def blockwise_quantization_config(weight_map: WeightMap) -> dict[str, Any]:
    """config.json's ``quantization_config``: the scheme, and the linear layers that stay as they are."""
    kept = {
        name.removesuffix(".weight")
        for mapping in weight_map
        if mapping.layer is not None and len(mapping.mcore_shape) == 2 and not is_quantized(mapping)
        for name in mapping.hf_names
    }
    return form_of(weight_map).describe([weight_map.output_name.removesuffix(".weight"), *sorted(kept)])
