"""Megatron-Core distributed checkpoints (``torch_dist``) written and read one parameter at a time, without a model.

``megatron.core.dist_checkpointing`` saves from a built model and loads into one, which needs the whole model in memory
and a process group.  The converters need neither: a chunk of a tensor is a ``torch.save`` record in one of the
``.distcp`` files, and ``.metadata`` says which record covers which part of which tensor.  What ``ChunkWriter`` and
``write_metadata`` leave behind, ``megatron.core.dist_checkpointing`` loads into any layout; ``DistCheckpoint`` reads
what they, or Megatron itself, wrote.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
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

from conversion.files.byte_ranges import ByteRange, RangeCopier, tensor_bytes, write_at_position
from conversion.files.checksums import what_to_do
from conversion.model.weight_map import CheckpointPlace

METADATA_NAME = ".metadata"
COMMON_NAME = "common.pt"
FORMAT_NAME = "metadata.json"
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


class DistCheckpointError(ValueError):
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
        self._copier = RangeCopier()
        # Unbuffered: the data is written past the stream, which must not hold anything back.
        self._stream = open(directory / file, "w+b", buffering=0)  # noqa: SIM115 (closed by __exit__)

    def write(
        self,
        place: CheckpointPlace,
        shape: tuple[int, ...],
        offsets: tuple[int, ...],
        content: Tensor | tuple[tuple[int, ...], torch.dtype, list[ByteRange]],
    ) -> None:
        """Append one part of a parameter.

        Args:
            place: where the parameter belongs.
            shape: of the whole parameter.
            offsets: where the part begins in it.
            content: the part; or its shape, its dtype and the byte ranges of other files that hold it.
        """
        sizes, dtype = (tuple(content.shape), content.dtype) if isinstance(content, Tensor) else content[:2]
        stacked = (*(1 for _ in place.index), *sizes)
        position = self._stream.tell()
        # The record without its data: what is saved is uninitialised memory that nobody ever touches.
        with torch.serialization.skip_data():
            torch.save(torch.empty(stacked, dtype=dtype), self._stream)
        record = Chunk(
            key=place.key,
            global_shape=(*place.axes, *shape),
            offsets=(*place.index, *offsets),
            sizes=stacked,
            dtype=dtype,
            file=self.file,
            position=position,
            length=self._stream.tell() - position,
        )
        data, _ = _data_of_record(self._stream, record.position, record.length)
        if isinstance(content, Tensor):
            write_at_position(self._stream.fileno(), tensor_bytes(content.contiguous()), data)
        else:
            self._copier.copy(content[2], self._stream.fileno(), data)
        self._stream.seek(0, os.SEEK_END)
        self.chunks.append(record)

    def __enter__(self) -> ChunkWriter:
        self._copier.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._copier.__exit__(kind, error, trace)
        self._stream.close()


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
            metadata = FileSystemReader(self.directory).read_metadata()
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

    def row_ranges(
        self, place: CheckpointPlace, shape: tuple[int, ...], start: int, stop: int
    ) -> list[ByteRange] | None:
        """The bytes that hold rows ``start:stop`` of a parameter of ``shape``; None where its columns are split.

        Raises:
            DistCheckpointError: the checkpoint lacks the parameter or a part of it.
        """
        place = self._required(place)
        depth, row = len(place.index), torch.Size(shape[1:]).numel() * self.dtype(place).itemsize
        ranges, position = [], start
        for chunk in sorted(self._chunks_at(place), key=lambda chunk: tuple(chunk.offsets)):
            first, rows = chunk.offsets[depth], chunk.sizes[depth]
            if tuple(chunk.sizes)[depth + 1 :] != shape[1:]:
                return None
            if first <= position < first + rows and position < stop:
                location = self._locate(place.key, chunk)
                if location is None:
                    return None
                count = min(stop, first + rows) - position
                path, offset = location
                ranges.append(ByteRange(path, offset + (position - first) * row, count * row))
                position += count
        if position != stop:
            raise DistCheckpointError(f"{self.directory}: {place.key} at {place.index} lacks rows {position} to {stop}")
        return ranges

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
        found = self._resolve(place)
        if found is None:
            raise DistCheckpointError(f"{self.directory} has no tensor {place.key}")
        stored_axes = tuple(self.tensors[found.key].size)[: len(found.axes)]
        if stored_axes != found.axes:
            raise DistCheckpointError(
                f"{self.directory}: {found.key} is stacked {stored_axes} deep, expected {found.axes}"
            )
        return found

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
