"""One command at a time on a run's directory.

    with run_lock(config.trainer.run_dir, "train"):
        ...         # a second command that would write there is refused, and told who is at work

The lock is the kernel's, on a file beside the directory: it ends with its owner's process, however that ends, and
holds between nodes where the file system supports flock. The file names the owner to those who are refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_retool.config import ConfigError

ENDING_SECONDS = 120.0
"""How long a lock that is about to be free is waited for: a file server may hold the lock of a lost node so long."""
JOB_VARIABLE = "SLURM_JOB_ID"
_LOOK_SECONDS = 0.5
_LONGEST_NOTE = 4096
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


def lock_path(run_dir: Path) -> Path:
    """The lock's file: beside the directory, which may be moved while the lock is held."""
    run_dir = Path(os.path.realpath(run_dir))
    return run_dir.with_name(f".{run_dir.name}.lock")


@contextlib.contextmanager
def run_lock(run_dir: Path, command: str) -> Iterator[None]:
    """Hold the lock of ``run_dir`` for the length of the block.

    A file system without flock gives no lock: the block then runs without one.

    Args:
        command: named to those who are refused.

    Raises:
        ConfigError: another process holds it, and the message names that process; or the file cannot be made.
    """
    path = lock_path(run_dir)
    made = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_be_made(run_dir, error) from error
    job = os.environ.get(JOB_VARIABLE)
    owner = {
        "command": command,
        "host": socket.gethostname(),
        "process": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "job": job,
    }
    handle = _locked(path, run_dir, job)
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(owner).encode(), 0)
        yield
    finally:
        # Before the lock ends: afterwards the file may be another command's.
        path.unlink(missing_ok=True)
        os.close(handle)
        # A command that was refused leaves no empty directory.
        with contextlib.suppress(OSError):
            for parent in made:
                parent.rmdir()


def _locked(path: Path, run_dir: Path, job: str | None) -> int:
    """A descriptor that holds the lock."""
    deadline = time.monotonic() + ENDING_SECONDS
    while True:
        # Over NFS an exclusive lock needs a file that is open for writing.
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise _cannot_be_made(run_dir, error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return handle
            owner = _owner(handle)
            os.close(handle)
            if not isinstance(error, BlockingIOError) and error.errno != errno.EACCES:
                raise
            if not _is_ending(owner, job) or time.monotonic() > deadline:
                raise ConfigError(_refusal(run_dir, owner)) from None
            time.sleep(_LOOK_SECONDS)
            continue
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(handle)):
                return handle
        os.close(handle)  # its last owner has just removed it


def _cannot_be_made(run_dir: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{error.filename} cannot be made ({error.strerror}), which the run in {run_dir} needs: choose another "
        "trainer.runs_dir or trainer.experiment_name, or mend it"
    )


def _is_ending(owner: dict[str, Any], job: str | None) -> bool:
    """Whether the lock is about to be free: it is this job's from before its requeue, or its owner is dead and only
    processes that the owner forked, which end too, still hold it."""
    if job is not None and owner.get("job") == job:
        return True
    return owner.get("host") == socket.gethostname() and not os.path.exists(f"/proc/{owner.get('process')}")


def _owner(handle: int) -> dict[str, Any]:
    """What the lock's owner wrote; empty if it has not done so yet, or if the file is damaged."""
    with contextlib.suppress(OSError, ValueError):
        note = json.loads(os.pread(handle, _LONGEST_NOTE, 0))
        if isinstance(note, dict):
            return note
    return {}


def _refusal(run_dir: Path, owner: dict[str, Any]) -> str:
    who = "another process"
    if owner:
        who = (
            f"megatron-retool {owner.get('command')} on {owner.get('host')} (process {owner.get('process')}, since "
            f"{owner.get('since')})"
        )
    return f"{run_dir} is in use by {who}: wait until it has ended, stop it, or choose another trainer.experiment_name"
