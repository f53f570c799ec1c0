"""Sums in one fixed order, compiled by numba: the arithmetic below ``operators.py``, on numpy arrays.

A row's result is the same bits whatever rows stand beside it, because every element is the same sequence of IEEE 754
operations: multiply-adds with one rounding (``fma``), additions, divisions and square roots. No kernel divides its work
by the number of rows, no compiler flag allows reordering, and the exponential is written out, since a vector library
may round the last elements of a loop otherwise than the first.

``LANES`` partial sums run side by side through each sum of products: element k belongs to lane k mod ``LANES``, and the
lanes are added in pairs at the end. Vector units of any width, or none, compute that order.

bfloat16 arrays arrive as uint16, the upper half of a float32. Every kernel computes in float32 and returns it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
"""No fastmath; divisions that cannot raise."""


def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    """``function``, compiled at its first call and kept on disk where there is room for it."""
    try:
        return njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # nowhere to keep what is compiled
        return njit(**_OPTIONS)(function)


_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_WORD = ir.IntType(32)
_INDEX = ir.IntType(64)


def _widened(builder: ir.IRBuilder, loaded: Any, shape: Any) -> Any:
    """float32 of what was loaded from a float32 or bfloat16 array."""
    if loaded.type != (ir.VectorType(ir.IntType(16), LANES) if isinstance(shape, ir.VectorType) else ir.IntType(16)):
        return loaded
    integers = ir.VectorType(_WORD, LANES) if isinstance(shape, ir.VectorType) else _WORD
    wide = builder.zext(loaded, integers)
    bits = ir.Constant(integers, [16] * LANES if isinstance(shape, ir.VectorType) else 16)
    return builder.bitcast(builder.shl(wide, bits), shape)


@intrinsic
def fma(typing_context, a, b, c):  # type: ignore[no-untyped-def]
    """a b + c, rounded once."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def bits_as_float(typing_context, bits):  # type: ignore[no-untyped-def]
    """The float32 of these 32 bits."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.bitcast(arguments[0], _FLOAT)

    return types.float32(types.int32), generate


@intrinsic
def element(typing_context, array, index):  # type: ignore[no-untyped-def]
    """float32 of a float32 or bfloat16 array's element, counted from its start."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return _widened(builder, builder.load(builder.gep(data, [arguments[1]])), _FLOAT)

    return types.float32(array, types.intp), generate


def _lanes_added(builder: ir.IRBuilder, sums: list[Any]) -> Any:
    """A vector with the sum of each vector's lanes, which are added in pairs: lane i and lane i + LANES / 2, and so on.

    Two vectors, whose halves are added, fit into one: that halves the work of each round.
    """
    width = LANES
    while width > 1:
        half, pairs = width // 2, [sums[first : first + 2] for first in range(0, len(sums), 2)]
        sums = []
        for pair in pairs:
            first, second = pair if len(pair) == 2 else (pair[0], ir.Constant(pair[0].type, ir.Undefined))
            starts = range(0, len(pair) * first.type.count, width)
            halves = [
                builder.shuffle_vector(
                    first,
                    second,
                    ir.Constant(
                        ir.VectorType(_WORD, half * len(starts)),
                        [start + offset + lane for start in starts for lane in range(half)],
                    ),
                )
                for offset in (0, half)
            ]
            sums.append(builder.fadd(*halves))
        width = half
    (added,) = sums
    return added


