"""Instructions that numba compiles into kernels: sums in ``LANES`` partial sums side by side, as LLVM code.

``LANES`` partial sums run side by side through each sum of products: element k belongs to lane k mod ``LANES``, and the
lanes are added in pairs at the end. Vector units of any width, or none, compute that order.

bfloat16 arrays arrive as uint16, the upper half of a float32. What is loaded from them is float32.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16

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
        result = [builder.extract_element(added, ir.Constant(_WORD, each)) for each in range(len(sums))]
        return context.make_tuple(builder, signature.return_type, result)

    result = types.UniTuple(types.float32, x_starts.count * w_starts.count)
    return result(x, x_starts, w, w_starts, length), generate


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
