"""Reads the index of a distributed checkpoint without running what it says.

``.metadata`` is a pickle, which may name any function to be called while it is read. This reader knows the classes that
``torch.distributed.checkpoint`` writes there and refuses every other name.
"""

from __future__ import annotations

import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from numpy._core import multiarray
from torch.distributed.checkpoint.metadata import Metadata

METADATA_NAME = ".metadata"
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # where Python 3.13 has it, and 3.12 has not
            module = "pathlib"
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(
                f"it names {module[:80]}.{name[:80]}, which no index of a checkpoint has: do not load it elsewhere"
            )
        return super().find_class(module, name)


def read_metadata(directory: Path) -> Metadata:
    """The index of a checkpoint's directory.

    Raises:
        pickle.UnpicklingError: it names a class that no index has, and may have been made to run code.
        ValueError: it is no index, or names files outside the directory.
        Exception: its bytes are damaged, which unpickling reports in many ways.
    """
    with open(directory / METADATA_NAME, "rb") as stream:
        metadata = _MetadataUnpickler(stream).load()
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise ValueError(f"it holds {type(metadata).__name__} in place of an index")
    for record in (metadata.storage_data or {}).values():
        path = PurePosixPath(record.relative_path)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"it places a tensor in {str(path)[:80]}, outside the directory")
    return metadata


def load_arrays(path: str | Path) -> Any:
    """What ``torch.save`` wrote of tensors, arrays, numbers, texts and containers of them; no other class is made.

    Raises:
        pickle.UnpicklingError: the file names another class, and may have been made to run code.
    """
    kinds = [type(np.dtype(kind)) for kind in ("f4", "f8", "u1", "i2", "i4", "i8", "?")]
    # For good: at the end of a safe_globals block torch would forget those that Megatron-Core has added too.
    torch.serialization.add_safe_globals([np.ndarray, np.dtype, *kinds, multiarray._reconstruct, multiarray.scalar])
    return torch.load(path, weights_only=True)
