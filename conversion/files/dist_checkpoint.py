"""Megatron-Core distributed checkpoints (``torch_dist``) written and read one parameter at a time, without a model.

``megatron.core.dist_checkpointing`` saves from a built model and loads into one, which needs the whole model in memory
and a process group.  The converters need neither: a chunk of a tensor is a ``torch.save`` record in one of the
``.distcp`` files, and ``.metadata`` says which record covers which part of which tensor.  What ``ChunkWriter`` and
``write_metadata`` leave behind, ``megatron.core.dist_checkpointing`` loads into any layout; ``DistCheckpoint`` reads
what they, or Megatron itself, wrote.
"""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from conversion.files.checksums import FileRecord, what_to_do
from conversion.files.directory import FORMAT_NAME as FORMAT_NAME
from conversion.files.dist_metadata import METADATA_NAME as METADATA_NAME
from conversion.files.dist_metadata import read_metadata
from conversion.files.spans import SpanWriter, block_rows, fetch, read_into
from conversion.model.weight_map import CheckpointPlace
from megatron_retool.errors import InputError

COMMON_NAME = "common.pt"
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
SHARDING_METADATA: Mapping[str, Any] = {
    "singleton_local_shards": False,
    "non_homogeneous_layers": False,
    "chained_optim_avoid_prefix": True,
    "distrib_optim_sharding_type": "fully_reshardable",
}
"""What the learner passes to ``sharded_state_dict``: layers and experts stacked, optimizer state by model tensor."""


class DistCheckpointError(InputError):
    """The directory is no complete distributed checkpoint, or lacks a tensor. The message names it."""


@dataclass(frozen=True)
class Chunk:
    """One written record: the part of ``key`` that starts at ``offsets`` and has ``sizes``."""

    key: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    file: str
    position: int
    length: int