def _tile(rows: int, columns: int) -> Any:
    """An intrinsic that sums ``rows`` x ``columns`` products of two matrices' rows at a time."""

    @intrinsic
    def tile(typing_context, x, x_start, x_stride, w, w_start, w_stride, length):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            x_value, x_first, x_step, w_value, w_first, w_step, count = arguments
            arrays = [
                context.make_array(kind)(context, builder, value).data
                for kind, value in ((signature.args[0], x_value), (signature.args[3], w_value))
            ]
            firsts = ((rows, x_first, x_step), (columns, w_first, w_step))
            starts = [
                [
                    builder.gep(data, [builder.add(first, builder.mul(step, ir.Constant(_INDEX, each)))])
                    for each in range(number)
                ]
                for data, (number, first, step) in zip(arrays, firsts, strict=True)
            ]
            multiply_add = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{LANES}f32"
            )
            zero = ir.Constant(_VECTOR, [0.0] * LANES)
            sums = [cgutils.alloca_once_value(builder, zero) for _ in range(rows * columns)]

            def add(loaded: list[list[Any]]) -> None:
                for row, left in enumerate(loaded[0]):
                    for column, right in enumerate(loaded[1]):
                        place = sums[row * columns + column]
                        builder.store(builder.call(multiply_add, [left, right, builder.load(place)]), place)

            def load(pointer: Any, offset: Any, mask: Any = None) -> Any:
                place = builder.gep(pointer, [offset])
                kind = ir.VectorType(place.type.pointee, LANES)
                place = builder.bitcast(place, kind.as_pointer())
                if mask is None:
                    instruction = builder.load(place)
                    instruction.align = place.type.pointee.element.get_abi_size(context.target_data)
                    return _widened(builder, instruction, _VECTOR)
                element_type = kind.element
                suffix = "f32" if element_type == _FLOAT else "i16"
                arguments_type = [place.type, ir.IntType(32), mask.type, kind]
                function = cgutils.get_or_insert_function(
                    builder.module, ir.FunctionType(kind, arguments_type), f"llvm.masked.load.v{LANES}{suffix}.p0"
                )
                nothing = ir.Constant(kind, [0.0 if element_type == _FLOAT else 0] * LANES)
                align = ir.Constant(ir.IntType(32), element_type.get_abi_size(context.target_data))
                return _widened(builder, builder.call(function, [place, align, mask, nothing]), _VECTOR)

            lanes = ir.Constant(_INDEX, LANES)
            whole = builder.udiv(count, lanes)
            with cgutils.for_range(builder, whole) as loop:
                offset = builder.mul(loop.index, lanes)
                add([[load(pointer, offset) for pointer in side] for side in starts])
            done = builder.mul(whole, lanes)
            left_over = builder.sub(count, done)
            with builder.if_then(builder.icmp_signed(">", left_over, ir.Constant(_INDEX, 0))):
                places = ir.Constant(ir.VectorType(_INDEX, LANES), list(range(LANES)))
                many = ir.VectorType(_INDEX, LANES)
                first = builder.insert_element(ir.Constant(many, ir.Undefined), left_over, ir.Constant(_WORD, 0))
                spread = builder.shuffle_vector(
                    first, ir.Constant(many, ir.Undefined), ir.Constant(ir.VectorType(_WORD, LANES), [0] * LANES)
                )
                mask = builder.icmp_signed("<", places, spread)
                add([[load(pointer, done, mask) for pointer in side] for side in starts])
            added = _lanes_added(builder, [builder.load(place) for place in sums])
            found = [builder.extract_element(added, ir.Constant(_WORD, each)) for each in range(len(sums))]
            return context.make_tuple(builder, signature.return_type, found)

        index = types.intp
        return types.UniTuple(types.float32, rows * columns)(x, index, index, w, index, index, index), generate

    return tile


_tile_4x4 = _tile(4, 4)
_tile_1x4 = _tile(1, 4)
_tile_4x1 = _tile(4, 1)
_tile_1x1 = _tile(1, 1)


_BLOCK_ELEMENTS = 2**15
"""Of ``x`` in ``products``: 128 KB in float32."""


