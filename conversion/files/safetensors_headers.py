"""Headers of safetensors files: which tensors a directory has and where they lie, read without torch and without data.

What is wrong with a directory's files is found here in milliseconds, before anything is imported or started for it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from conversion.model.architecture import Architecture
from conversion.model.weight_map import WeightMap
from megatron_retool.errors import InputError
from untrusted import load_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_FILE_NAME = "model.safetensors"
MOST_HEADER_BYTES = 100_000_000
"""As in the safetensors library."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""What an engine reads weights from."""
_ITEM_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


class HFCheckpointError(InputError):
    """The directory is incomplete or does not fit the model. The message names the file or the tensor."""


@dataclass(frozen=True)
class TensorEntry:
    """What a header says of one tensor: ``offset`` in bytes from the start of the file."""

    name: str
    dtype: str
    """In safetensors' words, such as "BF16"."""
    shape: tuple[int, ...]
    offset: int


def check_weight_files(directory: str | Path) -> None:
    """Hold the sizes of a directory's safetensors against their headers and the index.

    Raises:
        HFCheckpointError: as ``weight_files``, ``read_header`` and ``check_index``. A directory without safetensors
            passes.
    """
    directory = Path(directory)
    if not any((directory / name).exists() for name in (INDEX_NAME, SINGLE_FILE_NAME)):
        return
    files, index = weight_files(directory)
    check_index(directory, index, {file: {e.name for e in read_header(directory / file)} for file in files})


def check_tensors(directory: str | Path, architecture: Architecture) -> None:
    """Hold the tensors that a directory's headers name against those of the model that its config.json describes.

    SGLang serves a model whose files lack a tensor, with values that it makes up. Files in which no name is known pass,
    as a model beside a tower may have them; so does a directory without safetensors.

    Raises:
        HFCheckpointError: a tensor is missing or has another shape; the message names it.
    """
    directory = Path(directory)
    if not any((directory / name).exists() for name in (INDEX_NAME, SINGLE_FILE_NAME)):
        return
    files, _ = weight_files(directory)
    stored = {entry.name: (file, entry) for file in files for entry in read_header(directory / file)}
    expected = WeightMap(architecture).hf_shapes
    if not expected.keys() & stored.keys():
        return
    missing = sorted(expected.keys() - stored.keys())
    if missing:
        more = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
        raise HFCheckpointError(
            f"{directory} has no tensor {missing[0]}{more}, which config.json's {architecture.family} with "
            f"{architecture.num_layers} layers needs: fetch the weights again, or the config.json that belongs to them"
        )
    for name, shape in expected.items():
        file, entry = stored[name]
        if entry.shape != shape:
            raise HFCheckpointError(
                f"{directory / file}: tensor {name} has shape {list(entry.shape)}, and config.json implies "
                f"{list(shape)}: fetch the weights again, or the config.json that belongs to them"
            )


def check_weights_are_there(directory: Path) -> None:
    """Raise HFCheckpointError where a model's directory has no file of weights, in whatever format."""
    if not any(next(directory.glob(pattern), None) for pattern in _WEIGHTS):
        raise HFCheckpointError(f"{directory} has a config.json and no weights (*.safetensors): fetch them")


