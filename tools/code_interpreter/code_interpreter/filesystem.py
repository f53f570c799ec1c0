"""What a snippet sees of the file system: a read-only root, and a workspace that lives as long as the request."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from code_interpreter import first_process, linux

SANDBOX = "/sandbox"
HOME = f"{SANDBOX}/home"
"""Working directory of the code; ``files`` of a request are relative to it."""
FIRST_PROCESS = "/first_process"
"""The program of first_process.py in the read-only root."""
_HELD = "/interpreter"
"""Where directories of the interpreter that lie below /mnt and /tmp are kept in the read-only root."""
OWN_DIRECTORIES = ("mnt", "tmp")
"""Of the root, that a snippet has for itself where it sees a root of its own: parts of its workspace."""
_PARTS = ("home", "shm", *OWN_DIRECTORIES)

_REMOVAL_SECONDS = 2.0
"""How long an answer waits for the removal of what its request left; the rest is removed while the worker is idle."""
_STEPS_A_LOOK = 64
_END = object()
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_DEVICES = ("null", "zero", "full", "random", "urandom")
_SYSTEM_DIRECTORIES = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/etc/alternatives")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime")


def python_directories(further: Sequence[str] = ()) -> list[str]:
    """Directories that the running interpreter and its packages lie in, plus ``further``; none inside another."""
    candidates = [sys.prefix, sys.base_prefix, sys.exec_prefix, *further]
    candidates.append(os.path.dirname(os.path.dirname(os.path.realpath(sys.executable))))
    chosen: list[str] = []
    for directory in sorted({os.path.realpath(c) for c in candidates} | {os.path.abspath(c) for c in candidates}):
        inside = any(directory == c or directory.startswith(c + "/") for c in (*chosen, "/usr"))
        if not inside and os.path.isdir(directory) and directory != "/":
            chosen.append(directory)
    return chosen


def system_directories() -> list[str]:
    """Where the system's programs and libraries lie on this host; some may be symbolic links into /usr."""
    return [path for path in _SYSTEM_DIRECTORIES if os.path.isdir(path)]


def is_readable_by_others(path: str) -> bool:
    """Whether any user may enter ``path``."""
    return all(os.stat(place).st_mode & stat.S_IXOTH for place in (path, *map(str, Path(path).parents)))


def readable_paths() -> list[str]:
    """What of the host, besides the interpreter, a snippet may read."""
    return [*system_directories(), *_SYSTEM_FILES]


def device_paths() -> list[str]:
    """Devices that a snippet sees."""
    return [f"/dev/{name}" for name in _DEVICES]


def enter_read_only_root(directories: Sequence[str], scratch: str) -> None:
    """Replace this mount namespace's root by a read-only one that holds the system's libraries and ``directories``.

    Args:
        directories: host directories that appear at their own path, read-only.
        scratch: an empty host directory to build the new root on.

    The new root has /usr and its companions, five devices, /proc, the program of first_process.py, and the empty mount
    point /sandbox, into which /mnt and /tmp lead. No other file of the host can be named from it, and the old root is
    unmounted.
    """
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", scratch, "tmpfs", linux.MS_NOSUID, "size=1m,mode=755")
    for path in system_directories():
        if os.path.islink(path):
            os.symlink(os.readlink(path), scratch + path)
        else:
            os.makedirs(scratch + path)
            linux.bind_read_only(path, scratch + path)
    for path in directories:
        # Those below /mnt and /tmp are shown again in every request's own; the first place is kept for that.
        places = [_HELD + path, SANDBOX + path] if lies_in_own_directory(path) else [path]
        for place in places:
            os.makedirs(scratch + place, exist_ok=True)
            linux.bind_read_only(path, scratch + place)
    for name in ("dev", "proc", "etc", "old", SANDBOX[1:]):
        os.makedirs(f"{scratch}/{name}", exist_ok=True)
    for name in _DEVICES:
        Path(f"{scratch}/dev/{name}").touch()
        linux.mount(f"/dev/{name}", f"{scratch}/dev/{name}", None, linux.MS_BIND)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"), ("stdout", "/proc/self/fd/1")):
        os.symlink(target, f"{scratch}/dev/{name}")
    os.symlink("/proc/self/fd/2", f"{scratch}/dev/stderr")
    os.symlink(f"{SANDBOX}/shm", f"{scratch}/dev/shm")
    for name in OWN_DIRECTORIES:
        if not os.path.exists(f"{scratch}/{name}"):  # else it is itself one of the interpreter's, and stays read-only
            os.symlink(f"{SANDBOX}/{name}", f"{scratch}/{name}")
    for path in _SYSTEM_FILES:
        if os.path.isfile(path):
            shutil.copyfile(path, scratch + path)
    Path(f"{scratch}/etc/passwd").write_text(f"sandbox:x:65534:65534::{HOME}:/bin/sh\n")
    Path(f"{scratch}/etc/group").write_text("sandbox:x:65534:\n")
    Path(f"{scratch}/etc/hosts").write_text("127.0.0.1 localhost sandbox\n")
    # matplotlib asks fontconfig, which complains on stderr where it has no configuration.
    os.mkdir(f"{scratch}/etc/fonts")
    Path(f"{scratch}/etc/fonts/fonts.conf").write_text("<fontconfig><cachedir>/tmp</cachedir></fontconfig>\n")
    first_process.write_program(scratch + FIRST_PROCESS)
    # A user namespace may mount a new /proc only while another complete one is in view, so one stays here.
    mount_proc(f"{scratch}/proc")
    os.chdir(scratch)
    linux.pivot_root(".", "old")
    os.chdir("/")
    linux.unmount("/old")
    os.rmdir("/old")
    linux.mount(None, "/", None, linux.MS_BIND | linux.MS_REMOUNT | linux.MS_RDONLY | linux.MS_NOSUID)


