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


def _loaded(context: Any, builder: ir.IRBuilder, place: Any, mask: Any = None) -> Any:
    """float32 of ``LANES`` numbers from a pointer to the first one; where the mask is false 0, and nothing is read."""
    kind = ir.VectorType(place.type.pointee, LANES)
    align = place.type.pointee.get_abi_size(context.target_data)
    place = builder.bitcast(place, kind.as_pointer())
    if mask is None:
        instruction = builder.load(place)
        instruction.align = align
        return _widened(builder, instruction, _VECTOR)
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(kind, [place.type, _WORD, mask.type, kind]),
        f"llvm.masked.load.v{LANES}{'f32' if kind.element == _FLOAT else 'i16'}.p0",
    )
    nothing = ir.Constant(kind, [0.0 if kind.element == _FLOAT else 0] * LANES)
    return _widened(builder, builder.call(function, [place, ir.Constant(_WORD, align), mask, nothing]), _VECTOR)


def _spread(builder: ir.IRBuilder, number: Any) -> Any:
    """A vector with the number in every lane."""
    undefined = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(_WORD, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_WORD, LANES), [0] * LANES))


def _first_lanes(builder: ir.IRBuilder, count: Any) -> Any:
    """True in the first ``count`` lanes."""
    lanes = ir.Constant(ir.VectorType(_INDEX, LANES), list(range(LANES)))
    return builder.icmp_signed("<", lanes, _spread(builder, count))


def _fused(builder: ir.IRBuilder, a: Any, b: Any, c: Any) -> Any:
    """a b + c of vectors, rounded once."""
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32"), [a, b, c])


def _pointers(context: Any, builder: ir.IRBuilder, kind: Any, array: Any, starts: Any, number: int) -> list[Any]:
    """To an array's elements at the tuple ``starts``."""
    data = context.make_array(kind)(context, builder, array).data
    return [builder.gep(data, [builder.extract_value(starts, each)]) for each in range(number)]