def weight_files(directory: Path) -> tuple[list[str], Mapping[str, str]]:
    """The names of a directory's safetensors, and the file of each tensor by its index; empty where it has none.

    Raises:
        HFCheckpointError: there are none, the index is damaged or names a file elsewhere, or it names others than the
            model.safetensors beside it.
    """
    index, single = directory / INDEX_NAME, directory / SINGLE_FILE_NAME
    if not index.is_file():
        if single.is_file():
            return [SINGLE_FILE_NAME], {}
        raise HFCheckpointError(
            f"{directory} has neither {INDEX_NAME} nor {SINGLE_FILE_NAME}: save the model with "
            "save_pretrained(..., safe_serialization=True)"
        )
    try:
        result = dict(load_json(index.read_bytes(), finite=False)["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HFCheckpointError(f"{index} is not a safetensors index: {what_it_is(index) or repr(error)}") from error
    for name, file in result.items():
        if not isinstance(file, str):
            raise HFCheckpointError(f"{index} places tensor {name} in {file!r:.80}, which is no file's name")
        if not file or "\0" in file or PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
            raise HFCheckpointError(f"{index} places tensor {name} in {file!r:.80}, which is no file of the directory")
    files = sorted(set(result.values()))
    if single.exists() and files != [SINGLE_FILE_NAME]:
        raise HFCheckpointError(
            f"{directory} has {SINGLE_FILE_NAME} beside an {INDEX_NAME} that names {files[0] if files else 'no file'}: "
            "transformers loads the single file and SGLang those of the index. Remove whichever is not the model's"
        )
    return files, result


def check_index(directory: Path, index: Mapping[str, str], tensors: Mapping[str, set[str]]) -> None:
    """Make sure that each tensor lies where the index says.

    Args:
        tensors: the names of the tensors in each file.

    Raises:
        HFCheckpointError: one does not.
    """
    for name, file in index.items():
        if name not in tensors[file]:
            raise HFCheckpointError(f"{directory / INDEX_NAME} places tensor {name} in {file}, which lacks it")


def read_header(path: Path) -> list[TensorEntry]:
    """The tensors of a file.

    Raises:
        HFCheckpointError: the file is missing, cut short or no safetensors, or its tensors do not fill it from end to
            end, which the safetensors library demands too.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size - 8, MOST_HEADER_BYTES):
                raise ValueError(f"its header would be {length} bytes long, and the file has {size}")
            header = load_json(stream.read(length), strict=False)
        if not isinstance(header, dict):
            raise ValueError(f"its header holds a {type(header).__name__}, where names of tensors are expected")
    except FileNotFoundError:
        raise HFCheckpointError(f"{path} is missing: fetch it") from None
    except (OSError, struct.error, ValueError) as error:
        raise HFCheckpointError(f"{path} is not a safetensors file: {what_it_is(path) or error}") from error
    entries = {name: _spanned(path, name, entry) for name, entry in header.items() if name != "__metadata__"}
    _check_spans(path, {name: span for name, (span, _, _) in entries.items()}, size - 8 - length)
    return [TensorEntry(name, dtype, shape, 8 + length + span[0]) for name, (span, dtype, shape) in entries.items()]


def _spanned(path: Path, name: str, entry: Any) -> tuple[tuple[int, int], str, tuple[int, ...]]:
    """First and end byte behind the header, dtype and shape of an entry."""
    try:
        dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sound = isinstance(dtype, str) and all(type(value) is int and value >= 0 for value in (*shape, first, last))
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise HFCheckpointError(
            f"{path}: the header's entry of tensor {name} lacks dtype, shape or data_offsets: fetch the file again"
        )
    bits = _ITEM_BITS.get(dtype)
    if bits is None:
        raise HFCheckpointError(f"{path}: tensor {name} has the unknown dtype {dtype:.40}")
    for each in shape:
        bits *= each
    if (last - first) * 8 != bits:
        raise HFCheckpointError(
            f"{path}: tensor {name} of shape {list(shape)} in {dtype} has {last - first} bytes in place of "
            f"{-(-bits // 8)}: fetch the file again"
        )
    return (first, last), dtype, shape


def _check_spans(path: Path, spans: Mapping[str, tuple[int, int]], size: int) -> None:
    """Make sure that the tensors' bytes follow one another from the header's end to the end of the file."""
    end, before = 0, "the header"
    for name, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        if last > size:
            raise HFCheckpointError(f"{path}: tensor {name} is cut short: fetch the file again")
        if first != end:
            what = f"{first - end} bytes lie unused between" if first > end else "the same bytes belong to"
            raise HFCheckpointError(f"{path}: {what} {before} and tensor {name}: fetch the file again")
        end, before = last, name
    if end != size:
        raise HFCheckpointError(f"{path}: {size - end} bytes follow the last tensor: fetch the file again")


def what_it_is(path: Path) -> str | None:
    """What lies there in place of a file, where that is easily told, and how to get the real one."""
    try:
        with open(path, "rb") as stream:
            begin = stream.read(512).lstrip().lower()
    except OSError:
        return None
    if begin.startswith(b"version https://git-lfs.github.com/spec/"):
        return f"it is a Git LFS pointer to it: run `git lfs pull` in {path.parent}, or fetch it with `hf download`"
    if begin.startswith((b"<!doctype html", b"<html")):
        return "it is a web page, as a download without permission or from a wrong address leaves: fetch the file again"
    return "it is empty: fetch the file again" if not begin else None
