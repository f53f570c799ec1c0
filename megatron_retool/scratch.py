"""A command's temporary files, in one directory that goes when the command does.

    with scratch_directory():
        ...         # temporary files of this process and of all that it starts lie in one directory, then are gone

TMPDIR names the directory, so that torch, Ray and SGLang, which leave files behind even where they end well, leave
them there. A command that is killed cannot remove its own: the next one does. A directory's owner holds a lock on it,
which the kernel takes from the dead, so that this is right between containers that share /tmp as well.

A process that makes files in shared memory leaves empty files of their names in ``shared_memory/`` of the directory:
should it be killed, they are removed with the directory (sglang_rollout/engine/process_guard.py does so).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_retool.cuda_toolkit import has_driver

VARIABLE = "MEGATRON_RETOOL_SCRATCH"
"""Names the directory to the processes that a command starts."""

RAY_DIRECTORY = "ray"
_PREFIX = "retool-run-"
_NOTES = "shared_memory"
_SHARED_MEMORY = Path("/dev/shm")
_LONGEST_SOCKET_PATH = 107
_LONGEST_NAME_IN_RAY = len("/ray/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store")
_REMOVAL_SECONDS = 2.0

_own: Path | None = None


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Make the directory, or take the one of the command that started this one; TMPDIR names it inside the block.

    First, what commands that were killed left behind is removed.
    """
    global _own
    inherited = current_scratch()
    if inherited is not None:
        yield inherited
        return
    parent = _parent()
    remove_abandoned(parent)
    path, lock = _make(parent)
    before = dict(os.environ)
    os.environ.update({VARIABLE: str(path), "TMPDIR": str(path)})
    if has_driver():
        # What was compiled for a GPU is worth keeping from run to run.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(parent / f"torchinductor_{os.getuid()}"))
    tempfile.tempdir = None  # remembered from before
    _own = path
    try:
        yield path
    finally:
        for name in (VARIABLE, "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
        tempfile.tempdir = _own = None
        _remove(path)
        os.close(lock)


def current_scratch() -> Path | None:
    """The directory of the command that this process belongs to; None where it belongs to none."""
    path = os.environ.get(VARIABLE)
    return Path(path) if path and os.path.isdir(path) else None


def remove_abandoned(parent: Path) -> list[Path]:
    """Remove directories below ``parent`` whose owners are dead, and the shared memory that they noted."""
    removed = []
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid != os.getuid():
                    continue
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)
                removed.append(path)
            finally:
                os.close(lock)
    return removed


def remove_own_scratch() -> None:
    """Remove the directory that this process has made, for one that ends without leaving the block."""
    if _own is not None:
        _remove(_own)


def _parent() -> Path:
    """Where temporary files go, if paths of Ray's sockets below it are short enough; else /tmp."""
    parent = tempfile.gettempdir()
    longest = len(parent) + len(f"/{_PREFIX}12345678") + _LONGEST_NAME_IN_RAY
    return Path(parent if longest <= _LONGEST_SOCKET_PATH else "/tmp")


def _make(parent: Path) -> tuple[Path, int]:
    """A new directory, and a descriptor that holds its lock."""
    # No process may find it under its name before it is locked.
    hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
    lock = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Snippets of code run as other users, in directories below it.
    hidden.chmod(0o711)
    path = hidden.with_name(hidden.name[1:])
    os.rename(hidden, path)
    return path, lock


def _remove(path: Path) -> None:
    for note in path.glob(f"{_NOTES}/*"):
        with contextlib.suppress(OSError):
            (_SHARED_MEMORY / note.name).unlink()
    deadline = time.monotonic() + _REMOVAL_SECONDS
    while path.exists():  # a process that is just ending may write one more file
        shutil.rmtree(path, ignore_errors=True)
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)