@intrinsic
def dots(typing_context, x, x_starts, w, w_starts, length):  # type: ignore[no-untyped-def]
    """The dot products of ``length`` elements of ``x`` from each of ``x_starts`` on with those of ``w`` from each of
    ``w_starts`` on: a tuple, all of the first one's first. Starts are tuples of indices, counted from the beginning."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        x_value, x_firsts, w_value, w_firsts, count = arguments
        sides = (
            _pointers(context, builder, signature.args[0], x_value, x_firsts, x_starts.count),
            _pointers(context, builder, signature.args[2], w_value, w_firsts, w_starts.count),
        )
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        sums = [cgutils.alloca_once_value(builder, zero) for _ in range(x_starts.count * w_starts.count)]

        def add(offset: Any, mask: Any = None) -> None:
            left, right = (
                [_loaded(context, builder, builder.gep(pointer, [offset]), mask) for pointer in side] for side in sides
            )
            places = iter(sums)
            for one in left:
                for other in right:
                    place = next(places)
                    builder.store(_fused(builder, one, other, builder.load(place)), place)

        lanes = ir.Constant(_INDEX, LANES)
        whole = builder.udiv(count, lanes)
        with cgutils.for_range(builder, whole) as loop:
            add(builder.mul(loop.index, lanes))
        done = builder.mul(whole, lanes)
        left_over = builder.sub(count, done)
        with builder.if_then(builder.icmp_signed(">", left_over, ir.Constant(_INDEX, 0))):
            add(done, _first_lanes(builder, left_over))
        added = _lanes_added(builder, [builder.load(place) for place in sums])
        found = [builder.extract_element(added, ir.Constant(_WORD, each)) for each in range(len(sums))]
        return context.make_tuple(builder, signature.return_type, found)

    found = types.UniTuple(types.float32, x_starts.count * w_starts.count)
    return found(x, x_starts, w, w_starts, length), generate


@intrinsic
def add_weighted(typing_context, weights, values, slots, first, counts, step, start, left, out):  # type: ignore[no-untyped-def]
    """out[r] = the sum over j < counts[r], one after another, of weights[r, j] times ``LANES`` elements of ``values``
    from slots[first + j] step + start on, of which the first ``left`` are there; for each r of the tuple ``counts``,
    which ascends."""
    rows = counts.count

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        weight_array, value_array, slot_array, out_array = (
            context.make_array(signature.args[each])(context, builder, arguments[each]) for each in (0, 1, 2, 8)
        )
        first_slot, numbers, factor, offset, width = arguments[3:8]
        longest = cgutils.unpack_tuple(builder, weight_array.shape)[1]
        ends = cgutils.unpack_tuple(builder, numbers)
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        sums = [cgutils.alloca_once_value(builder, zero) for _ in range(rows)]

        def add(j: Any, taken: range, mask: Any) -> None:
            slot = builder.load(builder.gep(slot_array.data, [builder.add(first_slot, j)]))
            slot = builder.sext(slot, _INDEX) if slot.type.width < _INDEX.width else slot
            place = builder.gep(value_array.data, [builder.add(builder.mul(slot, factor), offset)])
            value = _loaded(context, builder, place, mask)
            for row in taken:
                index = builder.add(builder.mul(longest, ir.Constant(_INDEX, row)), j)
                weight = _spread(builder, builder.load(builder.gep(weight_array.data, [index])))
                builder.store(_fused(builder, weight, value, builder.load(sums[row])), sums[row])

        def add_all(mask: Any = None) -> None:
            with cgutils.for_range(builder, ends[0]) as loop:
                add(loop.index, range(rows), mask)
            for row in range(1, rows):
                with cgutils.for_range_slice(builder, ends[0], ends[row], ir.Constant(_INDEX, 1)) as (j, _):
                    add(j, range(row, row + 1), mask)

        with builder.if_else(builder.icmp_signed(">=", width, ir.Constant(_INDEX, LANES))) as (then, otherwise):
            with then:
                add_all()
            with otherwise:
                add_all(_first_lanes(builder, width))
        for row in range(rows):
            place = builder.gep(out_array.data, [ir.Constant(_INDEX, row * LANES)])
            store = builder.store(builder.load(sums[row]), builder.bitcast(place, _VECTOR.as_pointer()))
            store.align = 4
        return context.get_dummy_value()

    index = types.intp
    return types.void(weights, values, slots, index, counts, index, index, index, out), generate


_BLOCK_ELEMENTS = 2**15
"""Of ``x`` in ``products``: 128 KB in float32."""


@njit(inline="always", **_OPTIONS)
def _four(start, step):  # type: ignore[no-untyped-def]
    return (start, start + step, start + 2 * step, start + 3 * step)


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
            four_columns = _four(n * length, length)
            for i in range(first, whole_end, 4):
                found = dots(x, _four(i * length, length), w, four_columns, length)
                for row in range(4):
                    for column in range(4):
                        out[i + row, n + column] = found[row * 4 + column]
            for i in range(whole_end, end):
                found = dots(x, (i * length,), w, four_columns, length)
                for column in range(4):
                    out[i, n + column] = found[column]
        for n in range(whole_columns, columns):
            for i in range(first, whole_end, 4):
                found = dots(x, _four(i * length, length), w, (n * length,), length)
                for row in range(4):
                    out[i + row, n] = found[row]
            for i in range(whole_end, end):
                out[i, n] = dots(x, (i * length,), w, (n * length,), length)[0]


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
def _sigmoid(x):  # type: ignore[no-untyped-def]
    """1 / (1 + exp(-x)), with the exponential of a negative number on both sides of 0."""
    small = exponential(-abs(x))
    return (np.float32(1.0) if x >= np.float32(0.0) else small) / (np.float32(1.0) + small)


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
        squares = dots(x, (i * length,), x, (i * length,), length)[0]
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


@njit(**_OPTIONS)
def _attend(query, starts, keys, values, slots, first, counts, row, head, scale, weights, sums, out):  # type: ignore[no-untyped-def]
    """``attended`` for one head of the rows from ``row`` on, whose queries begin at ``starts`` and see ``counts`` keys.

    Both are tuples; the keys of a row begin with those of the row before. ``weights`` float32 [rows, largest count] and
    ``sums`` float32 [rows, LANES] are overwritten.
    """
    heads, size = query.shape[1], query.shape[2]
    groups, stride, width = keys.shape[1], values.shape[2], out.shape[2]
    group = head // (heads // groups)
    common = counts[0] - counts[0] % 4
    for j in range(0, common, 4):
        places = (
            (slots[first + j] * groups + group) * size,
            (slots[first + j + 1] * groups + group) * size,
            (slots[first + j + 2] * groups + group) * size,
            (slots[first + j + 3] * groups + group) * size,
        )
        found = dots(query, starts, keys, places, size)
        for each in range(len(counts)):
            for key in range(4):
                weights[each, j + key] = found[each * 4 + key] * scale
    for each in range(len(counts)):
        count = counts[each]
        for j in range(common, count):
            place = (slots[first + j] * groups + group) * size
            weights[each, j] = dots(query, (starts[each],), keys, (place,), size)[0] * scale
        largest = np.float32(-np.inf)
        for j in range(count):
            largest = max(largest, weights[each, j])
        for j in range(count):
            weights[each, j] = exponential(weights[each, j] - largest)
    for k in range(0, width, LANES):
        add_weighted(weights, values, slots, first, counts, groups * stride, group * stride + k, width - k, sums)
        for each in range(len(counts)):
            for lane in range(min(LANES, width - k)):
                out[row + each, head, k + lane] = sums[each, lane]
    lanes = sums[0]
    for each in range(len(counts)):
        for lane in range(LANES):
            lanes[lane] = np.float32(0.0)
        whole = counts[each] - counts[each] % LANES
        for j in range(0, whole, LANES):
            for lane in range(LANES):
                lanes[lane] = lanes[lane] + weights[each, j + lane]
        for j in range(whole, counts[each]):
            lanes[j - whole] = lanes[j - whole] + weights[each, j]
        total = _sum_of_lanes(lanes)
        for k in range(width):
            out[row + each, head, k] = out[row + each, head, k] / total


@_compiled
def attended(query, keys, values, slots, starts, counts, scale, out):  # type: ignore[no-untyped-def]
    """Softmax attention of each query over its own keys, in their order.

    ``query`` [rows, heads, d]; ``keys`` and ``values`` [places, groups, d]. Row i sees the keys at the places
    slots[starts[i]], ..., slots[starts[i] + counts[i] - 1]. ``out`` float32 [rows, heads, v], of the first v
    features of the values.
    """
    rows, heads, size = query.shape
    longest = counts.max() if rows else 0
    weights, sums = np.empty((4, longest), np.float32), np.empty((4, LANES), np.float32)
    row = 0
    while row < rows:
        first, together = starts[row], row + 3 < rows
        # Four neighbours of a text, each of which sees what the one before it sees, read their keys together.
        for each in range(row + 1, row + 4):
            together = together and starts[each] == first and counts[each] >= counts[each - 1]
        for head in range(heads):
            start = (row * heads + head) * size
            if together:
                four = _four(start, heads * size)
                seen = (counts[row], counts[row + 1], counts[row + 2], counts[row + 3])
                _attend(query, four, keys, values, slots, first, seen, row, head, scale, weights, sums, out)
            else:
                one, by_it = (start,), (counts[row],)
                _attend(query, one, keys, values, slots, first, by_it, row, head, scale, weights, sums, out)
        row += 4 if together else 1


@_compiled
def gated(x, out):  # type: ignore[no-untyped-def]
    """SwiGLU of each row: silu of the first half times the second."""
    rows, length = x.shape
    half = length // 2
    for i in range(rows):
        for k in range(half):
            gate, up = element(x, i * length + k), element(x, i * length + half + k)
            out[i, k] = (gate * _sigmoid(gate)) * up


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
    for i in range(x.shape[0]):
        for k in range(x.shape[1]):
            out[i, k] = _sigmoid(x[i, k])


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


@_compiled
def convolved(x, weight, out):  # type: ignore[no-untyped-def]
    """silu of each feature's weighted sum over its last tokens; the last weight is the present token's.

    ``x`` [batch, features, width - 1 + tokens], ``weight`` [features, width], ``out`` [batch, features, tokens].
    """
    batch, features, tokens = out.shape
    width = weight.shape[1]
    for line in range(batch * features):
        first, factors = line * (tokens + width - 1), line % features * width
        for token in range(tokens):
            total = np.float32(0.0)
            for place in range(width):
                total = fma(element(weight, factors + place), element(x, first + token + place), total)
            out[line // features, line % features, token] = total * _sigmoid(total)


@_compiled
def rates(steps, logits, log_factors, bias, log_decays, betas):  # type: ignore[no-untyped-def]
    """A delta net's log_decays = -exp(log_factors) softplus(steps + bias) and betas = sigmoid(logits), by head.

    ``log_factors`` and ``bias`` [heads], all others [tokens, heads]; the last two are filled.
    """
    heads = len(log_factors)
    for i in range(log_decays.shape[0]):
        for head in range(heads):
            x = np.float64(element(steps, i * heads + head) + element(bias, head))
            softplus = np.float32(max(x, 0.0) + math.log1p(math.exp(-abs(x))))
            log_decays[i, head] = -(np.float32(math.exp(np.float64(element(log_factors, head)))) * softplus)
            betas[i, head] = _sigmoid(element(logits, i * heads + head))


@njit(inline="always", **_OPTIONS)
def _unit(x, eps, factor, out):  # type: ignore[no-untyped-def]
    """out[i, h] = factor x[i, h] / sqrt(its squares' sum + eps)."""
    rows, heads, length = out.shape
    for i in range(rows):
        for head in range(heads):
            start = (i * heads + head) * length
            squares = dots(x, (start,), x, (start,), length)[0]
            scale = factor / np.float32(math.sqrt(squares + eps))
            for k in range(length):
                out[i, head, k] = element(x, start + k) * scale


@njit(inline="always", **_OPTIONS)
def _change(states, row, kept, change, key):  # type: ignore[no-untyped-def]
    for k in range(len(key)):
        states[row, k] = fma(change, key[k], kept * states[row, k])


@_compiled
def delta_rule(query, key, value, log_decays, betas, eps, states, slots, starts, out):  # type: ignore[no-untyped-def]
    """A gated delta net's memory S of each head, token by token; queries and keys are made to unit length first.

    S = d S + b (v - d S k) k^T with d = exp(log_decay), then out = S q / sqrt(K).

    ``query`` and ``key`` [tokens, key heads, K]; ``value`` and ``out`` [tokens, heads, V]; ``log_decays`` and ``betas``
    float32 [tokens, heads]. Text i has the tokens from starts[i] to starts[i + 1] and the states of slot slots[i] in
    ``states`` float32 [slots x heads x V, K], which become those behind its tokens.
    """
    tokens, key_heads, length = key.shape
    heads, size = out.shape[1], out.shape[2]
    queries, keys = np.empty((tokens, key_heads, length), np.float32), np.empty((tokens, key_heads, length), np.float32)
    one = np.float32(1.0)
    _unit(query, eps, one / np.float32(math.sqrt(np.float32(length))), queries)
    _unit(key, eps, one, keys)
    whole = size - size % 4
    for text in range(len(slots)):
        for head in range(heads):
            key_head, first = head // (heads // key_heads), (slots[text] * heads + head) * size
            for token in range(starts[text], starts[text + 1]):
                kept, beta = exponential(log_decays[token, head]), betas[token, head]
                place, own = (token * key_heads + key_head) * length, keys[token, key_head]
                wanted = (token * heads + head) * size
                for row in range(0, whole, 4):
                    four = _four((first + row) * length, length)
                    answers = dots(states, four, keys, (place,), length)
                    for each in range(4):
                        change = beta * (element(value, wanted + row + each) - kept * answers[each])
                        _change(states, first + row + each, kept, change, own)
                    reads = dots(states, four, queries, (place,), length)
                    for each in range(4):
                        out[token, head, row + each] = reads[each]
                for row in range(whole, size):
                    start = ((first + row) * length,)
                    answer = dots(states, start, keys, (place,), length)[0]
                    _change(states, first + row, kept, beta * (element(value, wanted + row) - kept * answer), own)
                    out[token, head, row] = dots(states, start, queries, (place,), length)[0]