def lies_in_own_directory(path: str) -> bool:
    """Whether ``path``, an absolute one, lies below /mnt or /tmp."""
    return path.startswith(tuple(f"/{name}/" for name in OWN_DIRECTORIES))


def temporary_directory() -> str:
    """Where a snippet in the read-only root may write temporary files."""
    return "/tmp" if os.path.islink("/tmp") else f"{SANDBOX}/tmp"


def own_directories() -> list[str]:
    """Which of OWN_DIRECTORIES a snippet in the read-only root has for itself, as absolute paths."""
    return [f"/{name}" for name in OWN_DIRECTORIES if os.path.islink(f"/{name}")]


def mount_proc(target: str = "/proc") -> None:
    """The process list of the current pid namespace and nothing else of /proc, where the kernel can do that."""
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    try:
        linux.mount("proc", target, "proc", flags, "subset=pid")
    except OSError:
        linux.mount("proc", target, "proc", flags)


class MemoryWorkspace:
    """A fresh tmpfs on /sandbox for each request, in the worker's own mount namespace.

    Args:
        owner: user that the request's directories belong to.
        directories: of ``enter_read_only_root``; those below /mnt and /tmp stay where they are.
    """

    def __init__(self, size_mb: int, owner: int, directories: Sequence[str] = ()) -> None:
        self._options = f"size={size_mb}m,nr_inodes=16384,mode=755"
        self._owner = owner
        self._held = [path for path in directories if lies_in_own_directory(path)]

    @contextlib.contextmanager
    def fresh(self) -> Iterator[str]:
        """Mount it, yield the directory that holds home/, tmp/, mnt/ and shm/, and forget it all."""
        linux.mount("tmpfs", SANDBOX, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, self._options)
        try:
            for path in self._held:
                os.makedirs(SANDBOX + path, exist_ok=True)
                linux.bind_read_only(_HELD + path, SANDBOX + path)
                for parent in itertools.islice(Path(path).parents, len(Path(path).parents) - 2):
                    os.chown(f"{SANDBOX}{parent}", self._owner, self._owner)
            _make_parts(SANDBOX, self._owner)
            yield SANDBOX
        finally:
            linux.unmount(SANDBOX)

    def tidy(self, seconds: float) -> bool:
        """Nothing is left: the kernel frees a file system that is out of sight."""
        return False


