"""Directories of models: output that appears complete or not at all, and where the input lies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from conversion.files.checksums import CHECKPOINT_NAME, FileRecord, write_marker
from conversion.files.checksums import COMPLETE_NAME as COMPLETE_NAME

COMPANIONS = "hf"
"""Sub-directory of a Megatron-Core checkpoint with config.json, tokenizer and generation config."""
FORMAT_NAME = "metadata.json"
"""In every distributed checkpoint of Megatron-Core: how its files are written."""
REPORT_NAME = "conversion.json"
"""What a conversion to Megatron-Core says of itself, in the checkpoint."""
_INCOMPLETE = ".incomplete"
_REPLACED = ".replaced"


@contextmanager
def new_directory(
    target: Path,
    *,
    sources: Sequence[Path] = (),
    overwrite: bool = False,
    needed_bytes: int = 0,
    records: Mapping[str, FileRecord] | None = None,
) -> Iterator[Path]:
    """A temporary directory beside ``target`` that takes its name when the block ends well, and is removed otherwise.

    The COMPLETE marker, with the checksums of all files, and every directory entry are fsynced before the rename.
    The process holds a lock on the temporary directory. A later call for the same target removes the temporary
    directories of processes that were killed, whose locks are free.

    Args:
        sources: directories and files that the block reads, which ``target`` must not overlap.
        overwrite: replace an existing ``target``; it stays intact until the new one is complete.
        needed_bytes: about how much is going to be written.
        records: of files whose writers make them while the block runs; the other files are read once more for theirs.

    Raises:
        FileExistsError: as ``check_target``.
        OSError: the file system has less room than ``needed_bytes``.
    """
    target = target.absolute()
    check_target(target, sources, overwrite=overwrite)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(
            f"{error.filename} is a file where {target} needs a directory: choose another"
        ) from None
    _remove_leftovers(target)
    check_target(target, sources, overwrite=overwrite)
    check_free_space(target.parent, needed_bytes)
    temporary, lock = _make_locked(target)
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
        check_target(target, sources, overwrite=overwrite)
        publish(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def check_target(target: Path, sources: Sequence[Path] = (), *, overwrite: bool = False) -> None:
    """Refuse a target whose making would lose files that no conversion has written.

    Args:
        sources: what is read. Symbolic links and mounts of the same directory elsewhere are followed.
        overwrite: accept a target that a conversion has completed.

    Raises:
        FileExistsError: ``target`` is a symbolic link, a file, or a directory that is not empty and lacks the COMPLETE
            marker, belongs to a training run, or is there without ``overwrite``; or it overlaps one of ``sources``.
    """
    if target.is_symlink():
        raise FileExistsError(
            f"{target} is a symbolic link to {os.readlink(target)}: name the directory itself, or remove the link"
        )
    for source in sources:
        relation = _overlap(target, source)
        if relation is not None:
            raise FileExistsError(f"the target {target} {relation} {source}, which is read: choose another directory")
    if not target.exists():
        return
    if not target.is_dir():
        raise FileExistsError(f"{target} is a file: choose another name, or remove it")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(f"{target} exists and is not empty: choose another directory, or pass --overwrite")
    if not (target / COMPLETE_NAME).is_file():
        raise FileExistsError(
            f"{target} has no {COMPLETE_NAME} marker, so no conversion has completed it and --overwrite does not "
            "delete it: choose another directory, or remove this one by hand"
        )
    if _is_of_training(target):
        raise FileExistsError(
            f"{target} is a checkpoint of training, with its optimizer, and --overwrite does not delete it: choose "
            "another directory"
        )


def _is_of_training(target: Path) -> bool:
    return (target / "learner").is_dir() or (
        target.name == "learner" and CHECKPOINT_NAME.fullmatch(target.parent.name) is not None
    )


def _overlap(target: Path, source: Path) -> str | None:
    """How the target overlaps what is read, "is inside" for instance; None: it does not."""
    if not source.exists():
        return None
    place, read = target.resolve(), source.resolve()
    if _is_same(place, read):
        return "is"
    if any(_is_same(above, read) for above in place.parents):
        return "is inside"
    if any(_is_same(place, above) for above in read.parents):
        return "is above"
    if not place.is_dir():
        return None
    inside = {_identity(Path(directory)) for directory, _, _ in os.walk(place)}
    if _identity(read) in inside:
        return "is above"
    result = [Path(directory) / file for directory, _, files in os.walk(read) for file in files]
    linked = [path.resolve() for path in result if path.is_symlink()]
    if any(place in path.parents for path in linked):
        return "holds files of"
    return None


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a file from every other, whichever path leads to it; None: there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _is_same(one: Path, two: Path) -> bool:
    identity = _identity(one)
    return one == two or (identity is not None and identity == _identity(two))


def _make_locked(target: Path) -> tuple[Path, int]:
    """A new temporary directory for ``target``, and a descriptor that holds its lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=_INCOMPLETE, dir=target.parent))
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # a file system without locks: there leftovers stay
            fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return path, lock
        os.close(lock)  # another process took it for a leftover before it was locked


def _remove_leftovers(target: Path) -> None:
    """Remove what processes that were killed have left beside ``target``; put back what one of them had moved away."""
    made = re.compile(rf"\.{re.escape(target.name)}\.[a-z0-9_]{{8}}{re.escape(_INCOMPLETE)}(?:{re.escape(_REPLACED)})?")
    for path in sorted(target.parent.iterdir()):
        if not made.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid != os.getuid():
                    continue
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.name.endswith(_REPLACED) and not target.exists():
                    os.rename(path, target)
                else:
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def publish(temporary: Path, target: Path) -> None:
    """Rename ``temporary`` to ``target``; what ``target`` was is moved aside first and removed afterwards."""
    replaced: Path | None = None
    if target.exists():
        replaced = temporary.with_name(f"{temporary.name}{_REPLACED}")
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
