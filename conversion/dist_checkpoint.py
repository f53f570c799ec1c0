"""Megatron-Core distributed checkpoints (``torch_dist``) written and read one parameter at a time, without a model.

``megatron.core.dist_checkpointing`` saves from a built model and loads into one, which needs the whole model in memory
and a process group.  The converters need neither: a chunk of a tensor is a ``torch.save`` record in one of the
``.distcp`` files, and ``.metadata`` says which record covers which part of which tensor.  What ``ChunkWriter`` and
``write_metadata`` leave behind, ``megatron.core.dist_checkpointing`` loads into any layout; ``DistCheckpoint`` reads
what they, or Megatron itself, wrote.
"""

from __future__ import annotations

import json
import os
import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
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

from conversion.weight_map import CheckpointPlace

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
    """Appends chunks to one ``.distcp`` file; ``close`` makes it durable."""

    def __init__(self, directory: Path, file: str) -> None:
        self.file = file
        self.chunks: list[Chunk] = []
        self._stream = open(directory / file, "wb")  # noqa: SIM115 (closed by close)

    def write(self, place: CheckpointPlace, shape: tuple[int, ...], tensor: Tensor, offsets: tuple[int, ...]) -> None:
        """Store ``tensor`` as the part of the parameter of ``shape`` that begins at ``offsets`` (own axes only)."""
        # A record keeps its tensor's whole storage: a view would drag the rest of its parent along.
        if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        stacked = tensor.contiguous().view(*(1 for _ in place.index), *tensor.shape)
        position = self._stream.tell()
        torch.save(stacked, self._stream)
        self.chunks.append(
            Chunk(
                key=place.key,
                global_shape=(*place.axes, *shape),
                offsets=(*place.index, *offsets),
                sizes=tuple(stacked.shape),
                dtype=tensor.dtype,
                file=self.file,
                position=position,
                length=self._stream.tell() - position,
            )
        )

    def close(self) -> None:
        """Flush to disk."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()

    def __enter__(self) -> ChunkWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
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
    metadata = Metadata(tensors, planner_data=None, storage_data=storage, storage_meta=StorageMeta())
    with open(directory / METADATA_NAME, "wb") as stream:
        pickle.dump(metadata, stream)
        _sync(stream)
    with open(directory / COMMON_NAME, "wb") as stream:
        torch.save({**common, "content_metadata": dict(SHARDING_METADATA)}, stream)
        _sync(stream)
    with open(directory / FORMAT_NAME, "w", encoding="utf-8") as text:
        json.dump(FORMAT, text)
        _sync(text)


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
        metadata = FileSystemReader(self.directory).read_metadata()
        self.tensors: dict[str, TensorStorageMetadata] = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.objects: frozenset[str] = frozenset(metadata.state_dict_metadata.keys() - self.tensors.keys())
        self._storage: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
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
        record = self._storage[MetadataIndex(key, chunk.offsets)]
        path = self.directory / record.relative_path
        try:
            with open(path, "rb") as stream:
                view = _create_file_view(stream, record.offset, record.length)
                return torch.load(view, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise DistCheckpointError(f"{path}: cannot read {key} at byte {record.offset}: {error}") from error


def _sync(stream: Any) -> None:
    stream.flush()
    os.fsync(stream.fileno())
