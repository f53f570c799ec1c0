"""Runs of bytes in files: read into tensors ahead of their use, written and hashed in one go.

Whoever writes a span never reads it again: its checksum is made of the bytes as they pass.  Blocks are small enough to
stay in the processor's cache between reading, hashing and writing.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from conversion.files.checksums import FilePart

BLOCK_BYTES = 2**20
"""Of a tensor, as it goes from file to file."""
AHEAD_BYTES = 2**24
"""How much the kernel is asked to fetch before it is needed."""
_WRITE_BACK_BYTES = 2**25


def block_rows(row_bytes: int) -> tuple[int, int]:
    """How many rows make a block, and how many to fetch ahead; at least one of each."""
    return max(1, BLOCK_BYTES // max(1, row_bytes)), max(1, AHEAD_BYTES // max(1, row_bytes))


def read_into(out: Tensor, path: Path, offset: int) -> None:
    """Fill a contiguous CPU tensor with the bytes of a file from ``offset`` on.

    Raises:
        EOFError: the file ends before the tensor does.
        OSError: it cannot be read.
    """
    buffer = tensor_bytes(out)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        done = 0
        while done < len(buffer):
            count = os.preadv(descriptor, [buffer[done:]], offset + done)
            if count == 0:
                raise EOFError(f"{path} ends at byte {offset + done}, before {offset + len(buffer)}")
            done += count
    finally:
        os.close(descriptor)


def fetch(path: Path, offset: int, length: int) -> None:
    """Ask the kernel to have bytes of a file in memory soon; returns at once."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(descriptor)


class SpanWriter:
    """Writes a file from ``position`` on, one piece after another, and hashes what it writes.

    Several may write different spans of one file at a time.
    """

    def __init__(self, descriptor: int, position: int = 0) -> None:
        self.start = self.position = position
        self._descriptor = descriptor
        self._digest = xxhash.xxh3_128()
        self._written_back = position

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``.

        Raises:
            OSError: it cannot be written.
        """
        view = memoryview(data)
        self._digest.update(view)
        done = 0
        while done < len(view):
            done += os.pwrite(self._descriptor, view[done:], self.position + done)
        self.position += done
        if self.position - self._written_back >= _WRITE_BACK_BYTES:
            # Begins to write these pages to the disk, which is then at work before the fsync at the end.
            length = self.position - self._written_back
            os.posix_fadvise(self._descriptor, self._written_back, length, os.POSIX_FADV_DONTNEED)
            self._written_back = self.position

    def write_tensor(self, tensor: Tensor) -> None:
        """Append the elements of a CPU tensor in order."""
        if tensor.numel():
            self.write(tensor_bytes(tensor.contiguous()))

    @property
    def part(self) -> FilePart:
        """What was written so far."""
        return FilePart(self.position - self.start, self._digest.hexdigest())


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, which the view shares."""
    return tensor.view(-1).view(torch.uint8).numpy().data
