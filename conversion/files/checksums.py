"""Checksums of a directory's files, which its COMPLETE marker holds.

    xxh3_128 1f0c…            of everything that follows in the marker
    9d2e…+77b0… 1048576+524288 model-00001-of-00002.safetensors
    03ab… 657 config.json

A file that several writers made at a time has a hash for each one's part, with the parts' sizes, in order.
The hash is XXH3 with 128 bits: it finds every accidental change, at the speed of memory (it is no proof against someone
who changes files on purpose). A directory in a directory that has a marker of its own is listed only by that marker.
Files that came later are ignored, and so are directories whose marker is empty: earlier versions wrote those.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import xxhash

from megatron_retool.errors import InputError
from run_files.atomic_files import write_text

COMPLETE_NAME = "COMPLETE"
"""Marker file: written last, so a directory that has it has everything."""
CHECKPOINT_NAME = re.compile(r"global_step_(\d+)")
"""Names of a run's checkpoints."""
WEIGHTS_NAME = re.compile(r"weights_step_(\d+)")
"""Names of those that hold only weights."""

_ALGORITHM = "xxh3_128"
_DAMAGED_MARKER = "is damaged: it is not the list of checksums that was written"
_BLOCK = 2**22
_THREADS = 4
_LINE = re.compile(r"([0-9a-f]{32}(?:\+[0-9a-f]{32})*) (\d+(?:\+\d+)*) (.+)")
_LARGE_BYTES = 2**26


class DamagedError(InputError):
    """Files are not what they were when they were written. The message names them and says what to do."""


@dataclass(frozen=True)
class FilePart:
    """What a run of a file's bytes was when it was written."""

    bytes: int
    checksum: str


@dataclass(frozen=True)
class FileRecord:
    """What a file was when it was written: its parts, which follow each other without gap."""

    parts: tuple[FilePart, ...]

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True)
class Fault:
    """A file that is not what it was."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path} {self.reason}"


def file_record(path: Path) -> FileRecord:
    """Size and checksum of a file as it is now.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb", buffering=0) as stream:
        return FileRecord((_read_part(stream, None),))


class _Cancelled(Exception):
    """The result is not wanted any more."""


def _never() -> bool:
    return False


def _read_part(stream: FileIO, length: int | None, cancelled: Callable[[], bool] = _never) -> FilePart:
    """The next ``length`` bytes, or as many as there are; None: all that is left."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_BLOCK))
    size = 0
    while count := stream.readinto(buffer if length is None else buffer[: length - size]):
        if cancelled():
            raise _Cancelled
        digest.update(buffer[:count])
        size += count
    return FilePart(size, digest.hexdigest())


def record_files(directory: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """``file_record`` of files of a directory by their names, several at a time."""
    names = list(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: file_record(directory / name), names), strict=True))


def write_marker(directory: Path, known: Mapping[str, FileRecord] | None = None) -> None:
    """Write the COMPLETE marker of a directory whose files are all there.

    Args:
        known: records that the writers of the files made themselves, by path relative to ``directory``.

    Raises:
        OSError: a file cannot be read, or the marker cannot be written.
    """
    known = known or {}
    names = list(_files_below(directory))
    records = {**record_files(directory, [name for name in names if name not in known]), **known}
    lines = "".join(_line(name, records[name]) for name in sorted(names))
    write_text(directory / COMPLETE_NAME, f"{_ALGORITHM} {_hash_of(lines)}\n{lines}")


def _line(name: str, record: FileRecord) -> str:
    checksums = "+".join(part.checksum for part in record.parts)
    return f"{checksums} {'+'.join(str(part.bytes) for part in record.parts)} {name}\n"


def _record_of(checksums: str, sizes: str) -> FileRecord:
    pairs = zip(checksums.split("+"), sizes.split("+"), strict=True)
    return FileRecord(tuple(FilePart(int(size), checksum) for checksum, size in pairs))


def _files_below(directory: Path) -> Iterator[str]:
    for place, folders, files in os.walk(directory):
        relative = Path(place).relative_to(directory)
        if relative.parts and COMPLETE_NAME in files:
            folders.clear()
            yield str(relative / COMPLETE_NAME)
            continue
        yield from (str(relative / file) for file in files if relative.parts or file != COMPLETE_NAME)


def _hash_of(text: str) -> str:
    return str(xxhash.xxh3_128_hexdigest(text.encode()))


def read_marker(directory: Path) -> dict[str, FileRecord] | None:
    """What a directory's marker says of its files, by relative path; None: it holds no checksums.

    Raises:
        DamagedError: the marker itself is damaged.
        FileNotFoundError: there is none.
    """
    path = directory / COMPLETE_NAME
    text = path.read_bytes().decode("utf-8", errors="replace")
    head, _, lines = text.partition("\n")
    matches = [_LINE.fullmatch(line) for line in lines.split("\n")[:-1]]
    if head == f"{_ALGORITHM} {_hash_of(lines)}" and all(matches):
        return {match[3]: _record_of(match[1], match[2]) for match in matches if match}
    if any(matches) or _ALGORITHM in head or "\0" in text:
        raise DamagedError(f"{path} {_DAMAGED_MARKER}")
    return None


def has_checksums(directory: Path) -> bool:
    """Whether the directory's marker says, or was meant to say, what its files were."""
    try:
        return (directory / COMPLETE_NAME).is_file() and read_marker(directory) is not None
    except DamagedError:
        return True