class ChunkWriter:
    """Appends chunks to one ``.distcp`` file, which ``new_directory`` makes durable together with its neighbours."""

    def __init__(self, directory: Path, file: str) -> None:
        self.file = file
        self.chunks: list[Chunk] = []
        self._descriptor = os.open(directory / file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._span = SpanWriter(self._descriptor)
        self._frame = _Frame(b"", 0, b"")
        self._data_end = 0

    def write(self, place: CheckpointPlace, shape: tuple[int, ...], offsets: tuple[int, ...], part: Tensor) -> None:
        """Append one part of a parameter; arguments as of ``begin``."""
        self.begin(place, shape, offsets, tuple(part.shape), part.dtype)
        self.add(part)
        self.end()

    def begin(
        self,
        place: CheckpointPlace,
        shape: tuple[int, ...],
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        """Begin one part of a parameter, whose rows ``add`` appends.

        Args:
            place: where the parameter belongs.
            shape: of the whole parameter.
            offsets: where the part begins in it.
            sizes: of the part.
        """
        stacked = (*(1 for _ in place.index), *sizes)
        self._frame = _frame(stacked, dtype)
        position = self._span.position
        self._span.write(self._frame.head)
        self._data_end = self._span.position + self._frame.data_bytes
        self.chunks.append(
            Chunk(
                key=place.key,
                global_shape=(*place.axes, *shape),
                offsets=(*place.index, *offsets),
                sizes=stacked,
                dtype=dtype,
                file=self.file,
                position=position,
                length=self._frame.nbytes,
            )
        )

    def add(self, rows: Tensor) -> None:
        """Append rows of the part that was begun."""
        self._span.write_tensor(rows)

    def end(self) -> None:
        """Complete the part that was begun."""
        assert self._span.position == self._data_end, (self.chunks[-1], self._span.position)
        self._span.write(self._frame.tail)

    @property
    def record(self) -> FileRecord:
        """The file as far as it is written."""
        return FileRecord((self._span.part,))

    def __enter__(self) -> ChunkWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)


@dataclass(frozen=True)
class _Frame:
    """What ``torch.save`` writes around the elements of a tensor."""

    head: bytes
    data_bytes: int
    tail: bytes

    @property
    def nbytes(self) -> int:
        return len(self.head) + self.data_bytes + len(self.tail)


@functools.lru_cache(maxsize=256)
def _frame(sizes: tuple[int, ...], dtype: torch.dtype) -> _Frame:
    with tempfile.TemporaryFile() as stream:
        # What is saved is uninitialised memory that is never touched, and leaves a hole in the file.
        with torch.serialization.skip_data():
            torch.save(torch.empty(sizes, dtype=dtype), stream)
        length, nbytes = stream.seek(0, os.SEEK_END), torch.Size(sizes).numel() * dtype.itemsize
        data, _ = _data_of_record(stream, 0, length)
        head, tail = os.pread(stream.fileno(), data, 0), os.pread(stream.fileno(), length, data + nbytes)
    return _Frame(head, nbytes, tail)


def write_metadata(directory: Path, chunks: Iterable[Chunk], common: Mapping[str, Any]) -> None:
    """Complete a checkpoint whose chunk files are written: index, common state, format marker.

    Args:
        common: what is the same on every rank, stored beside Megatron's ``content_metadata``.

    Raises:
        DistCheckpointError: chunks of one tensor differ in dtype or in global shape, or leave a part of it uncovered.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    covered: dict[str, int] = defaultdict(int)
    for chunk in sorted(chunks, key=lambda chunk: (chunk.key, chunk.offsets)):
        entry = tensors.setdefault(
            chunk.key,
            TensorStorageMetadata(TensorProperties(dtype=chunk.dtype), torch.Size(chunk.global_shape), []),
        )
        if entry.properties.dtype != chunk.dtype or tuple(entry.size) != chunk.global_shape:
            raise DistCheckpointError(
                f"{chunk.key} at {chunk.offsets} is {chunk.dtype} of {chunk.global_shape}, elsewhere "
                f"{entry.properties.dtype} of {tuple(entry.size)}: pass --dtype to store one dtype"
            )
        index = MetadataIndex(chunk.key, chunk.offsets, len(entry.chunks))
        entry.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
        storage[index] = _StorageInfo(chunk.file, chunk.position, chunk.length)
        covered[chunk.key] += torch.Size(chunk.sizes).numel()
    for key, entry in tensors.items():
        if covered[key] != entry.size.numel():
            raise DistCheckpointError(f"{key}: {covered[key]} of {entry.size.numel()} elements were written")
    metadata = Metadata({**tensors}, planner_data=None, storage_data=storage, storage_meta=StorageMeta())
    with open(directory / METADATA_NAME, "wb") as stream:
        pickle.dump(metadata, stream)
    with open(directory / COMMON_NAME, "wb") as stream:
        torch.save({**common, "content_metadata": dict(SHARDING_METADATA)}, stream)
    with open(directory / FORMAT_NAME, "w", encoding="utf-8") as text:
        json.dump(FORMAT, text)


class DistCheckpoint:
    """Reads parameters from a ``torch_dist`` checkpoint of any layout.

    Raises:
        DistCheckpointError: the directory is no distributed checkpoint.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        for name in (FORMAT_NAME, METADATA_NAME):
            if not (self.directory / name).is_file():
                raise DistCheckpointError(f"{directory} is no complete distributed checkpoint: {name} is missing")
        try:
            metadata = read_metadata(self.directory)
        except Exception as error:  # unpickling damaged bytes raises anything
            what = f"{type(error).__name__}: {error}"
            raise DistCheckpointError(
                f"{self.directory / METADATA_NAME} cannot be read ({what}). {what_to_do(self.directory)}"
            ) from error
        self.tensors: dict[str, TensorStorageMetadata] = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.objects: frozenset[str] = frozenset(metadata.state_dict_metadata.keys() - self.tensors.keys())
        self._storage: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
        self._located: dict[tuple[str, tuple[int, ...]], tuple[Path, int] | None] = {}
        self._chunks: dict[tuple[str, int], dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}

    def check_objects(self) -> None:
        """Read every object beside the tensors as plain data: readers that unpickle them later then run nothing.

        Raises:
            DistCheckpointError: an object names what is more than data, or its file is missing or damaged.
        """
        for index, record in self._storage.items():
            if index.fqn not in self.objects:
                continue
            path = self.directory / record.relative_path
            try:
                with open(path, "rb") as stream:
                    torch.load(_plain_record(stream, record), map_location="cpu", weights_only=True)
            except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
                raise DistCheckpointError(
                    f"{path}: object {index.fqn[:80]} cannot be read as data ({_first_line(error)}): use a "
                    "checkpoint whose origin you know"
                ) from error

    def __contains__(self, place: CheckpointPlace) -> bool:
        return self._resolve(place) is not None

    def dtype(self, place: CheckpointPlace) -> torch.dtype:
        """The dtype that the checkpoint stores the parameter in."""
        return self.tensors[self._required(place).key].properties.dtype

    def shape(self, place: CheckpointPlace) -> tuple[int, ...]:
        """The parameter's shape, without the axes of layers and experts."""
        place = self._required(place)
        return tuple(self.tensors[place.key].size)[len(place.index) :]

    def read(self, place: CheckpointPlace, shape: tuple[int, ...]) -> Tensor:
        """The first ``shape`` of the parameter (its leading rows, where the checkpoint pads the vocabulary).

        Raises:
            DistCheckpointError: the checkpoint lacks the parameter or a part of it.
        """
        place = self._required(place)
        stored = self.shape(place)
        if len(stored) != len(shape) or stored[1:] != shape[1:] or stored[0] < shape[0]:
            raise DistCheckpointError(f"{self.directory}: {place.key} has shape {stored}, expected {shape}")
        wanted = torch.Size(shape)
        out: Tensor | None = None
        covered = 0
        for chunk in self._chunks_at(place):
            offsets = tuple(chunk.offsets)[len(place.index) :]
            sizes = tuple(chunk.sizes)[len(place.index) :]
            lengths = [min(o + s, limit) - o for o, s, limit in zip(offsets, sizes, shape, strict=True)]
            if min(lengths, default=1) <= 0:
                continue
            part = self._load(place.key, chunk).view(sizes)
            if tuple(lengths) == shape == sizes:
                return part
            if out is None:
                out = torch.empty(wanted, dtype=part.dtype)
            target = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
            out[target] = part[tuple(slice(n) for n in lengths)]
            covered += torch.Size(lengths).numel()
        if out is None or covered != wanted.numel():
            raise DistCheckpointError(
                f"{self.directory}: {place.key} at {place.index} holds {covered} of {wanted.numel()} elements"
            )
        return out

    def lies_in_order(self, place: CheckpointPlace) -> bool:
        """Whether the elements of all chunks of a parameter lie in files as they are, so that ``row_blocks`` works."""
        place = self._required(place)
        return all(self._locate(place.key, chunk) is not None for chunk in self._chunks_at(place))

    def row_blocks(self, place: CheckpointPlace, shape: tuple[int, ...], start: int, stop: int) -> Iterator[Tensor]:
        """Rows ``start:stop`` of a parameter of ``shape``, in blocks of whole rows, top to bottom.

        The kernel fetches what comes next meanwhile.

        Raises:
            DistCheckpointError: the checkpoint lacks the parameter or a part of it.
        """
        place = self._required(place)
        dtype, depth = self.dtype(place), len(place.index)
        row_bytes = torch.Size(shape[1:]).numel() * dtype.itemsize
        (step, ahead), fetched = block_rows(row_bytes), start
        chunks = [(chunk, *_rows_of(chunk, depth)) for chunk in self._chunks_at(place)]
        chunks = [(chunk, first, last) for chunk, first, last in chunks if first < stop and last > start]
        for low in range(start, stop, step):
            high = min(low + step, stop)
            while fetched < min(high + ahead, stop):
                for chunk, first, last in chunks:
                    self._part_of_chunk(place.key, chunk, depth, max(first, fetched), min(last, fetched + ahead), None)
                fetched += ahead
            block = torch.empty(high - low, *shape[1:], dtype=dtype)
            covered = 0
            for chunk, first, last in chunks:
                begin, end = max(first, low), min(last, high)
                if begin < end:
                    columns = tuple(
                        slice(o, o + n)
                        for o, n in zip(chunk.offsets[depth + 1 :], chunk.sizes[depth + 1 :], strict=True)
                    )
                    target = block[(slice(begin - low, end - low), *columns)]
                    self._part_of_chunk(place.key, chunk, depth, begin, end, target)
                    covered += target.numel()
            if covered != block.numel():
                raise DistCheckpointError(
                    f"{self.directory}: {place.key} at {place.index} lacks elements of rows {low} to {high}"
                )
            yield block

    def _part_of_chunk(
        self, key: str, chunk: ChunkStorageMetadata, depth: int, begin: int, end: int, target: Tensor | None
    ) -> None:
        """Put rows ``begin:end`` of a parameter, as far as a chunk holds them, into ``target``; None: fetch them."""
        location = self._locate(key, chunk)
        assert location is not None, "see lies_in_order"
        first, row = chunk.offsets[depth], torch.Size(chunk.sizes[depth + 1 :]).numel()
        row_bytes = row * self.tensors[key].properties.dtype.itemsize
        path, offset = location[0], location[1] + (begin - first) * row_bytes
        if target is None:
            if begin < end:
                fetch(path, offset, (end - begin) * row_bytes)
            return
        whole = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
        try:
            read_into(whole, path, offset)
        except (OSError, EOFError) as error:
            raise DistCheckpointError(f"{path}: cannot read {key}: {error}. {what_to_do(self.directory)}") from error
        if whole is not target:
            target.copy_(whole)

    def check_sizes(self) -> None:
        """Make sure that every file is long enough for the tensors that the index places in it, without reading them.

        Raises:
            DistCheckpointError: naming the first that is not.
        """
        ends: dict[str, int] = defaultdict(int)
        for record in self._storage.values():
            ends[record.relative_path] = max(ends[record.relative_path], record.offset + record.length)
        for name, end in sorted(ends.items()):
            path = self.directory / name
            size = path.stat().st_size if path.is_file() else None
            if size is None or size < end:
                reason = "is missing" if size is None else f"is cut short: it has {size} bytes, and {end} were written"
                raise DistCheckpointError(f"{path} {reason}. {what_to_do(self.directory)}")

    def _resolve(self, place: CheckpointPlace) -> CheckpointPlace | None:
        if place.key in self.tensors:
            return place
        # Checkpoints with non-homogeneous layers have the layer's number in the key.
        if place.index:
            numbered = place.key.replace("decoder.layers.", f"decoder.layers.{place.index[0]}.", 1)
            if numbered in self.tensors:
                return CheckpointPlace(numbered, place.index[1:], place.axes[1:])
        return None

    def _required(self, place: CheckpointPlace) -> CheckpointPlace:
        result = self._resolve(place)
        if result is None:
            raise DistCheckpointError(f"{self.directory} has no tensor {place.key}")
        stored_axes = tuple(self.tensors[result.key].size)[: len(result.axes)]
        if stored_axes != result.axes:
            raise DistCheckpointError(
                f"{self.directory}: {result.key} is stacked {stored_axes} deep, expected {result.axes}"
            )
        return result

    def _chunks_at(self, place: CheckpointPlace) -> list[ChunkStorageMetadata]:
        depth = len(place.index)
        by_index = self._chunks.get((place.key, depth))
        if by_index is None:
            by_index = defaultdict(list)
            for chunk in self.tensors[place.key].chunks:
                by_index[tuple(chunk.offsets)[:depth]].append(chunk)
            self._chunks[place.key, depth] = by_index
        return by_index.get(place.index, [])

    def _load(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        with self._record(key, chunk) as (stream, record):
            return torch.load(_plain_record(stream, record), map_location="cpu", weights_only=True)

    def _locate(self, key: str, chunk: ChunkStorageMetadata) -> tuple[Path, int] | None:
        """File and byte at which a chunk's elements begin, if they lie there in order."""
        index = (key, tuple(chunk.offsets))
        if index not in self._located:
            with self._record(key, chunk) as (stream, record):
                if record.transform_descriptors:  # compressed: its elements lie nowhere
                    self._located[index] = None
                    return None
                frame = _frame(tuple(chunk.sizes), self.tensors[key].properties.dtype)
                stream.seek(record.offset)
                if stream.read(len(frame.head)) == frame.head and record.length == frame.nbytes:
                    # As this and Megatron's writer leave nearly all: no need to unpickle it.
                    end = os.fstat(stream.fileno()).st_size
                    if end < record.offset + record.length:
                        raise EOFError
                    self._located[index] = (self.directory / record.relative_path, record.offset + len(frame.head))
                    return self._located[index]
                data, contiguous = _data_of_record(stream, record.offset, record.length)
                self._located[index] = (self.directory / record.relative_path, data) if contiguous else None
        return self._located[index]

    @contextmanager
    def _record(self, key: str, chunk: ChunkStorageMetadata) -> Iterator[tuple[Any, _StorageInfo]]:
        record = self._storage[MetadataIndex(key, chunk.offsets)]
        path = self.directory / record.relative_path
        try:
            with open(path, "rb") as stream:
                yield stream, record
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            end, size = record.offset + record.length, path.stat().st_size if path.exists() else None
            if size is None:
                reason = "the file is missing"
            elif size < end:
                reason = f"the file is cut short: it has {size} bytes, and this tensor's end at {end}"
            else:
                reason = f"the file is damaged ({error or type(error).__name__})"
            raise DistCheckpointError(
                f"{path}: cannot read {key} at byte {record.offset}: {reason}. {what_to_do(self.directory)}"
            ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _plain_record(stream: Any, record: _StorageInfo) -> Any:
    """A record as ``torch.save`` wrote it, before it was compressed."""
    view: Any = _create_file_view(stream, record.offset, record.length)
    for extension in ExtensionRegistry().from_descriptor_list(record.transform_descriptors or ()):
        assert isinstance(extension, StreamTransformExtension)
        view = extension.transform_from(view)
    if view.seekable():
        return view
    try:
        return io.BytesIO(view.read(-1))
    except Exception as error:  # zstandard's own kind, whose base is Exception
        raise ValueError(f"its compressed data: {error}") from error


def _data_of_record(stream: Any, position: int, length: int) -> tuple[int, bool]:
    """Where in ``stream`` the elements of a ``torch.save`` record begin, and whether they lie in order."""
    view: Any = _create_file_view(stream, position, length)
    described = torch.load(view, map_location="meta", weights_only=True)
    begin = position + described.untyped_storage()._checkpoint_offset
    return begin + described.storage_offset() * described.element_size(), described.is_contiguous()


def _rows_of(chunk: ChunkStorageMetadata, depth: int) -> tuple[int, int]:
    """First row of a parameter that a chunk holds, and the one after the last."""
    first = chunk.offsets[depth]
    return first, first + chunk.sizes[depth]
