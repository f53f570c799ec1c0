"""Directories that only a living owner keeps: it holds a lock on them, which the kernel takes from the dead.

A process id would not do: servers in other pid namespaces (containers, nodes of one machine) share the file system.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make_locked(directory: Path, mode: int = 0o777) -> int:
    """Make a directory and lock it; the descriptor that holds the lock.

    Raises:
        OSError: it cannot be made.
    """
    while True:
        directory.mkdir(mode, exist_ok=True)
        descriptor = os.open(directory, _FLAGS)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Another server may have taken the new, not yet locked directory for an abandoned one.
        with contextlib.suppress(FileNotFoundError):
            if os.stat(directory).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)


def abandoned(parent: Path, pattern: str) -> Iterator[Path]:
    """This user's directories ``parent/pattern`` that are not locked; each is locked while the caller has it."""
    for path in parent.glob(pattern):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, _FLAGS)
            try:
                if os.fstat(descriptor).st_uid != os.getuid():
                    continue
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path
            finally:
                os.close(descriptor)