def find_faults(
    directory: Path,
    *,
    part: int = 0,
    parts: int = 1,
    contents: bool = True,
    nested: bool = True,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> list[Fault]:
    """The files of a directory that are not what its marker says.

    Args:
        part: which of ``parts`` shares of the files to look at; the shares of all parts have about equally many bytes.
        contents: False: only existence and size, without reading any file but markers.
        nested: look also into directories that have a marker of their own.
        on_bytes: told the bytes of each file that has been read.

    Returns:
        Of this part, in order of their paths. A marker that is itself damaged is a fault too, of every part.
    """
    listed, faults = _listed(directory, nested)
    loads = [0] * parts
    own = []
    for path, record in sorted(listed, key=lambda item: (-item[1].bytes, item[0])):
        lightest = loads.index(min(loads))
        loads[lightest] += record.bytes + 1
        if lightest == part:
            own.append((path, record))

    def look(item: tuple[Path, FileRecord]) -> Fault | None:
        fault = _fault(*item, contents)
        on_bytes(item[1].bytes)
        return fault

    with ThreadPoolExecutor(_THREADS) as pool:
        faults += [fault for fault in pool.map(look, own) if fault is not None]
    return [fault for _, fault in sorted({fault.path: fault for fault in faults}.items())]


def _listed(directory: Path, nested: bool) -> tuple[list[tuple[Path, FileRecord]], list[Fault]]:
    """Files of a directory with what they were, and its damaged markers."""
    listed: list[tuple[Path, FileRecord]] = []
    faults: list[Fault] = []

    def read(place: Path) -> dict[str, FileRecord]:
        try:
            return (read_marker(place) or {}) if (place / COMPLETE_NAME).is_file() else {}
        except DamagedError:
            faults.append(Fault(place / COMPLETE_NAME, _DAMAGED_MARKER))
            return {}

    def add(place: Path) -> None:
        for name, record in read(place).items():
            listed.append((place / name, record))
            if nested and name.endswith(f"/{COMPLETE_NAME}"):
                add((place / name).parent)

    add(directory)
    # The directory above, as a checkpoint of its models', may list this one's marker.
    name = directory.absolute().name
    record = read(directory.absolute().parent).get(f"{name}/{COMPLETE_NAME}")
    if record is not None:
        listed.append((directory / COMPLETE_NAME, record))
    return listed, faults


def _fault(path: Path, record: FileRecord, contents: bool, cancelled: Callable[[], bool] = _never) -> Fault | None:
    try:
        size = path.stat().st_size
        if size != record.bytes:
            change = "it is cut short" if size < record.bytes else "something was added to it"
            return Fault(path, f"has {size} bytes, and {record.bytes} were written: {change}")
        if contents and not _has_parts(path, record, cancelled):
            return Fault(path, f"is damaged: its {size} bytes are not those that were written")
    except FileNotFoundError:
        return Fault(path, "is missing")
    except OSError as error:
        return Fault(path, f"cannot be read: {error}")
    return None


def _has_parts(path: Path, record: FileRecord, cancelled: Callable[[], bool]) -> bool:
    with open(path, "rb", buffering=0) as stream:
        return all(_read_part(stream, part.bytes, cancelled) == part for part in record.parts)


def verify_files(directory: str | Path, *, contents: bool = True, nested: bool = True) -> None:
    """Hold a directory's files against its checksums, where it has some.

    Args:
        contents, nested: as for ``find_faults``.

    Raises:
        DamagedError: naming the files that are not what they were, and what to do.
    """
    directory = Path(directory)
    raise_damaged(directory, find_faults(directory, contents=contents, nested=nested))


@contextmanager
def verified_meanwhile(
    directory: str | Path, needed: Callable[[Path], bool] = lambda path: True
) -> Iterator[Callable[[bool], None]]:
    """``verify_files`` while the block reads the same files, so that the disk is read once.

    Sizes, and the contents of what is not large, are verified first.

    Args:
        needed: of a path: whether the block uses the file's contents.

    Yields:
        A function that raises DamagedError where damage is known. With True it waits until all is known, as has to be
        done before what the block makes counts; with False it is to be called now and then.

    Raises:
        DamagedError: as ``verify_files``; also in place of an exception of the block that damage explains.
    """
    directory, over = Path(directory), threading.Event()
    listed, faults = _listed(directory, nested=True)
    large = [(path, record) for path, record in listed if record.bytes > _LARGE_BYTES]
    first = [(path, record, record.bytes <= _LARGE_BYTES and needed(path)) for path, record in listed]
    with ThreadPoolExecutor(_THREADS) as pool:
        faults += [fault for fault in pool.map(lambda item: _fault(*item), first) if fault is not None]
        raise_damaged(directory, faults)
        result = [pool.submit(_fault, path, record, True, over.is_set) for path, record in large if needed(path)]

        def check(wait: bool) -> None:
            done = [future.result() for future in result if wait or future.done()]
            raise_damaged(directory, [fault for fault in done if fault is not None])

        try:
            yield check
        except DamagedError:
            raise
        except (ValueError, EOFError):
            check(True)
            raise
        finally:
            over.set()
            pool.shutdown(cancel_futures=True)


def raise_damaged(directory: Path, faults: Iterable[Fault]) -> None:
    """Raise DamagedError of ``faults``, if there are any, naming each file once."""
    texts = [str(fault) for fault in {fault.path: fault for fault in faults}.values()]
    if texts:
        more = f"; and {len(texts) - 3} more files" if len(texts) > 3 else ""
        raise DamagedError(f"{'; '.join(texts[:3])}{more}. {what_to_do(directory)}")


def what_to_do(directory: Path) -> str:
    """What helps where a directory is damaged."""
    checkpoint = next((path for path in (directory, *directory.parents[:1]) if _step_of(path) is not None), None)
    if checkpoint is None:
        return (
            f"Make {directory} again, or copy it again from where it came. If a file was changed on purpose, "
            f"`megatron-retool check --renew {directory}` makes its checksums again"
        )
    earlier = sound_checkpoint_before(checkpoint)
    if earlier is None:
        return f"The checkpoint {checkpoint} cannot be used, and there is none before it: copy it again if you can"
    return (
        f"The checkpoint {checkpoint} cannot be used. The one before it is {earlier}: to train on from there, "
        f"trainer.resume_mode=resume_path trainer.resume_from_path={earlier}"
    )


def sound_checkpoint_before(checkpoint: Path) -> Path | None:
    """The newest complete checkpoint beside global_step_N of a smaller N whose files have the right sizes."""
    step = _step_of(checkpoint)
    assert step is not None
    markers = checkpoint.parent.glob(f"global_step_*/{COMPLETE_NAME}")
    steps = [(_step_of(marker.parent), marker.parent) for marker in markers]
    before = sorted(((n, path) for n, path in steps if n is not None and n < step), reverse=True)
    return next((path for _, path in before if _is_whole(path)), None)


def _is_whole(checkpoint: Path) -> bool:
    try:
        return not find_faults(checkpoint, contents=False)
    except OSError:
        return False


def _step_of(path: Path) -> int | None:
    match = CHECKPOINT_NAME.fullmatch(path.name)
    return int(match[1]) if match else None
