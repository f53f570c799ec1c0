"""Files that grow by whole records."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


class AppendFile:
    """Appends records to ``path``; one that cannot be written leaves no part of it there, and comes with the next."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting = b""

    def append(self, record: bytes) -> None:
        """Write and fsync everything that waits, then ``record``.

        Raises:
            OSError: nothing of it was written.
        """
        self._waiting += record
        # Opened each time: on a network file system a file that was open when its server returned stays unusable.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            end = os.fstat(descriptor).st_size
            try:
                left = memoryview(self._waiting)
                while left:
                    left = left[os.write(descriptor, left) :]
                os.fsync(descriptor)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, end)
                raise
        finally:
            os.close(descriptor)
        self._waiting = b""

    def close(self) -> None:
        """Try once more to write what waits."""
        if self._waiting:
            with contextlib.suppress(OSError):
                self.append(b"")