@_compiled
def products(x, w, out):  # type: ignore[no-untyped-def]
    """out[i, n] = sum over k of x[i, k] w[n, k]. ``x`` [rows, K], ``w`` [N, K], ``out`` float32 [rows, N]."""
    rows, length = x.shape
    columns = w.shape[0]
    whole_columns = columns - columns % 4
    # A block of x stays in the second cache while all of w passes, four columns of w in the first while the block does.
    block = max(4, _BLOCK_ELEMENTS // length // 4 * 4)
    for first in range(0, rows, block):
        end = min(first + block, rows)
        whole_end = end - (end - first) % 4
        for n in range(0, whole_columns, 4):
            for i in range(first, whole_end, 4):
                found = _tile_4x4(x, i * length, length, w, n * length, length, length)
                for row in range(4):
                    for column in range(4):
                        out[i + row, n + column] = found[row * 4 + column]
            for i in range(whole_end, end):
                found = _tile_1x4(x, i * length, length, w, n * length, length, length)
                for column in range(4):
                    out[i, n + column] = found[column]
        for n in range(whole_columns, columns):
            for i in range(first, whole_end, 4):
                found = _tile_4x1(x, i * length, length, w, n * length, length, length)
                for row in range(4):
                    out[i + row, n] = found[row]
            for i in range(whole_end, end):
                out[i, n] = _tile_1x1(x, i * length, length, w, n * length, length, length)[0]


_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(-0.693145751953125)
_LN2_LOW = np.float32(-1.4286068203094172e-06)
_TO_INTEGER = np.float32(12582912.0)
"""1.5 * 2^23: a float32 of that size has no digits behind the point."""
_SMALLEST = np.float32(-87.0)
_P0, _P1, _P2, _P3, _P4, _P5 = (
    np.float32(1.9875691500e-4),
    np.float32(1.3981999507e-3),
    np.float32(8.3334519073e-3),
    np.float32(4.1665795894e-2),
    np.float32(1.6666665459e-1),
    np.float32(5.0000001201e-1),
)
"""Cephes' polynomial (expf.c): exp(r) = 1 + r + r^2 P(r) for |r| <= ln 2 / 2, to 1 unit in the last place."""


@njit(inline="always", **_OPTIONS)
def exponential(x):  # type: ignore[no-untyped-def]
    """exp(x) for x <= 0 in float32; 0 below -87."""
    bounded = max(x, _SMALLEST)
    whole = fma(bounded, _LOG2_E, _TO_INTEGER) - _TO_INTEGER
    r = fma(whole, _LN2_LOW, fma(whole, _LN2_HIGH, bounded))
    p = fma(fma(fma(fma(fma(_P0, r, _P1), r, _P2), r, _P3), r, _P4), r, _P5)
    y = fma(p, r * r, r) + np.float32(1.0)
    scale = bits_as_float(np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)))
    return y * scale if x >= _SMALLEST else np.float32(0.0)


@njit(inline="always", **_OPTIONS)
def _sum_of_lanes(lanes):  # type: ignore[no-untyped-def]
    width = LANES
    while width > 1:
        width //= 2
        for lane in range(width):
            lanes[lane] = lanes[lane] + lanes[lane + width]
    return lanes[0]


@_compiled
def normalized(x, weight, eps, out):  # type: ignore[no-untyped-def]
    """RMSNorm of each row: out[i, k] = weight[k] (x[i, k] / sqrt(mean of x[i]^2 + eps))."""
    rows, length = x.shape
    for i in range(rows):
        squares = _tile_1x1(x, i * length, length, x, i * length, length, length)[0]
        scale = np.float32(1.0) / np.float32(math.sqrt(squares / np.float32(length) + eps))
        for k in range(length):
            out[i, k] = (element(x, i * length + k) * scale) * element(weight, k)


@_compiled
def rotated(x, cos, sin, out):  # type: ignore[no-untyped-def]
    """Rotary positions of the first features of each head, in halves: (a, b) -> (a cos - b sin, b cos + a sin).

    ``x`` [rows, heads, d], ``cos`` and ``sin`` float32 [rows, r / 2] for r rotated features; the others pass.
    """
    rows, heads, size = x.shape
    half = cos.shape[1]
    for i in range(rows):
        for head in range(heads):
            start = (i * heads + head) * size
            for k in range(half):
                a, b = element(x, start + k), element(x, start + half + k)
                out[i, head, k] = fma(-b, sin[i, k], a * cos[i, k])
                out[i, head, half + k] = fma(a, sin[i, k], b * cos[i, k])
            for k in range(2 * half, size):
                out[i, head, k] = element(x, start + k)


