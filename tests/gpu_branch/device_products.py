"""Transformer Engine's norms and matrix products on the device that is not there, in FP8 as well.

Everything between them is its own Python: which operand is quantised when and in which direction, what a layer keeps
for its backward pass, which copies of weights it holds, what tensor parallelism gathers. Torch rounds and multiplies:
quantised operands are read back and multiplied in float32, as tensor cores sum in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from tests.gpu_branch.fake_device import HOST, kernel

BLOCK = 128
"""Numbers that share a scale in the recipe blockwise."""
SHARED = 32
"""And in mxfp8."""


def _dtype(number: Any) -> torch.dtype:
    """torch's, of the number that Transformer Engine gives its kernels."""
    from transformer_engine.pytorch.constants import DType, TE_DType_To_Torch

    return number if isinstance(number, torch.dtype) else TE_DType_To_Torch[DType.cast(number)]


def install() -> None:
    """Once Transformer Engine is imported: its quantised tensors keep no memory of their own, and torch makes such a
    wrapper only for a device that is there. Their parts say where they are."""
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensor

    make = QuantizedTensor.__new__

    def make_on_host(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return make(cls, *args, **{**kwargs, "device": HOST})

    QuantizedTensor.__new__ = make_on_host
    gather = ProcessGroup.all_gather_single_coalesced
    ProcessGroup.all_gather_single_coalesced = lambda group, outputs, inputs, *options: _Works(
        [gather(group, [to], [own], *options) for to, own in zip(outputs, inputs, strict=True)]
    )
    ProcessGroup._start_coalescing = lambda group, device: None
    ProcessGroup._end_coalescing = lambda group, device: _Works([])  # type: ignore[return-value]


class _Works:
    """What gloo gathers one by one: together it joins tensors of several dtypes into one of them, without a word."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


# --- rounding ---------------------------------------------------------------------------------------------------------


def _scales_of(amax: Tensor, dtype: torch.dtype, quantizer: Any) -> Tensor:
    return _scale(amax, torch.finfo(dtype).max, quantizer.amax_epsilon, quantizer.force_pow_2_scales)


def _scale(amax: Tensor, largest: float, epsilon: float, powers_of_two: bool) -> Tensor:
    """Of each largest magnitude the factor that brings it to ``largest``."""
    amax = amax.float().clamp(min=epsilon)
    scale = torch.where(amax > 0, largest / amax, torch.ones_like(amax))
    scale = torch.where(torch.isfinite(scale), scale, torch.full_like(scale, torch.finfo(torch.float32).max))
    if powers_of_two:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return scale


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype).view(torch.uint8)


@kernel
def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    if noop is not None and float(noop):
        return output
    target = _empty(quantizer, tensor.shape, tensor.dtype) if output is None else output
    with torch.no_grad():
        rows = tensor.detach().reshape(-1, tensor.size(-1))
        if isinstance(quantizer, Float8CurrentScalingQuantizer):
            _by_tensor(rows, quantizer, target)
        elif isinstance(quantizer, Float8Quantizer):  # with a scale that is given, for a piece of a weight
            dtype = _dtype(quantizer.dtype)
            target._data.copy_(_round(rows.float() * quantizer.scale, dtype).view(target._data.shape))
        elif isinstance(quantizer, Float8BlockQuantizer):
            _by_block(rows, quantizer, target)
        elif isinstance(quantizer, MXFP8Quantizer):
            _by_powers(rows, quantizer, target)
        elif isinstance(quantizer, NVFP4Quantizer):
            _by_sixteen(rows, quantizer, target)
        else:
            raise AssertionError(f"{type(quantizer).__name__} is not imitated")
    return target


def _empty(quantizer: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """A quantised tensor, or the storage of one where the quantiser is internal to a layer."""
    metadata = quantizer.storage_metadata(dtype)
    cls, options = metadata["cls"], metadata["nontensor_kwargs"]
    whole = quantizer.inner_tensor_specs(tuple(shape))
    of_rows = quantizer.inner_tensor_specs((math.prod(shape[:-1]), shape[-1]))
    inner = {
        # A copy by columns has two dimensions, of which four bits halve the last.
        name: torch.empty((of_rows if name == "_columnwise_data" else whole)[name][0], dtype=inner_dtype, device="cuda")
        for name, (_, inner_dtype) in whole.items()
    }
    arguments = {keyword: inner.get(name) for name, keyword in cls._INNER_TENSORS}
    if quantizer.internal:
        return cls(**arguments, **options)
    return cls(shape=tuple(shape), dtype=dtype, **arguments, **options)


@kernel
def create_empty(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any, pinned: bool) -> Any:
    return _empty(quantizer, shape, dtype)


def _by_tensor(rows: Tensor, quantizer: Any, target: Any) -> None:
    dtype = _dtype(quantizer.dtype)
    amax = rows.abs().amax() if rows.numel() else rows.new_zeros(())
    amax = amax.float()
    if quantizer.with_amax_reduction:
        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=quantizer.amax_reduction_group)
    scale = _scales_of(amax, dtype, quantizer)
    data = _round(rows.float() * scale, dtype)
    target._scale_inv.fill_(1 / scale)
    if target._data is not None:
        target._data.copy_(data.view(target._data.shape))
    if target._transpose is not None:
        target._transpose.copy_(data.t().reshape(target._transpose.shape))
        target._transpose_invalid = False


def _by_block(rows: Tensor, quantizer: Any, target: Any) -> None:
    dtype = _dtype(quantizer.dtype)
    for direction, data, scales in (
        (rows, target._rowwise_data, target._rowwise_scale_inv),
        (rows.t(), target._columnwise_data, target._columnwise_scale_inv),
    ):
        if data is None:
            continue
        high = BLOCK if quantizer.block_scaling_dim == 2 else 1
        padded = F.pad(direction.float(), (0, -direction.size(1) % BLOCK, 0, -direction.size(0) % high))
        tiles = padded.view(padded.size(0) // high, high, padded.size(1) // BLOCK, BLOCK)
        scale = _scales_of(tiles.abs().amax((1, 3)), dtype, quantizer)
        rounded = _round((tiles * scale[:, None, :, None]).view(padded.shape), dtype)
        data.copy_(rounded[: direction.size(0), : direction.size(1)].reshape(data.shape))
        inverse = 1 / scale if high == BLOCK else (1 / scale).t()
        scales.zero_()
        scales[: inverse.size(0), : inverse.size(1)].copy_(inverse)


def _by_powers(rows: Tensor, quantizer: Any, target: Any) -> None:
    """MXFP8: 32 numbers in a row, or in a column, share a power of two that is kept as its exponent."""
    dtype = _dtype(quantizer.dtype)
    for turn, data, scales in (
        (False, target._rowwise_data, target._rowwise_scale_inv),
        (True, target._columnwise_data, target._columnwise_scale_inv),
    ):
        if data is None:
            continue
        direction = (rows.t() if turn else rows).float()
        tiles = direction.reshape(direction.size(0), -1, SHARED)
        amax = tiles.abs().amax(-1)
        exponent = torch.ceil(torch.log2(amax / torch.finfo(dtype).max)).clamp(-127, 127)
        exponent = torch.where(amax > 0, exponent, torch.full_like(exponent, -127))
        rounded = _round((tiles * torch.exp2(-exponent)[..., None]).view(direction.shape), dtype)
        exponent = (exponent + 127).to(torch.uint8)
        if turn:
            rounded, exponent = rounded.t(), exponent.t()
        data.copy_(rounded.reshape(data.shape))
        scales.zero_()
        scales[: exponent.size(0), : exponent.size(1)].copy_(exponent)


def _of_powers(data: Tensor, scales: Tensor, dtype: torch.dtype, columnwise: bool) -> Tensor:
    rows = data.reshape(-1, data.size(-1)).view(dtype).float()
    count = (rows.size(0) // SHARED, rows.size(1)) if columnwise else (rows.size(0), rows.size(1) // SHARED)
    factors = torch.exp2(scales[: count[0], : count[1]].float() - 127)
    return rows * factors.repeat_interleave(SHARED, 0 if columnwise else 1)


_FOUR_BITS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _by_sixteen(rows: Tensor, quantizer: Any, target: Any) -> None:
    """NVFP4: 16 numbers share a scale in e4m3, 16 x 16 of a weight, and all of them one in float32."""
    for turn, data, scales, amax in (
        (False, target._rowwise_data, target._rowwise_scale_inv, target._amax_rowwise),
        (True, target._columnwise_data, target._columnwise_scale_inv, target._amax_columnwise),
    ):
        if data is None or not rows.numel():
            continue
        direction = (rows.t() if turn else rows).float()
        if turn and quantizer.with_rht:
            mixed = direction.reshape(direction.size(0), -1, 16) @ quantizer.rht_matrix.float()
            direction = mixed.reshape(direction.shape)
        amax.fill_(direction.abs().amax())
        if quantizer.with_amax_reduction:
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=quantizer.amax_reduction_group)
        high = 16 if quantizer.with_2d_quantization else 1
        tiles = direction.reshape(direction.size(0) // high, high, direction.size(1) // 16, 16)
        own = _scales_of_sixteen(tiles.abs().amax((1, 3)), amax)
        each = own.float().repeat_interleave(high, 0)[..., None]
        shares = direction.reshape(*each.shape[:2], 16) * _whole_scale(amax) / torch.where(each > 0, each, 1.0)
        code = _four_bits(shares, at_random=quantizer.stochastic_rounding).view(direction.shape)
        data.copy_(_packed(code).reshape(data.shape))
        scales.zero_()
        scales[: direction.size(0), : own.size(1)].copy_(own.view(torch.uint8).repeat_interleave(high, 0))


def _whole_scale(amax: Tensor) -> Tensor:
    """What brings the largest of all numbers to the largest that both scales and four bits hold together."""
    return torch.where(amax > 0, 6 * 448 / amax, torch.ones_like(amax))


def _scales_of_sixteen(magnitudes: Tensor, amax: Tensor) -> Tensor:
    return (magnitudes / 6 * _whole_scale(amax)).clamp(max=448).to(torch.float8_e4m3fn)


def _four_bits(shares: Tensor, at_random: bool) -> Tensor:
    """The nearest of the 16 numbers in e2m1, or either neighbour by a chance that keeps the mean."""
    size = shares.abs().clamp(max=6)
    if at_random:
        below = (torch.bucketize(size, _FOUR_BITS, right=True) - 1).clamp(max=6)
        low, high = _FOUR_BITS[below], _FOUR_BITS[below + 1]
        code = below + (torch.rand_like(size) < (size - low) / (high - low))
    else:
        code = torch.bucketize(size, (_FOUR_BITS[1:] + _FOUR_BITS[:-1]) / 2)
    return (code + 8 * (shares < 0)).to(torch.uint8)


def _packed(code: Tensor) -> Tensor:
    """Two neighbours in a byte, the first in its lower half."""
    return code[..., ::2] | code[..., 1::2] << 4


def _unpacked(packed: Tensor) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def _of_sixteen(data: Tensor, scales: Tensor, amax: Tensor) -> Tensor:
    packed = data.reshape(-1, data.size(-1)) if data.dim() == 2 else data.reshape(data.size(0), -1)
    code = _unpacked(packed).long()
    values = _FOUR_BITS[code & 7] * (1 - 2 * (code >> 3))
    own = scales[: values.size(0), : values.size(1) // 16].contiguous().view(torch.float8_e4m3fn).float()
    return values * own.repeat_interleave(16, 1) / _whole_scale(amax)


@kernel
def dequantize(tensor: Any, dtype: Any) -> Tensor:
    return _read(tensor, columnwise=not _holds(tensor, columnwise=False)).to(_dtype(dtype)).view(tensor.size())


def _is_plain(operand: Any) -> bool:
    return isinstance(operand, Tensor) and not hasattr(operand, "_quantizer")


def _holds(operand: Any, columnwise: bool) -> bool:
    """Whether a quantised operand has the copy of its rows, or of its columns."""
    kind = "columnwise" if columnwise else "rowwise"
    if hasattr(operand, f"_{kind}_data"):
        return getattr(operand, f"_{kind}_data") is not None
    return bool(operand.get_usages()[kind])


def _read(operand: Any, columnwise: bool) -> Tensor:
    """The numbers of one of a quantised operand's copies, in float32 and two dimensions; of rows or of columns."""
    from transformer_engine.pytorch.tensor.storage import mxfp8_tensor_storage, nvfp4_tensor_storage

    if isinstance(operand, nvfp4_tensor_storage.NVFP4TensorStorage):
        kind = "columnwise" if columnwise else "rowwise"
        parts = (getattr(operand, name) for name in (f"_{kind}_data", f"_{kind}_scale_inv", f"_amax_{kind}"))
        found = _of_sixteen(*parts)
        return found.t() if columnwise else found
    dtype = _dtype(operand._fp8_dtype)
    if isinstance(operand, mxfp8_tensor_storage.MXFP8TensorStorage):
        kind = "columnwise" if columnwise else "rowwise"
        data, scales = (getattr(operand, f"_{kind}_{part}") for part in ("data", "scale_inv"))
        return _of_powers(data, scales, dtype, columnwise)
    if not hasattr(operand, "_scale_inv"):
        metadata = operand.get_metadata()
        metadata |= dict.fromkeys([name for name in metadata if name.startswith("row" if columnwise else "column")])
        found = (
            type(operand).__mro__[1 if isinstance(operand, Tensor) else 0](**metadata).dequantize(dtype=torch.float32)
        )
        return found.reshape(-1, found.size(-1))
    if columnwise and operand._transpose is not None:
        turned = operand._transpose
        return (turned.view(dtype).float() * operand._scale_inv).reshape(turned.size(0), -1).t()
    return operand._data.reshape(-1, operand._data.size(-1)).view(dtype).float() * operand._scale_inv


@kernel
def transpose(data: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    turned = data.reshape(-1, data.size(-1)).t().contiguous().view(data.size(-1), *data.shape[:-1])
    return turned if out is None else out.copy_(turned)


@kernel
def swap_first_two(x: Tensor, out: Tensor | None = None) -> Tensor:
    turned = x.transpose(0, 1).contiguous()
    return turned if out is None else out.copy_(turned)


@kernel
def bias_gradient_and_quantize(gradient: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    return gradient.reshape(-1, gradient.size(-1)).sum(0), quantize(gradient, quantizer)


@kernel
def split_quantize(
    tensor: Tensor, sizes: Sequence[int], quantizers: Sequence[Any], *, disable_bulk_allocation: bool = False
) -> list[Any]:
    return [quantize(part, each) for part, each in zip(tensor.split(list(sizes)), quantizers, strict=True)]


# --- weights that are kept in FP8, of which a rank rounds a piece -----------------------------------------------------


@kernel
def largest_magnitude(x: Tensor, amax: Tensor) -> None:
    amax.copy_(x.abs().amax().float().view(amax.shape))


@kernel
def scales_of_magnitudes(
    chunk: int, overflow: Tensor, lists: list[list[Tensor]], largest: float, powers_of_two: bool, epsilon: float
) -> None:
    for amax, scale, inverse in zip(*lists, strict=True):
        scale.copy_(_scale(amax, largest, epsilon, powers_of_two))
        inverse.copy_(1 / scale)


def _blocks_of(start: int, count: int, width: int, block: int) -> tuple[Tensor, Tensor]:
    """The block of a matrix of that width, by row and column, of each of ``count`` numbers from the place ``start``."""
    places = torch.arange(start, start + count)
    return places // width // block, places % width // block


@kernel
def magnitudes_of_blocks(piece: Tensor, amax: Tensor, height: int, width: int, start: int, block: int) -> None:
    rows, columns = _blocks_of(start, piece.numel(), width, block)
    flat = rows * amax.size(1) + columns
    amax.view(-1).scatter_reduce_(0, flat, piece.abs().float().view(-1), "amax")


@kernel
def round_piece(
    piece: Tensor, out: Tensor, scale: Tensor, height: int, width: int, start: int, block: int, dtype: Any
) -> None:
    rows, columns = _blocks_of(start, piece.numel(), width, block)
    out.copy_(_round(piece.float().view(-1) * scale[rows, columns], _dtype(dtype)).view(out.shape))


@kernel
def magnitudes_of_sixteen(
    pieces: list[Tensor], tiles: list[Tensor], wholes: list[Tensor], heights: Any, widths: Any, starts: Any, block: int
) -> None:
    for piece, amax, whole, height, width, start in zip(pieces, tiles, wholes, heights, widths, starts, strict=True):
        magnitudes_of_blocks(piece, amax, height, width, start, block)
        whole.copy_(torch.maximum(whole, piece.abs().amax().float().view(1)))


@kernel
def whole_scales(amaxes: Tensor, scales: Tensor) -> None:
    scales.copy_(_whole_scale(amaxes))


@kernel
def scales_of_tiles(
    magnitudes: list[Tensor],
    amaxes: list[Tensor],
    decoded: list[Tensor],
    targets: list[Tensor],
    target_amaxes: list[Tensor],
    *_: Any,
) -> None:
    for tile, amax, own, target, whole in zip(magnitudes, amaxes, decoded, targets, target_amaxes, strict=True):
        scale = _scales_of_sixteen(tile, amax)
        own.copy_(scale.float())
        whole.copy_(amax.view(whole.shape))
        rows = scale.view(torch.uint8).repeat_interleave(16, 0)
        target.zero_()
        target[: rows.size(0), : rows.size(1)].copy_(rows)


@kernel
def round_pieces_to_four_bits(
    pieces: list[Tensor], outs: list[Tensor], scales: list[Tensor], wholes: list[Tensor], *places: Any
) -> None:
    _, widths, starts, block = places
    for piece, out, scale, whole, width, start in zip(pieces, outs, scales, wholes, widths, starts, strict=True):
        assert start % 2 == 0 and piece.numel() % 2 == 0, "a piece begins in the middle of a byte"
        rows, columns = _blocks_of(start, piece.numel(), width, block)
        own = scale[rows, columns]
        code = _four_bits(piece.float().view(-1) * whole / torch.where(own > 0, own, 1.0), at_random=False)
        out.copy_(_packed(code))


@kernel
def transpose_four_bits(
    rows: list[Tensor], columns: list[Tensor], scales: list[Tensor], turned: list[Tensor], heights: Any, widths: Any
) -> None:
    for data, out, own, other, height, width in zip(rows, columns, scales, turned, heights, widths, strict=True):
        out.copy_(_packed(_unpacked(data.reshape(height, width // 2)).t()).reshape(out.shape))
        tiles = own[:height:16, : width // 16]
        other.zero_()
        other[:width, : height // 16].copy_(tiles.t().repeat_interleave(16, 0))


# --- products ---------------------------------------------------------------------------------------------------------


def _direction(operand: Any, columnwise: bool) -> Tensor:
    """An operand's numbers as the product reads them: the copy whose scales run along what it sums over."""
    if _is_plain(operand):
        return operand.reshape(-1, operand.size(-1))
    assert _holds(operand, columnwise), f"the product needs a copy that is not there, columnwise={columnwise}"
    return _read(operand, columnwise)


def _product(a: Any, transa: bool, b: Any, transb: bool) -> Tensor:
    """cuBLAS's column-major order: b [rows, k] and a [columns, k] for TN, in float32 where operands are quantised."""
    left, right = _direction(b, transb), _direction(a, not transa)
    assert _is_plain(a) == _is_plain(b), "one operand is quantised and the other is not"
    return (left.t() if transb else left).float() @ (right.t() if transa else right).float()


@kernel
def product(
    a: Any,
    transa: bool,
    b: Any,
    transb: bool,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    **overlap: Any,
) -> tuple[Any, Tensor | None, None, None]:
    assert not gelu and quantizer is None
    with torch.no_grad():
        found = _product(a, transa, b, transb)
        bias_gradient = None
        if bias is not None and grad:
            bias_gradient = b.reshape(-1, b.size(-1)).sum(0).to(bias.dtype)
        elif bias is not None:
            found = found + bias.float()
        if out is None:
            shape = (*b.shape[:-1], found.size(-1)) if not transb else found.shape
            out = found.to(_dtype(out_dtype) if out_dtype is not None else b.dtype).view(shape)
        elif accumulate:
            out.add_(found.view(out.shape).to(out.dtype))
        else:
            out.copy_(found.view(out.shape))
    return out, bias_gradient, None, None


@kernel
def grouped_products(
    a: Sequence[Any],
    transa: bool,
    b: Sequence[Any],
    transb: bool,
    out: Sequence[Tensor],
    out_dtype: Any,
    sizes: Sequence[int] | None,
    biases: Sequence[Tensor],
    bias_dtype: Any,
    single_output: bool,
    gelu_inputs: Any,
    grad: bool,
    workspaces: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    sm_count: int,
) -> Sequence[Tensor]:
    targets = out[0].split(list(sizes)) if single_output else out
    with torch.no_grad():
        for left, right, target, bias in zip(a, b, targets, biases, strict=True):
            found = _product(left, transa, right, transb).view(target.shape)
            if bias.numel() and not grad:
                found = found + bias.float()
            if bias.numel() and grad:
                bias.copy_(right.sum(0))
            target.add_(found.to(target.dtype)) if accumulate else target.copy_(found)
    return biases


# --- norms ------------------------------------------------------------------------------------------------------------


@kernel
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, out: Any, quantizer: Any, dtype: Any, margin: int, zero_centered: bool
) -> tuple[Any, None, Tensor]:
    with torch.no_grad():
        rows = x.reshape(-1, x.size(-1)).float()
        rsigma = (rows.square().mean(-1) + eps).rsqrt()
        factor = weight.float() + (1 if zero_centered else 0)
        y = (rows * rsigma[:, None] * factor).to(_dtype(dtype)).view(x.shape)
    if quantizer is not None:
        return quantize(y, quantizer, out), None, rsigma
    return (y if out is None else out.copy_(y)), None, rsigma


@kernel
def rms_norm_backward(
    gradient: Tensor, x: Tensor, rsigma: Tensor, weight: Tensor, margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        rows, dy = x.reshape(-1, x.size(-1)).float(), gradient.reshape(-1, x.size(-1)).float()
        normed = rows * rsigma[:, None]
        weighted = dy * (weight.float() + (1 if zero_centered else 0))
        dx = rsigma[:, None] * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
        return dx.to(x.dtype).view(x.shape), (dy * normed).sum(0).to(weight.dtype)


EXTENSION = {
    "bgrad_quantize": bias_gradient_and_quantize,
    "compute_amax": largest_magnitude,
    "create_empty_quantized_tensor": create_empty,
    "dequantize": dequantize,
    "fp8_block_scaling_compute_partial_amax": magnitudes_of_blocks,
    "fp8_block_scaling_partial_cast": round_piece,
    "fp8_transpose": transpose,
    "generic_gemm": product,
    "get_num_cublas_streams": lambda: 1,
    "multi_tensor_compute_scale_and_scale_inv": scales_of_magnitudes,
    # Named beside the others when a norm is looked up, and not called.
    "layernorm_bwd": None,
    "layernorm_fwd": None,
    "nvfp4_2d_multi_tensor_transpose": transpose_four_bits,
    "nvfp4_compute_global_scale": whole_scales,
    "nvfp4_multi_tensor_2d_partial_cast": round_pieces_to_four_bits,
    "nvfp4_multi_tensor_compute_partial_amax": magnitudes_of_sixteen,
    "nvfp4_multi_tensor_fused_scale": scales_of_tiles,
    "quantize": quantize,
    "rmsnorm_bwd": rms_norm_backward,
    "rmsnorm_fwd": rms_norm,
    "split_quantize": split_quantize,
    "swap_first_dims": swap_first_two,
    "te_general_grouped_gemm": grouped_products,
}
