"""Transformer Engine on the device that is not there: torch in its kernels' place, its own FusedAdam above them."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.gpu_branch import device_products
from tests.gpu_branch.fake_device import kernel
from tests.learner.transformer_engine import kernels


def install(folder: Path) -> None:
    """Make Transformer Engine importable in this process, as on a GPU; before Megatron-Core is imported."""
    kernels.place_extension(folder, {**_EXTENSION, **device_products.EXTENSION})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformer_engine.pytorch as te

        import megatron_retool.learner.learner  # noqa: F401  so that the ranks need not import it
    device_products.install()
    kernels.compute_attention_with_torch()
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils

    for name, function in _OF_EXPERTS.items():
        setattr(moe_utils, name, function)
    for owner, name in ((te.DotProductAttention, "forward"), (rope_utils, "fused_apply_rotary_pos_emb_thd")):
        setattr(owner, name, kernel(getattr(owner, name)))


def install_exact() -> None:
    """The host's kernels in the place of those of ``exact.gpu_kernels``, which Triton would launch."""
    from megatron_retool.exact import kernels as of_host
    from megatron_retool.exact import operators

    def launched(name: str) -> Callable[..., None]:
        compiled = getattr(of_host, name)

        @kernel
        def on_host(*operands: Any) -> None:
            with torch._C.DisableTorchFunction():  # arrays of tensors that are said to be on the device
                compiled(*map(operators._array, operands))

        return on_host

    module = types.ModuleType("megatron_retool.exact.gpu_kernels")
    for name in EXACT:
        setattr(module, name, launched(name))
    sys.modules[module.__name__] = module
    sys.modules["megatron_retool.exact"].__dict__["gpu_kernels"] = module


EXACT = (
    "products",
    "normalized",
    "rotated",
    "attended",
    "gated",
    "gelu_gated",
    "sigmoids",
    "exponentials",
    "gates_of",
    "shares_of",
    "log_normalizers",
    "convolved",
    "rates",
    "delta_rule",
    "state_space",
)


# --- kernels of lists of tensors ------------------------------------------------------------------------------------


@kernel
def _adam(
    chunk: int,
    overflow: Tensor,
    lists: list[list[Tensor]],
    rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    *_: Any,
) -> None:
    """Gradients, parameters and both moments; mode 1 is AdamW."""
    for gradient, parameter, first, second in zip(*lists[:4], strict=True):
        gradient, weight = gradient.float(), parameter.float()
        if mode == 0:
            gradient = gradient + weight_decay * weight
        first.copy_(first.float() * beta1 + gradient * (1 - beta1))
        second.copy_(second.float() * beta2 + gradient.square() * (1 - beta2))
        corrections = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
        update = (first.float() / corrections[0]) / ((second.float() / corrections[1]).sqrt() + epsilon)
        if mode == 1:
            update = update + weight_decay * weight
        parameter.copy_(weight - rate * update)


@kernel
def _norm(
    chunk: int, overflow: Tensor, lists: list[list[Tensor]], per_tensor: bool = False, *_: Any
) -> tuple[Tensor, Tensor]:
    norm = torch.stack([each.float().norm() for each in lists[0]]).norm().reshape(1)
    return norm, norm.new_zeros(0)


@kernel
def _scale(chunk: int, overflow: Tensor, lists: list[list[Tensor]], factor: float, *_: Any) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * factor)


@kernel
def _adam_of_remainders(chunk: int, overflow: Tensor, lists: list[list[Tensor]], *settings: Any) -> None:
    """Of parameters in bfloat16 whose main parameters in float32 are they and 16 more bits, rounded to the nearest."""
    gradients, parameters, firsts, seconds, remainders = lists
    mains = []
    for parameter, remainder in zip(parameters, remainders, strict=True):
        high, low = parameter.view(torch.int16).int(), remainder.view(torch.int16).int()
        mains.append(((high - (low < 0).int()) << 16 | low & 0xFFFF).view(torch.float32))
    _adam(chunk, overflow, [gradients, mains, firsts, seconds], *settings)
    for main, parameter, remainder in zip(mains, parameters, remainders, strict=True):
        bits = main.view(torch.int32)
        low = bits.to(torch.int16)
        remainder.view(torch.int16).copy_(low)
        parameter.view(torch.int16).copy_((bits >> 16) + (low < 0).int())


@kernel
def _pad_rows(source: Tensor, target: Tensor, lengths: list[int], padded: list[int]) -> None:
    """Of each run of rows as many as both have; rows that only the target has are zeros."""
    target.zero_()
    for part, place in zip(source.split(lengths), target.split(padded), strict=True):
        count = min(len(part), len(place))
        place[:count].copy_(part[:count])


_EXTENSION = {
    "fused_multi_row_padding": _pad_rows,
    "fused_multi_row_unpadding": _pad_rows,
    "multi_tensor_adam": _adam,
    "multi_tensor_adam_param_remainder": _adam_of_remainders,
    "multi_tensor_l2norm": _norm,
    "multi_tensor_scale": _scale,
    "multi_tensor_scale_tensor": _scale,
}


# --- kernels of experts' tokens ---------------------------------------------------------------------------------------


@kernel
def _permute(tokens: Tensor, routing_map: Tensor, num_out_tokens: int) -> tuple[Tensor, Tensor]:
    """Tokens [t, h] in the order of their experts, and the token of each row."""
    from megatron.core.transformer.moe import moe_utils

    permuted, _, rows, _, _ = moe_utils.permute(tokens, routing_map, num_out_tokens=int(num_out_tokens))
    return permuted, rows


@kernel
def _permute_with_probs(
    tokens: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    from megatron.core.transformer.moe import moe_utils

    permuted, own, rows, _, _ = moe_utils.permute(tokens, routing_map, probs, num_out_tokens=int(num_out_tokens))
    return permuted, own, rows


@kernel
def _unpermute(
    tokens: Tensor, rows: Tensor, merging_probs: None, restore_shape: torch.Size, pad_offsets: None = None
) -> Tensor:
    from megatron.core.transformer.moe import moe_utils

    assert merging_probs is None and pad_offsets is None
    return moe_utils.unpermute(tokens, rows, restore_shape)


@kernel
def _sort_chunks(tokens: Tensor, split_sizes: Tensor, order: Tensor) -> Tensor:
    return torch.cat([tokens.split(split_sizes.tolist())[chunk] for chunk in order.tolist()])


@kernel
def _sort_chunks_with_probs(tokens: Tensor, probs: Tensor, split_sizes: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    sizes, chunks = split_sizes.tolist(), order.tolist()
    parts = tokens.split(sizes), probs.split(sizes)
    return torch.cat([parts[0][chunk] for chunk in chunks]), torch.cat([parts[1][chunk] for chunk in chunks])


@kernel
def _choose_experts(
    logits: Tensor, topk: int, use_pre_softmax: bool, expert_bias: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    from megatron.core.transformer.moe import moe_utils

    return moe_utils.topk_routing_with_score_function(
        logits, topk, use_pre_softmax=use_pre_softmax, expert_bias=expert_bias, **options
    )


_OF_EXPERTS = {
    "fused_permute": _permute,
    "fused_permute_with_probs": _permute_with_probs,
    "fused_unpermute": _unpermute,
    "fused_sort_chunks_by_index": _sort_chunks,
    "fused_sort_chunks_by_index_with_probs": _sort_chunks_with_probs,
    "fused_topk_with_score_function": _choose_experts,
}
