"""Memory and process limits for whole process trees: control groups, version 1 and 2.

Rlimits bind single processes; only a cgroup bounds a snippet together with everything it forks.  Where no hierarchy
is writable (most containers), ``find`` returns None and only the rlimits remain.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from code_interpreter import linux
from code_interpreter.locked_directory import abandoned, make_locked

_PREFIX = "retool-sandbox-"


@dataclass
class WorkerCgroup:
    """The open control files of one worker's group; usable after the file system that holds them is out of sight."""

    join_fds: list[int]
    limit_fds: list[int]
    events_fd: int | None
    version: int
    _limit: int = 0
    _kills: int = 0

    def join(self) -> None:
        """Move the calling process into the group; its future children start there."""
        for descriptor in self.join_fds:
            os.write(descriptor, b"0")
        self._kills = self.count_kills()

    def set_memory_limit(self, limit: int) -> None:
        """Set the limit, in bytes, for what the group's processes use together."""
        if limit == self._limit:
            return
        # Version 1 refuses a memory limit above, and a memory+swap limit below, the other one.
        order = self.limit_fds if limit < (self._limit or 1 << 62) else list(reversed(self.limit_fds))
        for descriptor in order:
            # EBUSY: memory of the last snippet is still being given back. Its looser or tighter limit then stays.
            with contextlib.suppress(OSError):
                os.pwrite(descriptor, str(limit).encode(), 0)
        self._limit = limit

    def count_kills(self) -> int:
        """Processes of the group that the kernel killed for memory, ever."""
        if self.events_fd is None:
            return 0
        for line in os.pread(self.events_fd, 4096, 0).decode().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
        return 0

    def was_memory_exceeded(self) -> bool:
        """Whether the kernel killed a process for memory since the last call."""
        before, self._kills = self._kills, self.count_kills()
        return self._kills > before


@dataclass
class CgroupParent:
    """The directories (one for each hierarchy) below which the workers' groups are made."""

    version: int
    memory: Path
    pids: Path
    lock_fds: tuple[int, ...] = ()
    """Held by the warden for as long as it lives: groups whose lock is free have no owner any more."""
    memory_fd: int = -1
    pids_fd: int = -1

    def open(self) -> None:
        """Keep the directories reachable after pivot_root."""
        self.memory_fd = os.open(self.memory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.pids_fd = os.open(self.pids, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def create_worker(self, name: str, max_processes: int) -> WorkerCgroup:
        """Make the group ``name`` below this one. The parent must be open."""
        for parent in {self.memory_fd, self.pids_fd}:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=parent)

        def open_file(parent: int, file: str, flags: int = os.O_WRONLY) -> int | None:
            try:
                return os.open(f"{name}/{file}", flags | os.O_CLOEXEC, dir_fd=parent)
            except FileNotFoundError:
                return None

        pids_max = open_file(self.pids_fd, "pids.max")
        assert pids_max is not None
        os.write(pids_max, str(max_processes).encode())
        os.close(pids_max)
        if self.version == 1:
            join = [open_file(self.memory_fd, "tasks"), open_file(self.pids_fd, "tasks")]
            limits = [
                open_file(self.memory_fd, "memory.limit_in_bytes"),
                open_file(self.memory_fd, "memory.memsw.limit_in_bytes"),
            ]
            events = open_file(self.memory_fd, "memory.oom_control", os.O_RDONLY)
        else:
            join = [open_file(self.memory_fd, "cgroup.procs")]
            limits = [open_file(self.memory_fd, "memory.max")]
            events = open_file(self.memory_fd, "memory.events", os.O_RDONLY)
            swap = open_file(self.memory_fd, "memory.swap.max")
            if swap is not None:
                os.write(swap, b"0")
                os.close(swap)
        return WorkerCgroup(
            [fd for fd in join if fd is not None], [fd for fd in limits if fd is not None], events, self.version
        )

    def remove(self) -> None:
        """Remove the groups again; their processes must have ended."""
        for directory in {self.memory, self.pids}:
            _remove_tree(directory)
        for descriptor in self.lock_fds:
            os.close(descriptor)
        self.lock_fds = ()


def find(process_id: int) -> CgroupParent | None:
    """Make the parent group of the server ``process_id``; None where this process may not.

    Groups that a killed server left behind are removed on the way.
    """
    try:
        memberships = _memberships()
        mounts = _hierarchies()
    except OSError:
        return None
    # Servers in other pid namespaces may share the hierarchy: a process id by itself names none of them.
    name = f"{_PREFIX}{process_id}-{secrets.token_hex(4)}"
    if "memory" in mounts and "pids" in mounts:
        parents = [mounts[c] / memberships.get(c, "/").lstrip("/") for c in ("memory", "pids")]
        try:
            for parent in parents:
                _remove_abandoned(parent)
            locks = tuple(make_locked(parent / name) for parent in parents)
        except OSError:
            return None
        return CgroupParent(1, parents[0] / name, parents[1] / name, locks)
    if "" in mounts:
        own = mounts[""] / memberships.get("", "/").lstrip("/")
        # A group that holds processes cannot limit children of its own, so its parent is the second choice.
        for parent in (own, own.parent):
            directory = parent / name
            try:
                if not directory.resolve().is_relative_to(mounts[""]):
                    continue
                _enable_controllers(parent)
                _remove_abandoned(parent)
                lock = make_locked(directory)
                _enable_controllers(directory)
                _check_can_join(directory)
            except OSError:
                with contextlib.suppress(OSError):
                    _remove_tree(directory)
                continue
            return CgroupParent(2, directory, directory, (lock,))
    return None


def _memberships() -> dict[str, str]:
    """Controller (empty for version 2) → this process's group, from /proc/self/cgroup."""
    result = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            result[controller] = path
    return result


def _hierarchies() -> dict[str, Path]:
    """Controller (empty for version 2) → where its hierarchy is mounted."""
    result = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        target = Path(left.split(" ")[4])
        if kind == "cgroup2":
            result[""] = target
        elif kind == "cgroup":
            for option in options.split(","):
                result[option] = target
    return result


def _enable_controllers(directory: Path) -> None:
    wanted = {"memory", "pids"}
    control = directory / "cgroup.subtree_control"
    if not wanted <= set(control.read_text().split()):
        control.write_text("+memory +pids")


def _check_can_join(directory: Path) -> None:
    """Move a throw-away process into a child group; OSError where this process may not."""
    probe = directory / "probe"
    probe.mkdir(exist_ok=True)
    try:
        child = linux.fork(functools.partial((probe / "cgroup.procs").write_text, "0"))
        if os.waitpid(child, 0)[1] != 0:
            raise PermissionError(f"cannot move a process into {probe}")
    finally:
        probe.rmdir()


def _remove_abandoned(parent: Path) -> None:
    for group in abandoned(parent, f"{_PREFIX}*"):
        _remove_tree(group)


def _remove_tree(directory: Path) -> None:
    if not directory.is_dir():
        return
    for entry in directory.iterdir():
        if entry.is_dir():
            _remove_tree(entry)
    with contextlib.suppress(OSError):
        directory.rmdir()