@_compiled
def attended(query, keys, values, slots, starts, counts, scale, out):  # type: ignore[no-untyped-def]
    """Softmax attention of each query over its own keys, in their order.

    ``query`` [rows, heads, d]; ``keys`` and ``values`` [places, groups, d]. Row i sees the keys at the places
    slots[starts[i]], ..., slots[starts[i] + counts[i] - 1]. ``out`` float32 [rows, heads, v], of the first v
    features of the values.
    """
    rows, heads, size = query.shape
    groups, stride, width = keys.shape[1], values.shape[2], out.shape[2]
    weights = np.empty(counts.max() if rows else 0, np.float32)
    lanes = np.empty(LANES, np.float32)
    for i in range(rows):
        first, count = starts[i], counts[i]
        for head in range(heads):
            group = head // (heads // groups)
            largest = np.float32(-np.inf)
            for j in range(count):
                place = (slots[first + j] * groups + group) * size
                score = _tile_1x1(query, (i * heads + head) * size, size, keys, place, size, size)[0] * scale
                weights[j] = score
                largest = max(largest, score)
            for lane in range(LANES):
                lanes[lane] = np.float32(0.0)
            for j in range(count):
                weights[j] = exponential(weights[j] - largest)
            for j in range(count):
                lanes[j % LANES] = lanes[j % LANES] + weights[j]
            total = _sum_of_lanes(lanes)
            for k in range(width):
                out[i, head, k] = np.float32(0.0)
            for j in range(count):
                weight, place = weights[j], (slots[first + j] * groups + group) * stride
                for k in range(width):
                    out[i, head, k] = fma(weight, element(values, place + k), out[i, head, k])
            for k in range(width):
                out[i, head, k] = out[i, head, k] / total


@_compiled
def gated(x, out):  # type: ignore[no-untyped-def]
    """SwiGLU of each row: silu of the first half times the second."""
    rows, length = x.shape
    half = length // 2
    one = np.float32(1.0)
    for i in range(rows):
        for k in range(half):
            gate, up = element(x, i * length + k), element(x, i * length + half + k)
            small = exponential(-abs(gate))
            # 1 / (1 + exp(-gate)), with the exponential of a negative number on both sides of 0.
            sigmoid = (one if gate >= np.float32(0.0) else small) / (one + small)
            out[i, k] = (gate * sigmoid) * up


@_compiled
def gates_of(logits, chosen, over_all, out):  # type: ignore[no-untyped-def]
    """Softmax of a router's logits, float32 [rows, experts], over each row's chosen experts or over all of them.

    ``out`` has it for the chosen ones, and 0 for the others.
    """
    rows, experts = logits.shape
    for i in range(rows):
        largest, total = np.float32(-np.inf), np.float32(0.0)
        for e in range(experts):
            if over_all or chosen[i, e]:
                largest = max(largest, logits[i, e])
        for e in range(experts):
            if over_all or chosen[i, e]:
                total = total + exponential(logits[i, e] - largest)
        for e in range(experts):
            out[i, e] = exponential(logits[i, e] - largest) / total if chosen[i, e] else np.float32(0.0)


@_compiled
def sigmoids(x, out):  # type: ignore[no-untyped-def]
    """Sigmoid of each element of float32 [rows, columns]."""
    one = np.float32(1.0)
    for i in range(x.shape[0]):
        for k in range(x.shape[1]):
            small = exponential(-abs(x[i, k]))
            out[i, k] = (one if x[i, k] >= np.float32(0.0) else small) / (one + small)


@_compiled
def shares_of(scores, chosen, out):  # type: ignore[no-untyped-def]
    """Each row's chosen scores, float32 [rows, experts], divided by their sum in the order of the experts; else 0."""
    rows, experts = scores.shape
    for i in range(rows):
        total = np.float32(0.0)
        for e in range(experts):
            if chosen[i, e]:
                total = total + scores[i, e]
        for e in range(experts):
            out[i, e] = scores[i, e] / (total + np.float32(1e-20)) if chosen[i, e] else np.float32(0.0)


@_compiled
def log_normalizers(logits, out):  # type: ignore[no-untyped-def]
    """Of each row of float32 logits: its largest, and the logarithm of the sum of exp(logit - largest)."""
    rows, length = logits.shape
    exponentials = np.empty(length, np.float32)
    lanes = np.empty(LANES, np.float32)
    for i in range(rows):
        largest = np.float32(-np.inf)
        for k in range(length):
            largest = max(largest, logits[i, k])
        for k in range(length):
            exponentials[k] = exponential(logits[i, k] - largest)
        for lane in range(LANES):
            lanes[lane] = np.float32(0.0)
        whole = length - length % LANES
        for k in range(0, whole, LANES):
            for lane in range(LANES):
                lanes[lane] = lanes[lane] + exponentials[k + lane]
        for k in range(whole, length):
            lanes[k - whole] = lanes[k - whole] + exponentials[k]
        out[i, 0] = largest
        out[i, 1] = np.float32(math.log(np.float64(_sum_of_lanes(lanes))))
