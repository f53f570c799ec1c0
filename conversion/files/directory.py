"""Directories of models: output that appears complete or not at all, and where the input lies."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from conversion.files.checksums import COMPLETE_NAME as COMPLETE_NAME
from conversion.files.checksums import FileRecord, write_marker

COMPANIONS = "hf"
"""Sub-directory of a Megatron-Core checkpoint with config.json, tokenizer and generation config."""
REPORT_NAME = "conversion.json"
"""What a conversion to Megatron-Core says of itself, in the checkpoint."""


@contextmanager
def new_directory(
    target: Path,
    *,
    overwrite: bool = False,
    needed_bytes: int = 0,
    records: Mapping[str, FileRecord] | None = None,
) -> Iterator[Path]:
    """A temporary directory beside ``target`` that takes its name when the block ends well, and is removed otherwise.

    The COMPLETE marker, with the checksums of all files, and every directory entry are fsynced before the rename.

    Args:
        overwrite: replace an existing ``target``; it stays intact until the new one is complete.
        needed_bytes: about how much is going to be written.
        records: of files whose writers make them while the block runs; the other files are read once more for theirs.

    Raises:
        FileExistsError: ``target`` exists and is not empty.
        OSError: the file system has less room than ``needed_bytes``.
    """
    target = target.absolute()
    if target.exists() and not overwrite and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not empty: choose another directory, or pass --overwrite")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(
            f"{error.filename} is a file where {target} needs a directory: choose another"
        ) from None
    check_free_space(target.parent, needed_bytes)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".incomplete", dir=target.parent))
    try:
        # mkdtemp's mode is for secrets; the checkpoint is read by whoever may read its neighbours.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)
        yield temporary
        write_marker(temporary, records)
        for directory, _, files in os.walk(temporary):
            for file in files:
                _fsync(Path(directory) / file)
            _fsync(Path(directory))
        publish(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def publish(temporary: Path, target: Path) -> None:
    """Rename ``temporary`` to ``target``; what ``target`` was is moved aside first and removed afterwards."""
    replaced: Path | None = None
    if target.exists():
        replaced = temporary.with_name(f"{temporary.name}.replaced")
        os.rename(target, replaced)
    try:
        os.rename(temporary, target)
    except BaseException:
        if replaced is not None:
            os.rename(replaced, target)
        raise
    _fsync(target.parent)
    if replaced is not None:
        shutil.rmtree(replaced)


def check_free_space(directory: Path, needed_bytes: int) -> None:
    """Refuse to begin what the file system cannot hold.

    Raises:
        OSError: naming the directory, the room that is needed and the room that is there.
    """
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        raise OSError(
            f"{directory} has {size_text(free)} free, and {size_text(needed_bytes)} are going to be written: "
            "free some space or choose another directory"
        )


def size_text(count: int) -> str:
    """A number of bytes in the unit that shows it, such as "812 bytes" or "3.4 GiB"."""
    size, units = float(count), ("bytes", "KiB", "MiB", "GiB", "TiB")
    for unit in units:
        if size < 1024 or unit == units[-1]:
            break
        size /= 1024
    return f"{count} bytes" if unit == "bytes" else f"{size:.1f} {unit}"


def local_directory(path_or_id: str) -> Path:
    """``path_or_id`` if it is a directory, else the local copy of the hub repository of that id, fetched if needed.

    Raises:
        FileNotFoundError: it is neither.
    """
    if Path(path_or_id).is_dir():
        return Path(path_or_id)
    if path_or_id.count("/") != 1 or path_or_id.startswith((".", "/")):
        raise FileNotFoundError(f"{path_or_id} is neither a directory nor a hub id (owner/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(path_or_id, ignore_patterns=["*.bin", "*.pth", "*.gguf", "*.onnx", "original/*"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, OSError) as error:
        raise FileNotFoundError(f"{path_or_id} is no directory here, and the hub did not give it: {error}") from error


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
