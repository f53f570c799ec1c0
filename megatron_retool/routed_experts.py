"""The experts that each token went through, as the engine or the learner chose them in a mixture of experts.

A row belongs to one input token of a sequence (prompt, tool results and sampled tokens alike) and has the shape
[layers, k]: for each layer the k experts, without order. Rows are uint8, or int16 where a model has more experts than
uint8 can name. An unknown row has the largest value of its type in every place (uint8: 255): whoever replays
the column chooses for that token itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa

ExpertArray = npt.NDArray[np.uint8] | npt.NDArray[np.int16]

ROW_GROUP_BYTES = 64 << 20
"""Of the column, in a row group of a file that is read whole: what writing one holds in memory beside the trajectories.
A page, which a row group has at least one of, ends at 2 GiB."""


def expert_dtype(num_experts: int) -> type[np.uint8] | type[np.int16]:
    """The type of a column for a model of so many experts."""
    return np.uint8 if num_experts <= np.iinfo(np.uint8).max else np.int16


def missing_expert(dtype: Any) -> int:
    """The value that stands for "not known" in a column of this type: its largest."""
    return int(np.iinfo(dtype).max)


def missing_rows(count: int, like: ExpertArray) -> ExpertArray:
    """``count`` unknown rows [count, layers, k], of the type and shape of ``like``'s."""
    return np.full((count, *like.shape[1:]), missing_expert(like.dtype), like.dtype)


def is_missing(rows: ExpertArray) -> npt.NDArray[np.bool_]:
    """bool [n] for rows [n, layers, k]."""
    result: npt.NDArray[np.bool_] = rows[:, 0, 0] == missing_expert(rows.dtype)
    return result


def check_rows(rows: Any, length: int, label: str) -> None:
    """Raise ValueError, beginning with ``label``, where ``rows`` are not those of a sequence of ``length`` tokens."""
    if rows.dtype not in (np.uint8, np.int16) or rows.ndim != 3:
        raise ValueError(
            f"{label}: routed_experts is {rows.dtype} {rows.shape}, not uint8 or int16 [tokens, layers, k]"
        )
    if len(rows) != length:
        raise ValueError(f"{label}: routed_experts has {len(rows)} rows for {length} tokens")
    if rows.dtype == np.int16 and (rows < 0).any():
        raise ValueError(f"{label}: routed_experts names expert {rows.min()}")
    unknown = rows == missing_expert(rows.dtype)
    if (unknown.any((1, 2)) != unknown.all((1, 2))).any():
        raise ValueError(f"{label}: a row of routed_experts is known in part")


@dataclass(frozen=True)
class RoutedExperts:
    """The column of a batch: where each sequence's rows begin in one array, which selections share.

    Attributes:
        rows: [M, layers, k], sequences end to end.
        starts: int64 [N], the first row of each sequence of the batch, which has as many as the sequence has tokens.
    """

    rows: ExpertArray
    starts: npt.NDArray[np.int64]

    @classmethod
    def of_sequences(cls, columns: Sequence[ExpertArray | None], lengths: npt.NDArray[Any]) -> RoutedExperts | None:
        """The column of a batch of sequences of ``lengths`` tokens; None where no sequence has one.

        Raises:
            ValueError: two sequences have rows of different type or shape.
        """
        known = [(number, column) for number, column in enumerate(columns) if column is not None]
        if not known:
            return None
        first, like = known[0]
        for number, column in known:
            if (column.dtype, column.shape[1:]) != (like.dtype, like.shape[1:]):
                raise ValueError(
                    f"sequence {number} has routed_experts of {column.dtype} {column.shape[1:]}, sequence {first} "
                    f"of {like.dtype} {like.shape[1:]}: they are of different models"
                )
        parts: list[Any] = [
            missing_rows(int(length), like) if column is None else column
            for column, length in zip(columns, lengths, strict=True)
        ]
        rows: Any = np.concatenate(parts)
        return cls.end_to_end(rows, lengths)

    @classmethod
    def end_to_end(cls, rows: ExpertArray, lengths: npt.NDArray[Any]) -> RoutedExperts:
        """The column whose ``rows`` are in the order of the batch's sequences, which have ``lengths`` [N] tokens."""
        return cls(rows, np.cumsum(lengths, dtype=np.int64) - np.asarray(lengths, np.int64))

    def select(self, sequences: npt.NDArray[np.int64]) -> RoutedExperts:
        """The column of these sequences, in that order; no row is copied."""
        return RoutedExperts(self.rows, self.starts[sequences])


def stored_type() -> pa.DataType:
    """A sequence's rows in a parquet file: data has the bytes of [layers, k, tokens], of the type that dtype names.

    Places of one layer stand together, which compresses better than rows do: a layer prefers some experts.
    """
    import pyarrow as pa

    return pa.struct([("data", pa.large_binary()), ("dtype", pa.string()), ("layers", pa.int32()), ("k", pa.int32())])


def to_stored(chunks: Sequence[ExpertArray]) -> dict[str, Any] | None:
    """A value of ``stored_type`` for chunks of rows that follow one another; None where there is none."""
    if not chunks:
        return None
    if len({(chunk.dtype, chunk.shape[1:]) for chunk in chunks}) > 1:
        raise ValueError(
            f"routed_experts changes within a sequence: {', '.join(f'{c.dtype} {c.shape}' for c in chunks)}"
        )
    rows = np.concatenate(chunks) if len(chunks) > 1 else chunks[0]
    _, layers, k = rows.shape
    return {"data": rows.transpose(1, 2, 0).tobytes(), "dtype": str(rows.dtype), "layers": layers, "k": k}


def split_stored(table: pa.Table) -> tuple[pa.Table, Sequence[pa.StructScalar | None]]:
    """What was read of a file: its other columns, and for each row a value for ``from_stored``.

    Raises:
        pyarrow.ArrowException: the column is of another kind.
    """
    if "routed_experts" not in table.column_names:
        return table, [None] * len(table)
    return table.drop_columns("routed_experts"), table["routed_experts"].cast(stored_type())


def from_stored(value: pa.StructScalar | None) -> ExpertArray | None:
    """The rows [tokens, layers, k] of a value of ``stored_type``; None where it is none, or null.

    Raises:
        ValueError: the value is no sequence's rows.
    """
    if value is None or not value.is_valid:
        return None
    dtype, layers, k = (value[name].as_py() for name in ("dtype", "layers", "k"))
    data = value["data"].as_buffer()
    if dtype not in ("uint8", "int16") or not layers or not k or min(layers, k) < 1 or data is None:
        raise ValueError(f"routed_experts has the type {dtype}, {layers} layers and {k} experts a token")
    if data.size % (layers * k * np.dtype(dtype).itemsize):
        raise ValueError(f"routed_experts has {data.size} bytes for {layers} layers and {k} experts a token, {dtype}")
    places = np.frombuffer(data, dtype).reshape(layers, k, -1)
    return np.ascontiguousarray(places.transpose(2, 0, 1))


def row_groups(byte_counts: Sequence[int], most: int) -> Iterator[slice]:
    """Trajectories, by the bytes of their columns, that share a row group of at most ``most``, or alone."""
    start = held = 0
    for number, count in enumerate(byte_counts):
        if held and held + count > most:
            yield slice(start, number)
            start, held = number, 0
        held += count
    yield slice(start, len(byte_counts))
