"""What crosses the wire as protobuf, to numpy and back: forward_backward with its outputs, and samples.

Whatever a client sends is bounded before memory is taken for it: a sparse tensor of a few bytes may claim any shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, EncodeError

from megatron_retool.target_sequences import FloatArray, Int64Array, RequestRefused
from megatron_retool.tinker.messages import MESSAGES
from sglang_rollout.gateway.errors import invalid
from untrusted import quoted

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
MOST_CELLS = 1 << 26
"""Numbers that the sparse tensors of one request may become."""
MOST_DATUMS = 16384
MASKED = -99999.0
"""What stands for the log-prob of a place without one, in tables of the likeliest tokens."""
Array = npt.NDArray[Any]
_DTYPES: dict[int, np.dtype[Any]] = {
    FLOAT32: np.dtype("<f4"),
    INT64: np.dtype("<i8"),
    INT32: np.dtype("<i4"),
    BFLOAT16: np.dtype("<u2"),
}


@dataclass(frozen=True, eq=False)
class Datum:
    """One sequence of a forward_backward.

    Attributes:
        tokens: int64 [N].
        inputs: loss_fn_inputs by name: float32 or int64, as they came.
    """

    tokens: Int64Array
    inputs: Mapping[str, Array]


@dataclass(frozen=True, eq=False)
class ForwardBackward:
    """A forward_backward as it arrived. Its data are read by ``read_data``.

    Attributes:
        loss_fn_config: numbers and texts by name.
    """

    model_id: str
    seq_id: int
    loss_fn: str
    loss_fn_config: Mapping[str, float | str]
    forward_only: bool
    message: Any = field(repr=False)


def read_forward_backward(body: bytes) -> ForwardBackward:
    """The request in ``body``.

    Raises:
        ApiError: 400, it is no such message.
    """
    try:
        message = MESSAGES["ForwardBackwardRequest"].FromString(body)
    except (DecodeError, EncodeError) as error:
        raise invalid("body", f"no ForwardBackwardRequest of protobuf: {error}") from error
    if not message.model_id:
        raise invalid("model_id", "it is missing")
    config: dict[str, float | str] = dict(message.loss_fn_numbers)
    for name, value in message.loss_fn_config.items():
        config[name] = value.text if value.HasField("text") else value.number
    return ForwardBackward(message.model_id, message.seq_id, message.loss_fn, config, message.forward_only, message)


def read_data(request: ForwardBackward) -> list[Datum]:
    """The sequences of a request.

    Raises:
        RequestRefused: naming the field that is at fault.
    """
    data = request.message.data
    if not 1 <= len(data) <= MOST_DATUMS:
        raise RequestRefused(f"data: it has {len(data)} datums: send 1 to {MOST_DATUMS} in a request")
    budget = _Budget(MOST_CELLS)
    return [_read_datum(each, f"data[{place}]", budget) for place, each in enumerate(data)]


class _Budget:
    """Numbers that a request's sparse tensors may still become."""

    def __init__(self, cells: int) -> None:
        self._left = cells

    def take(self, cells: int, where: str) -> None:
        if cells > self._left:
            raise RequestRefused(
                f"{where}: with it the request's sparse tensors have more than {MOST_CELLS} numbers: send fewer in one "
                "request"
            )
        self._left -= cells


def _read_datum(datum: Any, where: str, budget: _Budget) -> Datum:
    parts = []
    for place, chunk in enumerate(datum.model_input):
        at = f"{where}.model_input.chunks[{place}]"
        if chunk.HasField("image") or chunk.HasField("audio"):
            raise RequestRefused(f"{at}: the model reads only text: images and audio are not supported")
        parts.append(_numbers(chunk.text.tokens, INT32, at))
    tokens = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
    if not len(tokens):
        raise RequestRefused(f"{where}.model_input: it has no tokens")
    inputs = {
        name: read_tensor(tensor, f"{where}.loss_fn_inputs[{quoted(name, 40)}]", budget.take)
        for name, tensor in datum.loss_fn_inputs.items()
    }
    return Datum(tokens, inputs)


def _numbers(data: bytes, dtype: int, where: str) -> Array:
    kind = _DTYPES.get(dtype)
    if kind is None:
        raise RequestRefused(f"{where}: dtype {dtype} is none of float32, int64, int32 and bfloat16")
    if len(data) % kind.itemsize:
        raise RequestRefused(f"{where}: {len(data)} bytes are no whole number of {kind.itemsize}-byte numbers")
    return np.frombuffer(data, kind)


def _widened(values: Array, dtype: int) -> Array:
    """Float32 or int64: the protocol's clients know no other."""
    if dtype == BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32 if dtype == FLOAT32 else np.int64)


