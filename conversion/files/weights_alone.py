"""The weights of a learner's checkpoint as a checkpoint of their own, which shares their files.

The learner writes weights and everything else (optimizer, random state) into files of their own, so that the weights
are a checkpoint like those of ``hf_to_mcore.py`` with an index of their own over the same files. These are linked, not
copied: the bytes are on the disk once, and either directory may be deleted without harm to the other.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import shutil
from pathlib import Path

import torch

from conversion.files.checksums import FileRecord, read_marker, write_marker
from conversion.files.directory import COMPANIONS
from conversion.files.dist_checkpoint import COMMON_NAME, FORMAT_NAME, METADATA_NAME, SHARDING_METADATA
from conversion.files.dist_metadata import read_metadata
from run_files.atomic_files import atomic_write

WEIGHTS_PART = "weights_"
"""In the names of the files that hold weights: __0_weights_0.distcp is rank 0's."""


def link_weights(source: Path, target: Path) -> None:
    """Make ``target`` a complete checkpoint of the weights in ``source``, a complete one that the learner wrote.

    Where the file system has no hard links the files are copied.

    Raises:
        OSError: ``target`` cannot be written.
    """
    target.mkdir()
    metadata = copy.copy(read_metadata(source))
    metadata.storage_data = {
        index: place for index, place in metadata.storage_data.items() if WEIGHTS_PART in place.relative_path
    }
    keys = {index.fqn for index in metadata.storage_data}
    metadata.state_dict_metadata = {key: entry for key, entry in metadata.state_dict_metadata.items() if key in keys}
    with atomic_write(target / METADATA_NAME) as stream:
        pickle.dump(metadata, stream)
    with atomic_write(target / COMMON_NAME) as stream:
        torch.save({"content_metadata": dict(SHARDING_METADATA)}, stream)
    names = {place.relative_path for place in metadata.storage_data.values()} | {FORMAT_NAME}
    names |= {f"{COMPANIONS}/{path.name}" for path in (source / COMPANIONS).glob("*")}
    records: dict[str, FileRecord] = read_marker(source) or {}
    for name in sorted(names):
        (target / name).parent.mkdir(exist_ok=True)
        _link(source / name, target / name)
    write_marker(target, {name: records[name] for name in names if name in records})


def _link(source: Path, target: Path) -> None:
    with contextlib.suppress(OSError):
        os.link(source, target)
        return
    shutil.copy2(source, target)
    with open(target, "rb") as copied:
        os.fsync(copied.fileno())
