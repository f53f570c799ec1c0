"""Hugging Face checkpoint directories: reading slices of their tensors, and writing sharded ones.

Reading goes through ``pread`` into tensors that the caller keeps, not through memory maps: mapped pages count as the
process's memory until the file is closed, and the converters promise to hold one layer at a time.
"""

from __future__ import annotations

import json
import os
import re
import struct
import threading
from collections import ChainMap
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Mapping as MappingABC
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from conversion.files.checksums import FilePart
from conversion.files.safetensors_headers import (
    INDEX_NAME,
    SINGLE_FILE_NAME,
    HFCheckpointError,
    check_index,
    read_header,
    weight_files,
)
from conversion.files.spans import SpanWriter, block_rows, fetch, read_into
from conversion.model.config_reader import PREDICTORS, ConfigReader
from conversion.model.mapping import FULL_PRECISION_DTYPES, Mapping, WeightMapError, check_tensors
from conversion.model.mxfp4 import BLOCK, BLOCK_BYTES, BLOCKS_SUFFIX, SCALES_SUFFIX, dequantize_mxfp4
from conversion.model.stacked import StackPart, part_of, tensor_of
from conversion.model.weight_map import IGNORED_HF_NAMES, WeightMap
from run_files.atomic_files import write_text

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


PREDICTOR_PREFIXES = ("mtp.", "model.mtp_layers.")
"""How their tensors' names begin (Qwen3-Next's and MiMo's), where they are not those of layers behind the model's."""


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies: ``offset`` in bytes from the start of ``file``."""

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.dtype.itemsize * _count(self.shape)


@dataclass(frozen=True)
class Mxfp4Stack(StoredTensor):
    """Matrices [experts, in, out] that are stored as MXFP4 [experts, out, in]; read as bfloat16.

    ``file`` and ``offset`` are those of the blocks.
    """

    blocks: StoredTensor
    scales: StoredTensor


class HFCheckpoint:
    """The safetensors of a Hugging Face model directory.

    Two tensors ``…_blocks`` and ``…_scales`` of MXFP4 are one tensor to readers, the one that they stand for.

    Attributes:
        on_disk: its tensors by name, as files have them.
        tensors: the same as readers get them.

    Raises:
        HFCheckpointError: as ``safetensors_headers.check_weight_files``, or there are no safetensors.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.on_disk: dict[str, StoredTensor] = {}
        files, index = weight_files(self.directory)
        names: dict[str, set[str]] = {}
        for file in files:
            entries = read_header(self.directory / file)
            names[file] = {entry.name for entry in entries}
            for entry in entries:
                if entry.name in self.on_disk:
                    raise HFCheckpointError(
                        f"{self.directory}: tensor {entry.name} is in {self.on_disk[entry.name].file} and in {file}"
                    )
                if entry.dtype not in _DTYPES:
                    raise HFCheckpointError(
                        f"{self.directory / file}: tensor {entry.name} has the unknown dtype {entry.dtype}"
                    )
                self.on_disk[entry.name] = StoredTensor(
                    entry.name, file, entry.shape, _DTYPES[entry.dtype], entry.offset
                )
        check_index(self.directory, index, names)
        self.tensors = dict(self.on_disk)
        for name in [name for name in self.tensors if name.endswith(BLOCKS_SUFFIX)]:
            self._join_mxfp4(name.removesuffix(BLOCKS_SUFFIX))
        self._last = threading.local()

    def _join_mxfp4(self, name: str) -> None:
        blocks = self.tensors.pop(name + BLOCKS_SUFFIX)
        where = f"{self.directory / blocks.file}: tensor {blocks.name}"
        scales = self.tensors.pop(name + SCALES_SUFFIX, None)
        if scales is None or name in self.tensors:
            other = name if scales is not None else name + SCALES_SUFFIX
            raise HFCheckpointError(f"{where} is there {'without' if scales is None else 'beside'} {other}")
        if (blocks.dtype, scales.dtype) != (torch.uint8, torch.uint8):
            raise HFCheckpointError(f"{where} has dtype {blocks.dtype} and {scales.name} {scales.dtype}, not uint8")
        if len(blocks.shape) != 4 or blocks.shape[-1] != BLOCK_BYTES or scales.shape != blocks.shape[:-1]:
            raise HFCheckpointError(
                f"{where} has shape {blocks.shape} and {scales.name} in {scales.file} {scales.shape}: expected "
                f"[experts, out, in / {BLOCK}, {BLOCK_BYTES}] and the same without the last"
            )
        experts, rows, groups, _ = blocks.shape
        shape = experts, groups * BLOCK, rows
        self.tensors[name] = Mxfp4Stack(name, blocks.file, shape, torch.bfloat16, blocks.offset, blocks, scales)

    def entry(self, name: str) -> StoredTensor:
        """A tensor, or a part of one (see ``conversion.model.stacked``), by its name; a part's place is its tensor's.

        Raises:
            HFCheckpointError: the tensor does not exist.
        """
        return self._entry(name, self.tensors)

    def _entry(self, name: str, tensors: MappingABC[str, StoredTensor]) -> StoredTensor:
        part = part_of(name)
        stored = tensors.get(name if part is None else part.tensor)
        if stored is None:
            raise HFCheckpointError(f"{self.directory} has no tensor {name}")
        if part is None:
            return stored
        return StoredTensor(name, stored.file, part.shape(stored.shape), stored.dtype, stored.offset)

    def check(self, weight_map: WeightMap) -> None:
        """Hold every tensor's name, shape and dtype against the model's weight map, without reading data.

        Raises:
            HFCheckpointError: a tensor is missing or is not known to the family.
            WeightMapError: a tensor has the wrong shape or dtype.
        """
        missing = sorted(weight_map.hf_names - self.tensors.keys())
        if missing:
            raise HFCheckpointError(f"{self.directory} lacks {_some(missing)}, which {self._family(weight_map)} needs")
        known = set(weight_map.hf_names)
        extra = sorted(n for n in self.tensors if n not in known and not IGNORED_HF_NAMES.search(n))
        if weight_map.architecture.tie_word_embeddings and weight_map.output_name in extra:
            extra.remove(weight_map.output_name)
            self._check_tied_copy(weight_map.output_name, weight_map.embedding_name)
        predictors = set(self._of_predictors(extra, weight_map.architecture.num_layers))
        extra = [name for name in extra if name not in predictors]
        if extra:
            raise HFCheckpointError(
                f"{self.directory} holds {_some(extra)}, which {self._family(weight_map)} does not have"
            )
        for name in {
            tensor_of(name): None for mapping in weight_map if mapping.is_stacked for name in mapping.hf_names
        }:
            stack, expected = self.tensors[name], weight_map.hf_shapes[name]
            if stack.shape != expected:
                raise WeightMapError(
                    f"{name} in {self.directory / stack.file} has shape {stack.shape}, but config.json implies "
                    f"{expected}: config.json and the weights do not belong together"
                )
        for mapping in weight_map:
            entries = [self.entry(name) for name in mapping.hf_names]
            check_tensors(mapping, [t.shape for t in entries], [t.dtype for t in entries], str(self.directory))

    def predictors(self, layers: int) -> list[str]:
        """Names of the tensors of layers for multi-token prediction behind the model's ``layers``; ascending."""
        return sorted(self._of_predictors(list(self.tensors), layers))

    @property
    def predictors_key(self) -> str | None:
        """The key of config.json that counts layers for multi-token prediction; None: it announces none."""
        key, count = self._predictors()
        return key if count else None

    def _of_predictors(self, names: Sequence[str], layers: int) -> list[str]:
        behind = range(layers, layers + self._predictors()[1])
        return [name for name in names if name.startswith(PREDICTOR_PREFIXES) or _layer(name) in behind]

    def _predictors(self) -> tuple[str, int]:
        """Key and number of the layers for multi-token prediction that config.json speaks of."""
        config = self.directory / "config.json"
        result = ConfigReader(json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {})
        counts = {key: result.integer(key, 0, least=0) for key in PREDICTORS}
        return next(((key, count) for key, count in counts.items() if count), (PREDICTORS[0], 0))

    def _check_tied_copy(self, head_name: str, embedding_name: str) -> None:
        head, embedding = self.tensors[head_name], self.tensors[embedding_name]
        same = head.shape == embedding.shape and head.dtype == embedding.dtype
        step = max(1, 2**24 // max(1, _count(head.shape[1:])))
        for start in range(0, head.shape[0] if same else 0, step):
            stop = min(start + step, head.shape[0])
            rows = (start, stop)
            same = same and torch.equal(self.read(head_name, rows), self.read(embedding_name, rows))
        if not same:
            raise HFCheckpointError(
                f"{self.directory}: config.json ties the embeddings (tie_word_embeddings), but {head_name} differs "
                f"from {embedding_name}: set tie_word_embeddings to false to keep both"
            )

    def _family(self, weight_map: WeightMap) -> str:
        return f"a {weight_map.architecture.family} model of {weight_map.architecture.num_layers} layers"

    def read(self, name: str, rows: tuple[int, int] | None = None, out: Tensor | None = None) -> Tensor:
        """Tensor ``name``, or its rows ``rows``; into ``out`` (contiguous, same shape and dtype) where it is given.

        Raises:
            HFCheckpointError: the tensor does not exist or the file ends before it does.
        """
        stored, part = self._entry(name, ChainMap(self.on_disk, self.tensors)), part_of(name)
        start, stop = (0, stored.shape[0] if stored.shape else 1) if rows is None else rows
        if out is None:
            out = torch.empty((stop - start, *stored.shape[1:]) if stored.shape else (), dtype=stored.dtype)
        if part is not None:
            out.copy_(part.of(self._element(part))[start:stop])
        elif isinstance(stored, Mxfp4Stack):
            for index in range(start, stop):
                out[index - start].copy_(self._dequantized(stored, index))
        else:
            self._fill(out, stored, start)
        return out

    def _fill(self, out: Tensor, stored: StoredTensor, row: int) -> None:
        """Read ``out`` from row ``row`` of a tensor on."""
        path = self.directory / stored.file
        if out.numel():
            try:
                read_into(out, path, stored.offset + row * _count(stored.shape[1:]) * stored.dtype.itemsize)
            except EOFError:
                raise HFCheckpointError(f"{path} ends inside tensor {stored.name}: fetch the file again") from None

    def _element(self, part: StackPart) -> Tensor:
        """The element of a stack that a part is of; each thread keeps the last, and asks for its parts in turn."""
        key = part.tensor, part.index
        if getattr(self._last, "key", None) != key:
            stored = self.tensors[part.tensor]
            if isinstance(stored, Mxfp4Stack):
                element = self._dequantized(stored, part.index)
            else:
                element = torch.empty(stored.shape[1:], dtype=stored.dtype)
                self._fill(element, stored, part.index)
            self._last.key, self._last.element = key, element
        return self._last.element

    def _dequantized(self, stored: Mxfp4Stack, index: int) -> Tensor:
        """bfloat16 [in, out]."""
        blocks, scales = (torch.empty(each.shape[1:], dtype=torch.uint8) for each in (stored.blocks, stored.scales))
        self._fill(blocks, stored.blocks, index)
        self._fill(scales, stored.scales, index)
        return dequantize_mxfp4(blocks, scales).t()

    def row_blocks(self, mapping: Mapping, start: int, stop: int) -> Iterator[Tensor]:
        """``read_rows`` in blocks of whole rows, top to bottom, while the kernel fetches what comes next."""
        dtype = self.entry(mapping.hf_names[0]).dtype
        row_bytes = _count(mapping.mcore_shape[1:]) * dtype.itemsize
        (step, ahead), fetched = block_rows(row_bytes), start
        for low in range(start, stop, step):
            while fetched < min(low + step + ahead, stop):
                self._fetch(mapping, fetched, min(fetched + ahead, stop))
                fetched += ahead
            yield self.read_rows(mapping, low, min(low + step, stop))

    def _fetch(self, mapping: Mapping, start: int, stop: int) -> None:
        for segment in mapping.row_segments(start, stop):
            if segment.source is not None and not mapping.is_stacked:
                stored = self._place(mapping.hf_names[segment.source])
                row_bytes = _count(stored.shape[1:]) * stored.dtype.itemsize
                length = (segment.stop - segment.start) * row_bytes
                fetch(self.directory / stored.file, stored.offset + segment.start * row_bytes, length)

    def _place(self, name: str) -> StoredTensor:
        """Where the rows of a tensor lie."""
        return self.on_disk[name]

    def read_rows(self, mapping: Mapping, start: int, stop: int) -> Tensor:
        """Rows ``start:stop`` of a full Megatron-Core parameter, on the CPU in the stored dtype.

        Only these rows are read, each run of them straight to its place.
        """
        dtype = self.entry(mapping.hf_names[0]).dtype
        part = torch.empty(stop - start, *mapping.mcore_shape[1:], dtype=dtype)
        position = 0
        for segment in mapping.row_segments(start, stop):
            target = part[position : position + segment.stop - segment.start]
            if segment.source is None:
                target.zero_()
            else:
                self.read(mapping.hf_names[segment.source], (segment.start, segment.stop), target)
            position += segment.stop - segment.start
        return part

    def read_shard(self, mapping: Mapping, tp_size: int = 1, tp_rank: int = 0) -> Tensor:
        """One tensor-parallel rank's part of a Megatron-Core parameter; it reads no other rank's rows."""
        blocks = [self.read_rows(mapping, start, stop) for start, stop in mapping.shard_rows(tp_size, tp_rank)]
        part = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        columns = mapping.shard_columns(tp_size, tp_rank)
        return part if columns is None else part[:, columns[0] : columns[1]].contiguous()


def _layer(name: str) -> int:
    """Number of the layer that a tensor belongs to; -1: of none."""
    result = re.match(r"model\.layers\.(\d+)\.", name)
    return int(result[1]) if result else -1


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that is going to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.dtype.itemsize * _count(self.shape)


def plan_files(groups: Iterable[Sequence[TensorSpec]], max_file_bytes: int) -> list[tuple[str, list[TensorSpec]]]:
    """Distribute tensors over safetensors files, in order; a group (one parameter's tensors) is never torn apart.

    Returns:
        (file name, tensors) pairs; a single file is called model.safetensors.
    """
    files: list[list[TensorSpec]] = [[]]
    filled = 0
    for group in groups:
        size = sum(spec.nbytes for spec in group)
        if files[-1] and filled + size > max_file_bytes:
            files.append([])
            filled = 0
        files[-1].extend(group)
        filled += size
    if len(files) == 1:
        return [(SINGLE_FILE_NAME, files[0])]
    return [(f"model-{i + 1:05d}-of-{len(files):05d}.safetensors", specs) for i, specs in enumerate(files)]


class FileWriter:
    """Writes one safetensors file, or the part of it that holds ``specs[start:stop]``, while others write the rest.

    The first part holds the header too. The file is made durable by ``new_directory``, together with its neighbours.

    Args:
        specs: all tensors of the file, in order.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec], start: int = 0, stop: int | None = None) -> None:
        self._path = path
        header = _header(specs)
        self._remaining = iter(specs[start:stop])
        position = len(header) + sum(spec.nbytes for spec in specs[:start])
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        self._span = SpanWriter(self._descriptor, position if start else 0)
        if start == 0:
            self._span.write(header)

    def write(self, name: str, blocks: Iterable[Tensor]) -> None:
        """Write the next tensor, whose elements ``blocks`` hold in order.

        Raises:
            HFCheckpointError: another one is next, or the blocks depart from what was announced.
        """
        spec = next(self._remaining, None)
        if spec is None or name != spec.name:
            raise HFCheckpointError(f"{self._path}: expected {spec}, got {name}")
        begin = self._span.position
        for block in blocks:
            if block.dtype != spec.dtype:
                raise HFCheckpointError(f"{self._path}: expected {spec}, got {block.dtype}")
            self._span.write_tensor(block)
        written = self._span.position - begin
        if written != spec.nbytes:
            raise HFCheckpointError(f"{self._path}: expected {spec} of {spec.nbytes} bytes, got {written}")

    @property
    def part(self) -> FilePart:
        """What was written so far."""
        return self._span.part

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)


def _header(specs: Sequence[TensorSpec]) -> bytes:
    """How a safetensors file of these tensors begins."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": _DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded


def write_index(directory: Path, files: Sequence[tuple[str, Sequence[TensorSpec]]]) -> None:
    """Write model.safetensors.index.json where there is more than one file."""
    if len(files) == 1:
        return
    weight_map = {spec.name: file for file, specs in files for spec in specs}
    total = sum(spec.nbytes for _, specs in files for spec in specs)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2)
    write_text(directory / INDEX_NAME, text + "\n")


def is_finite(block: Tensor) -> bool:
    """Whether none of its values is NaN or infinite; of a dtype that weights are trained in, every other one passes."""
    if not block.numel() or str(block.dtype).removeprefix("torch.") not in FULL_PRECISION_DTYPES:
        return True
    return all(bool(torch.isfinite(bound)) for bound in torch.aminmax(block))


def check_finite(broken: Iterable[str], source: Path, dtype: torch.dtype | None) -> None:
    """Refuse to write tensors with NaN or infinite values, which no model computes with.

    Args:
        broken: their names.
        source: where they were read.
        dtype: that they were cast to.

    Raises:
        HFCheckpointError: there are some.
    """
    if names := sorted(broken):
        cast = "" if dtype is None else f" as {str(dtype).removeprefix('torch.')}"
        raise HFCheckpointError(
            f"{source} holds NaN or infinite values{cast} in {_some(names)}: fetch the model again, convert an earlier "
            "checkpoint, or choose a --dtype with more range"
        )


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _some(names: Sequence[str], limit: int = 5) -> str:
    """``tensor a`` / ``tensors a, b and 7 more``."""
    shown = ", ".join(names[:limit])
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more}"
