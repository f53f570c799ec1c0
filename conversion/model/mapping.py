"""A full Megatron-Core tensor, a tensor-parallel rank's part of it, and the Hugging Face tensors that it is made of.

    to_mcore   Hugging Face tensors     -> the full Megatron-Core tensor
    to_hf      full Megatron-Core tensor -> Hugging Face tensors (linear, so it maps gradients too)
    shard      full tensor               -> one tensor-parallel rank's part
    merge      every rank's part         -> the full tensor
    hf_parts   one rank's part           -> what it is of the Hugging Face tensors

All five follow from two facts about a ``Mapping``: ``segments``, which says where each run of rows of the Megatron-Core
tensor comes from, and ``shard_rows``, which says which rows a rank owns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from conversion.model.rules import Arrangement, Rule
from conversion.model.stacked import part_of
from megatron_retool.errors import InputError

if TYPE_CHECKING:  # what checks a model's directory imports this module, and torch takes seconds
    import torch
    from torch import Tensor


class WeightMapError(InputError):
    """A tensor is unknown to the family or has the wrong shape or dtype. The message names the tensor."""


PART = ".part:"
"""Between the name of a tensor and which part of it is meant."""

FULL_PRECISION_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class RowSegment:
    """Rows ``start:stop`` of Hugging Face tensor number ``source`` (None: zero padding)."""

    source: int | None
    start: int
    stop: int


@dataclass(frozen=True)
class Mapping:
    """One Megatron-Core parameter of one model and the Hugging Face tensors it is made of."""

    mcore_name: str
    """Global name, local spec: ``decoder.layers.3.self_attention.linear_qkv.weight``."""
    hf_names: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    arrangement: Arrangement
    tp_dim: int | None
    rule: Rule
    layer: int | None = None
    expert: int | None = None
    """Global expert number: expert parallelism gives each rank a contiguous run of them."""
    tied: bool = False
    """The output layer of a tied model: read from the embedding, never written back."""
    query_groups: int = 1
    """Of an arrangement by key heads: those of the gated delta net."""
    heads_per_group: int = 1
    """Query heads of a query group."""
    padding_rows: int = 0
    sections: tuple[int, ...] = ()
    """Rows of what Hugging Face tensors fuse, see ``rules.Rule``; empty: nothing is fused."""

    @property
    def is_stacked(self) -> bool:
        """Whether the Hugging Face tensors are parts of larger ones, see ``stacked``."""
        return part_of(self.hf_names[0]) is not None

    @property
    def mcore_shape(self) -> tuple[int, ...]:
        """Shape of the full parameter, vocabulary padding included."""
        return (sum(shape[0] for shape in self.hf_shapes) + self.padding_rows, *self.hf_shapes[0][1:])

    def cast_to(self, dtype: torch.dtype | None) -> torch.dtype | None:
        """What a conversion to ``dtype`` makes of the parameter; None: it stays as it is."""
        return None if self.rule.is_buffer else dtype

    @cached_property
    def blocks(self) -> tuple[RowSegment, ...]:
        """What the arrangement arranges: whole Hugging Face tensors, or their sections, by their rows."""
        blocks, source, start = [], 0, 0
        for rows in self.sections or (shape[0] for shape in self.hf_shapes):
            blocks.append(RowSegment(source, start, start + rows))
            start += rows
            if start == self.hf_shapes[source][0]:
                source, start = source + 1, 0
        return tuple(blocks)

    @cached_property
    def segments(self) -> tuple[RowSegment, ...]:
        """The rows of the full Megatron-Core tensor, top to bottom."""
        if self.arrangement is Arrangement.GATED_QUERY_GROUPS:
            return tuple(self._gated_segments())
        if self.arrangement in (Arrangement.QUERY_GROUPS, Arrangement.KEY_HEADS):
            return tuple(
                RowSegment(block.source, block.start + group * rows, block.start + (group + 1) * rows)
                for group in range(self.query_groups)
                for block in self.blocks
                for rows in ((block.stop - block.start) // self.query_groups,)
            )
        segments = list(self.blocks)
        if self.padding_rows:
            segments.append(RowSegment(None, 0, self.padding_rows))
        return tuple(segments)

    def _gated_segments(self) -> Iterator[RowSegment]:
        query, *others = self.blocks
        heads = self.query_groups * self.heads_per_group
        rows = (query.stop - query.start) // (2 * heads)
        for group in range(self.query_groups):
            first = group * self.heads_per_group
            for gate in (0, 1):
                for head in range(first, first + self.heads_per_group):
                    start = query.start + (2 * head + gate) * rows
                    yield RowSegment(query.source, start, start + rows)
            for block in others:
                size = (block.stop - block.start) // self.query_groups
                yield RowSegment(block.source, block.start + group * size, block.start + (group + 1) * size)

    def shard_rows(self, tp_size: int, tp_rank: int) -> tuple[tuple[int, int], ...]:
        """Row ranges of the full tensor that a rank owns, in the order in which it keeps them.

        Raises:
            WeightMapError: the rows do not divide by ``tp_size``.
        """
        rows = self.mcore_shape[0]
        if self.tp_dim != 0:
            return ((0, rows),)
        blocks = len(self.blocks) if self.arrangement is Arrangement.GATE_UP else 1
        if rows % (blocks * tp_size):
            raise WeightMapError(f"{self.mcore_name}: {rows // blocks} rows do not divide by TP {tp_size}")
        block = rows // blocks
        part = block // tp_size
        return tuple((b * block + tp_rank * part, b * block + (tp_rank + 1) * part) for b in range(blocks))

    def shard_columns(self, tp_size: int, tp_rank: int) -> tuple[int, int] | None:
        """Range of dimension 1 that a rank owns; None where it owns all of it.

        Raises:
            WeightMapError: the columns do not divide by ``tp_size``.
        """
        if self.tp_dim != 1:
            return None
        columns = self.mcore_shape[1]
        if columns % tp_size:
            raise WeightMapError(f"{self.mcore_name}: {columns} columns do not divide by TP {tp_size}")
        part = columns // tp_size
        return tp_rank * part, (tp_rank + 1) * part

    def row_segments(self, low: int, high: int) -> Iterator[RowSegment]:
        """Where rows ``low:high`` of the full tensor come from, top to bottom: what a reader has to fetch."""
        position = 0
        for segment in self.segments:
            length = segment.stop - segment.start
            start, stop = max(low - position, 0), min(high - position, length)
            if start < stop:
                yield RowSegment(segment.source, segment.start + start, segment.start + stop)
            position += length

    def hf_runs(self, source: int) -> list[tuple[int, int, int]]:
        """Where the rows of Hugging Face tensor number ``source`` lie in the full tensor, top to bottom.

        Returns:
            (row of the Hugging Face tensor, row of the full tensor, number of rows) of each run.
        """
        runs, position = [], 0
        for segment in self.segments:
            rows = segment.stop - segment.start
            if segment.source == source:
                runs.append((segment.start, position, rows))
            position += rows
        return sorted(runs)


def to_mcore(mapping: Mapping, tensors: Sequence[Tensor]) -> Tensor:
    """The full Megatron-Core tensor, shape ``mapping.mcore_shape``, from tensors in the order of ``mapping.hf_names``.

    Raises:
        WeightMapError: a tensor has the wrong shape, or the tensors differ in dtype.
    """
    check_tensors(mapping, [tuple(t.shape) for t in tensors], [t.dtype for t in tensors])
    if mapping.segments == (RowSegment(0, 0, mapping.mcore_shape[0]),):
        return tensors[0]
    return _joined([_rows(segment, tensors) for segment in mapping.segments])


def to_hf(mapping: Mapping, full: Tensor) -> dict[str, Tensor]:
    """The Hugging Face tensors by name; padding rows are dropped. Linear, so it maps gradients as well.

    Raises:
        WeightMapError: ``full`` does not have the shape ``mapping.mcore_shape``.
    """
    if tuple(full.shape) != mapping.mcore_shape:
        raise WeightMapError(f"{mapping.mcore_name} has shape {tuple(full.shape)}, expected {mapping.mcore_shape}")
    tensors = {}
    for source, name in enumerate(mapping.hf_names):
        parts = [full[row : row + count] for _, row, count in mapping.hf_runs(source)]
        tensors[name] = _joined(parts)
    return tensors


def shard(mapping: Mapping, full: Tensor, tp_size: int, tp_rank: int) -> Tensor:
    """The part of the full Megatron-Core tensor that tensor-parallel rank ``tp_rank`` of ``tp_size`` holds."""
    ranges = mapping.shard_rows(tp_size, tp_rank)
    part = _joined([full[start:stop] for start, stop in ranges])
    columns = mapping.shard_columns(tp_size, tp_rank)
    return part if columns is None else part[:, columns[0] : columns[1]]


def merge(mapping: Mapping, shards: Sequence[Tensor]) -> Tensor:
    """The full Megatron-Core tensor from every tensor-parallel rank's part, in rank order.

    Raises:
        WeightMapError: a part has the wrong shape.
    """
    tp_size = len(shards)
    for rank, part in enumerate(shards):
        expected = shard_shape(mapping, tp_size, rank)
        if tuple(part.shape) != expected:
            raise WeightMapError(
                f"{mapping.mcore_name}: the part of tensor parallel rank {rank} of {tp_size} has shape "
                f"{tuple(part.shape)}, expected {expected}"
            )
    if tp_size == 1 or mapping.tp_dim is None:
        return shards[0]
    full = shards[0].new_empty(mapping.mcore_shape)
    for rank, part in enumerate(shards):
        columns = mapping.shard_columns(tp_size, rank)
        target = full if columns is None else full[:, columns[0] : columns[1]]
        position = 0
        for start, stop in mapping.shard_rows(tp_size, rank):
            target[start:stop] = part[position : position + stop - start]
            position += stop - start
    return full


@dataclass(frozen=True)
class HFPart:
    """Indices ``start`` to ``start + size`` of dimension ``dim`` of a Hugging Face tensor, and all of the others."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dim: int
    start: int
    size: int

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.size == self.shape[self.dim]

    @property
    def wire_name(self) -> str:
        """Name under which engines are sent the part (``sglang_plugins/weight_parts.py`` reads it)."""
        if self.is_whole:
            return self.name
        return f"{self.name}{PART}{'x'.join(map(str, self.shape))}:{self.dim}:{self.start}"


