"""Which files of a control group hierarchy are written, version 2 in a directory that looks like one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from code_interpreter import cgroups
from code_interpreter.locked_directory import make_locked


@pytest.fixture
def hierarchy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A version 2 hierarchy whose group /service/job this process is in, with the groups' files in place."""
    monkeypatch.setattr(cgroups, "_memberships", lambda: {"": "/service/job"})
    monkeypatch.setattr(cgroups, "_hierarchies", lambda: {"": tmp_path})
    monkeypatch.setattr(cgroups, "_check_can_join", lambda directory: None)
    monkeypatch.setattr(cgroups.secrets, "token_hex", lambda count: "ab")
    for group in ("service", "service/job", "service/retool-sandbox-77-ab", "service/job/retool-sandbox-77-ab"):
        (tmp_path / group).mkdir()
        (tmp_path / group / "cgroup.subtree_control").write_text("cpu")
    return tmp_path


def make_worker_files(parent: Path) -> Path:
    worker = parent / "worker-0"
    worker.mkdir()
    for name in ("pids.max", "memory.max", "memory.swap.max", "cgroup.procs"):
        (worker / name).write_text("")
    (worker / "memory.events").write_text("low 0\noom 0\noom_kill 0\n")
    return worker


def test_version_2(hierarchy: Path) -> None:
    parent = cgroups.find(77)
    assert parent is not None and parent.version == 2
    assert parent.memory == hierarchy / "service/job/retool-sandbox-77-ab"
    assert (parent.memory / "cgroup.subtree_control").read_text() == "+memory +pids"
    files = make_worker_files(parent.memory)
    parent.open()
    worker = parent.create_worker("worker-0", 66)
    worker.join()
    worker.set_memory_limit(1 << 20)
    written = {
        name: (files / name).read_text() for name in ("pids.max", "memory.max", "memory.swap.max", "cgroup.procs")
    }
    assert written == {"pids.max": "66", "memory.max": str(1 << 20), "memory.swap.max": "0", "cgroup.procs": "0"}
    assert not worker.was_memory_exceeded()
    (files / "memory.events").write_text("low 0\noom 1\noom_kill 2\n")
    assert worker.was_memory_exceeded() and not worker.was_memory_exceeded()


def test_group_that_holds_processes_leaves_the_work_to_its_parent(
    hierarchy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel refuses controllers for the children of a group that has processes (EBUSY)."""
    enable = cgroups._enable_controllers

    def refuse_own(directory: Path) -> None:
        if directory == hierarchy / "service/job":
            raise OSError(16, "Device or resource busy")
        enable(directory)

    monkeypatch.setattr(cgroups, "_enable_controllers", refuse_own)
    parent = cgroups.find(77)
    assert parent is not None and parent.memory == hierarchy / "service/retool-sandbox-77-ab"


def test_hierarchy_that_is_read_only(hierarchy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(directory: Path) -> None:
        raise PermissionError(f"{directory} is read-only")

    monkeypatch.setattr(cgroups, "_enable_controllers", refuse)
    assert cgroups.find(77) is None


def test_groups_of_a_living_server_are_never_taken_for_stale(tmp_path: Path) -> None:
    """Its process id may not exist here: servers in other pid namespaces share the hierarchy."""
    alive = tmp_path / "retool-sandbox-999999999-aa"
    dead = tmp_path / "retool-sandbox-1-bb"
    lock = make_locked(alive)
    (alive / "worker-0").mkdir()
    (dead / "worker-0").mkdir(parents=True)
    cgroups._remove_abandoned(tmp_path)
    assert (alive / "worker-0").is_dir() and not dead.exists()
    os.close(lock)
    cgroups._remove_abandoned(tmp_path)
    assert not alive.exists()