def read_tensor(tensor: Any, where: str, take: Any = lambda cells, where: None) -> Array:
    """A ``Tensor`` as an array: float32 or int64.

    Args:
        take: told of the numbers that a sparse one becomes, before they take memory.

    Raises:
        RequestRefused: shape, type and bytes do not go together.
    """
    shape = tuple(tensor.shape)
    if any(size < 0 for size in shape):
        raise RequestRefused(f"{where}: shape {list(shape)} has a negative size")
    if tensor.HasField("sparse_rows"):
        rows = tensor.sparse_rows
        values = _widened(_numbers(rows.values, tensor.dtype, where), tensor.dtype)
        starts, columns = (_numbers(part, INT64, where) for part in (rows.row_starts, rows.columns))
        return dense_rows(values, starts, columns, shape, where, take)
    values = _numbers(tensor.dense, tensor.dtype, where)
    if not shape and len(values) != 1:
        shape = (len(values),)
    if math.prod(shape) != len(values):
        raise RequestRefused(f"{where}: shape {list(shape)} does not hold {len(values)} numbers")
    return _widened(values, tensor.dtype).reshape(shape)


def dense_rows(
    values: Array,
    starts: Array,
    columns: Array,
    shape: Sequence[int],
    where: str,
    take: Any = lambda cells, where: None,
    empty: int = 0,
) -> Array:
    """A matrix given by rows (CSR): row i has ``values[starts[i]:starts[i + 1]]`` in those ``columns``.

    Args:
        take: as for ``read_tensor``.
        empty: what stands where no value is given.

    Raises:
        RequestRefused: these are not the parts of a matrix of that ``shape``.
    """
    if len(shape) != 2 or any(size < 0 for size in shape):
        raise RequestRefused(f"{where}: shape {list(shape)} is not that of a matrix, which a sparse tensor is")
    height, width = shape
    take(height * width, where)
    rising = len(starts) == height + 1 and starts[0] == 0 and (np.diff(starts) >= 0).all() and starts[-1] == len(values)
    if not rising or len(columns) != len(values):
        raise RequestRefused(
            f"{where}: {len(values)} values, {len(columns)} columns and {len(starts)} row starts are not those of a "
            f"sparse tensor of {height} rows"
        )
    if len(columns) and not (columns.min() >= 0 and columns.max() < width):
        raise RequestRefused(f"{where}: a column lies outside its {width}")
    matrix = np.full((height, width), empty, values.dtype)
    matrix[np.repeat(np.arange(height), np.diff(starts)), columns] = values
    return matrix


def tensor_message(array: Array) -> Any:
    """``array`` as a ``Tensor``: float32, or int64 for whole numbers."""
    dtype = FLOAT32 if array.dtype.kind == "f" else INT64
    return MESSAGES["Tensor"](
        dense=np.ascontiguousarray(array, _DTYPES[dtype]).tobytes(), dtype=dtype, shape=array.shape
    )


def write_outputs(outputs: Mapping[str, Sequence[FloatArray]], metrics: Mapping[str, float]) -> bytes:
    """A ForwardBackwardOutput.

    Args:
        outputs: by name, an array for each datum; all of one datum have its shape, [N] or [N, K].
        metrics: by name with its reduction, such as "loss:sum".
    """
    message = MESSAGES["ForwardBackwardOutput"](output_type="ArrayRecord")
    message.metrics.update(metrics)
    count = len(next(iter(outputs.values())))
    begin = 0
    while begin < count:
        widths = [each[begin].shape[1:] for each in outputs.values()]
        end = begin + 1
        # A record is rectangular: another K begins another one.
        while end < count and [each[end].shape[1:] for each in outputs.values()] == widths:
            end += 1
        record = message.records.add(type_tag="ArrayRecord", num_datums=end - begin)
        for name, arrays in outputs.items():
            record.fields[name].CopyFrom(_batched(arrays[begin:end]))
        begin = end
    return bytes(message.SerializeToString())


def _batched(arrays: Sequence[FloatArray]) -> Any:
    offsets = np.cumsum([0, *(each.size * 4 for each in arrays)]).astype("<i8")
    return MESSAGES["BatchedTensor"](
        data=b"".join(np.ascontiguousarray(each, "<f4").tobytes() for each in arrays),
        offsets=offsets.tobytes(),
        dtype=FLOAT32,
        trailing=arrays[0].shape[1:],
    )


def top_tokens_message(ids: Array, log_probs: Array) -> Any:
    """Tables [length, k] of the likeliest tokens."""
    return MESSAGES["TopTokens"](
        token_ids=np.ascontiguousarray(ids, "<i4").tobytes(),
        log_probs=np.ascontiguousarray(log_probs, "<f4").tobytes(),
        k=ids.shape[1],
        length=ids.shape[0],
    )