def hf_parts(mapping: Mapping, part: Tensor, tp_size: int, tp_rank: int) -> Iterator[tuple[HFPart, Tensor]]:
    """What a rank's part of the Megatron-Core tensor is of the Hugging Face tensors; padding rows are dropped.

    The parts of all ranks together are what ``to_hf`` makes of the merged tensor.
    """
    columns = mapping.shard_columns(tp_size, tp_rank)
    runs: dict[int, list[tuple[int, int, int]]] = {}
    row = 0
    for low, high in mapping.shard_rows(tp_size, tp_rank):
        for segment in mapping.row_segments(low, high):
            rows = segment.stop - segment.start
            if segment.source is not None:
                runs.setdefault(segment.source, []).append((segment.start, row, rows))
            row += rows
    for source, result in sorted(runs.items()):
        name, shape = mapping.hf_names[source], mapping.hf_shapes[source]
        for start, pieces in _adjacent(sorted(result)):
            tensor = _joined([part[row : row + rows] for row, rows in pieces])
            if columns is not None:
                yield HFPart(name, shape, 1, columns[0], columns[1] - columns[0]), tensor
            else:
                yield HFPart(name, shape, 0, start, len(tensor)), tensor


def _adjacent(runs: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Runs of Hugging Face rows that follow one another, as (first row, [(row of the part, rows)])."""
    end, pieces, first = -1, list[tuple[int, int]](), 0
    for start, row, rows in runs:
        if pieces and start != end:
            yield first, pieces
            pieces = []
        if not pieces:
            first = start
        pieces.append((row, rows))
        end = start + rows
    if pieces:
        yield first, pieces


def shard_shape(mapping: Mapping, tp_size: int, tp_rank: int) -> tuple[int, ...]:
    """Shape of one rank's part."""
    rows = sum(stop - start for start, stop in mapping.shard_rows(tp_size, tp_rank))
    columns = mapping.shard_columns(tp_size, tp_rank)
    rest = mapping.mcore_shape[1:] if columns is None else (columns[1] - columns[0],)
    return (rows, *rest)


def check_tensors(
    mapping: Mapping, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], where: str = ""
) -> None:
    """Hold what a checkpoint stores against what the mapping expects.

    Raises:
        WeightMapError: naming the tensor (and ``where`` it lies) whose shape or dtype does not fit.
    """
    suffix = f" in {where}" if where else ""
    for name, shape, dtype, expected in zip(mapping.hf_names, shapes, dtypes, mapping.hf_shapes, strict=True):
        if tuple(shape) != expected:
            raise WeightMapError(
                f"{name}{suffix} has shape {tuple(shape)}, but config.json implies {expected}: "
                "config.json and the weights do not belong together"
            )
        if str(dtype).removeprefix("torch.") not in FULL_PRECISION_DTYPES:
            raise WeightMapError(f"{name}{suffix} has dtype {dtype}: start from the full-precision weights")
        if dtype != dtypes[0]:
            raise WeightMapError(
                f"{name}{suffix} has dtype {dtype}, but {mapping.hf_names[0]} has {dtypes[0]}: both become parts of "
                f"{mapping.mcore_name}, which has one dtype"
            )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    import torch

    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _rows(segment: RowSegment, tensors: Sequence[Tensor]) -> Tensor:
    if segment.source is None:
        return tensors[0].new_zeros(segment.stop - segment.start, *tensors[0].shape[1:])
    return tensors[segment.source][segment.start : segment.stop]
