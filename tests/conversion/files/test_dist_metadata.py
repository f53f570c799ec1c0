"""A checkpoint that was made to run code is refused by every reader, and runs nothing."""

from __future__ import annotations

import copy
import io
import os
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from conversion.files.checksums import write_marker
from conversion.files.dist_checkpoint import DistCheckpoint, DistCheckpointError
from conversion.files.dist_metadata import read_metadata
from conversion.files.weights_alone import link_weights
from conversion.hf_to_mcore import convert
from conversion.mcore_to_hf import export
from megatron_retool.learner.checkpoint.load import CheckpointError, _open


class Touch:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("hidden", ["whole", "planner_data", "version"])
def test_no_reader_runs_what_an_index_names(model_directory, tmp_path: Path, hidden: str) -> None:
    directory, sign = tmp_path / "mcore", tmp_path / "ran"
    convert(model_directory("llama"), directory, workers=1)
    metadata: object = Touch(sign)
    if hidden != "whole":
        metadata = copy.copy(read_metadata(directory))
        setattr(metadata, hidden, {"deep": [Touch(sign)]})
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    write_marker(directory)
    with pytest.raises(DistCheckpointError, match=r"\.metadata cannot be read .*names posix\.system"):
        export(directory, tmp_path / "hf", workers=1)
    with pytest.raises(DistCheckpointError, match=r"names posix\.system"):
        DistCheckpoint(directory)
    with pytest.raises(CheckpointError, match=r"names posix\.system"):
        _open(directory)
    with pytest.raises(pickle.UnpicklingError, match=r"names posix\.system"):
        link_weights(directory, tmp_path / "linked")
    assert not sign.exists()


def test_an_object_that_is_more_than_data_is_refused(model_directory, tmp_path: Path) -> None:
    directory, sign = tmp_path / "mcore", tmp_path / "ran"
    convert(model_directory("llama"), directory, workers=1)
    metadata = read_metadata(directory)
    for content, harmful in (({"step": 3}, False), (Touch(sign), True)):
        stream = io.BytesIO()
        torch.save(content, stream)
        (directory / "object.distcp").write_bytes(stream.getvalue())
        metadata.state_dict_metadata["object"] = BytesStorageMetadata()
        place = _StorageInfo("object.distcp", 0, len(stream.getvalue()))
        metadata.storage_data[MetadataIndex("object")] = place
        (directory / ".metadata").write_bytes(pickle.dumps(metadata))
        if harmful:
            with pytest.raises(DistCheckpointError, match="object object cannot be read as data"):
                DistCheckpoint(directory).check_objects()
        else:
            DistCheckpoint(directory).check_objects()
    assert not sign.exists()


def test_an_index_that_python_3_13_wrote_is_read(model_directory, tmp_path: Path) -> None:
    directory = tmp_path / "mcore"
    convert(model_directory("llama"), directory, workers=1)
    metadata = read_metadata(directory)
    metadata.storage_meta.checkpoint_id = Path("somewhere")
    names = re.compile(rb"cpathlib(\._local)?\n")  # protocol 2 has them as text
    written = names.sub(b"cpathlib._local\n", pickle.dumps(metadata, protocol=2))
    assert b"cpathlib._local\nPosixPath" in written
    (directory / ".metadata").write_bytes(written)
    assert read_metadata(directory).storage_meta.checkpoint_id == Path("somewhere")


def test_a_record_outside_the_directory_is_refused(model_directory, tmp_path: Path) -> None:
    directory = tmp_path / "mcore"
    convert(model_directory("llama"), directory, workers=1)
    metadata = read_metadata(directory)
    next(iter(metadata.storage_data.values())).relative_path = "../secret"
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DistCheckpointError, match=r"\.\./secret, outside the directory"):
        DistCheckpoint(directory)