class DirectoryWorkspace:
    """A temporary directory of the host for each request, where mounting is not allowed.

    Args:
        parent: a directory for one worker; what an earlier one left there is removed.
        owner: user that the request's directories belong to; None: this process's.
    """

    def __init__(self, parent: str, owner: int | None) -> None:
        os.makedirs(parent, exist_ok=True)
        os.chmod(parent, 0o711)
        self._parent = parent
        self._owner = owner
        self._removals = [removal(f"{parent}/{name}") for name in os.listdir(parent)]

    @contextlib.contextmanager
    def fresh(self) -> Iterator[str]:
        """Create it, yield the directory that holds home/, tmp/, mnt/ and shm/, and remove it all."""
        directory = tempfile.mkdtemp(prefix="request-", dir=self._parent)
        try:
            os.chmod(directory, 0o711)
            _make_parts(directory, self._owner)
            yield directory
        finally:
            self._removals.append(removal(directory))
            self.tidy(_REMOVAL_SECONDS)

    def tidy(self, seconds: float) -> bool:
        """Remove for at most so long what requests left; whether anything is left to remove."""
        deadline = time.monotonic() + seconds
        while self._removals and _work_until(self._removals[-1], deadline):
            self._removals.pop()
        return bool(self._removals)


def _make_parts(directory: str, owner: int | None) -> None:
    for name in _PARTS:
        path = f"{directory}/{name}"
        os.makedirs(path, exist_ok=True)
        os.chmod(path, 0o700)
        if owner is not None:
            os.chown(path, owner, owner)


def remove_directory(directory: str, seconds: float = math.inf) -> bool:
    """Remove a tree within ``seconds``; whether all was tried by then."""
    return _work_until(removal(directory), time.monotonic() + seconds)


def removal(directory: str) -> Iterator[None]:
    """Remove a tree piece by piece, also one made to resist; each step removes about one entry.

    Any depth takes one descriptor and no recursion, and the rights to enter a directory are taken where they are
    missing. What the kernel does not give up (a mount point, an immutable file) stays.
    """
    parent, name = os.path.split(directory)
    try:
        current = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    entered: list[str] = []
    waiting = [[name]]
    """For each directory on the way down, the names of those in it that are still there."""
    identities = [_identity(current)]
    try:
        while True:
            if waiting[-1]:
                name = waiting[-1].pop()
                try:
                    inner = _enter(name, current)
                except OSError:
                    with contextlib.suppress(OSError):
                        os.rmdir(name, dir_fd=current)
                    continue
                os.close(current)
                current = inner
                entered.append(name)
                identities.append(_identity(current))
                waiting.append([])
                with os.scandir(current) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            waiting[-1].append(entry.name)
                        else:
                            with contextlib.suppress(OSError):
                                os.unlink(entry.name, dir_fd=current)
                        yield
            elif entered:
                waiting.pop()
                identities.pop()
                outer = os.open("..", _DIRECTORY, dir_fd=current)
                os.close(current)
                current = outer
                if _identity(current) != identities[-1]:
                    return  # moved meanwhile by a process that is still alive: ".." leads elsewhere
                with contextlib.suppress(OSError):
                    os.rmdir(entered.pop(), dir_fd=current)
                yield
            else:
                return
    except OSError:
        return
    finally:
        os.close(current)


def _enter(name: str, parent: int) -> int:
    """Open the directory ``name``, made readable and writable."""
    try:
        directory = os.open(name, _DIRECTORY, dir_fd=parent)
    except PermissionError:
        if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise
        os.chmod(name, 0o700, dir_fd=parent)
        directory = os.open(name, _DIRECTORY, dir_fd=parent)
    with contextlib.suppress(OSError):
        os.fchmod(directory, 0o700)
    return directory


def _identity(directory: int) -> tuple[int, int]:
    status = os.fstat(directory)
    return status.st_dev, status.st_ino


def _work_until(steps: Iterator[None], deadline: float) -> bool:
    """Take ``steps`` until ``deadline``; whether they came to their end."""
    while time.monotonic() < deadline:
        for _ in itertools.islice(steps, _STEPS_A_LOOK):
            pass
        if next(steps, _END) is _END:
            return True
    return False


def open_regular_file(directory: str, path: str) -> int:
    """Open ``path`` of the workspace ``directory`` for reading, following no symbolic link on the way.

    Args:
        path: as the code names it: relative to its working directory, or below one of OWN_DIRECTORIES.

    Raises:
        OSError: no such file, a symbolic link, or something that is not a regular file.
    """
    *parents, name = [
        part for part in (path if path.startswith("/") else f"home/{path}").split("/") if part not in ("", ".")
    ]
    # O_PATH: the right to enter is enough.
    current = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parents:
            inner = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=current)
            os.close(current)
            current = inner
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=current)
    finally:
        os.close(current)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"{path} is not a regular file")
    return file
