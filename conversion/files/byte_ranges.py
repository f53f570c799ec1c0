"""Moving tensor rows between files without a way through memory.

A conversion that keeps the dtype only rearranges rows, and rows of a contiguous tensor are bytes in a file: the kernel
copies them from one file to the other.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

_BLOCK = 2**23
_UNSUPPORTED = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)


@dataclass(frozen=True)
class ByteRange:
    """``length`` bytes of a file from ``offset`` on."""

    path: Path
    offset: int
    length: int


class RangeCopier:
    """Copies byte ranges into open files; keeps the sources open until it is closed."""

    def __init__(self) -> None:
        self._sources: dict[Path, int] = {}
        self._in_kernel = True

    def copy(self, ranges: Iterable[ByteRange], target: int, position: int) -> int:
        """Put ``ranges`` end to end into the file descriptor ``target``, from byte ``position`` on.

        Returns:
            The position after the last byte.

        Raises:
            OSError: a source is missing or ends early, or the target cannot be written.
        """
        for part in ranges:
            source = self._sources.get(part.path)
            if source is None:
                source = self._sources[part.path] = os.open(part.path, os.O_RDONLY)
            done = 0
            while done < part.length:
                count = self._some(source, target, part.length - done, part.offset + done, position + done)
                if count == 0:
                    raise OSError(f"{part.path} ends at byte {part.offset + done}, before {part.offset + part.length}")
                done += count
            position += part.length
        return position

    def _some(self, source: int, target: int, count: int, read_at: int, write_at: int) -> int:
        if self._in_kernel:
            try:
                return os.copy_file_range(source, target, count, read_at, write_at)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                self._in_kernel = False  # not between these file systems, or not in this kernel
        block = os.pread(source, min(count, _BLOCK), read_at)
        write_at_position(target, block, write_at)
        return len(block)

    def __enter__(self) -> RangeCopier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._sources.values():
            os.close(descriptor)
        self._sources.clear()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, which the view shares."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def write_at_position(target: int, data: bytes | memoryview, position: int) -> None:
    """``os.pwrite`` until all is written."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(target, view[done:], position + done)
