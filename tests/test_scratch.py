"""A command's temporary files are gone when it is, however it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megatron_retool import scratch
from megatron_retool.scratch import current_scratch, remove_abandoned, scratch_directory

HOLDS_A_DIRECTORY = """
import sys, tempfile, time
from megatron_retool.scratch import scratch_directory
with scratch_directory() as path:
    tempfile.mkstemp()
    print(path, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary_files_lie_in(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv(scratch.VARIABLE, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(scratch, "_LONGEST_SOCKET_PATH", 1000)
    return tmp_path


def test_temporary_files_of_all_processes_are_gone_at_the_end(tmp_path):
    with scratch_directory() as path:
        assert path.parent == tmp_path and tempfile.gettempdir() == str(path) == os.environ["TMPDIR"]
        subprocess.run([sys.executable, "-c", "import tempfile; tempfile.mkdtemp()"], check=True)
        with scratch_directory() as same:  # a stage of this command, or what it calls
            assert same == path == current_scratch()
        assert len(list(path.iterdir())) == 1
    assert not path.exists() and tempfile.gettempdir() == str(tmp_path) and current_scratch() is None


def test_a_killed_commands_files_are_removed_by_the_next_and_a_living_ones_are_not(tmp_path):
    owners = [
        subprocess.Popen([sys.executable, "-c", HOLDS_A_DIRECTORY], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        killed, living = (Path(owner.stdout.readline().strip()) for owner in owners)
        parent = killed.parent
        notes = killed / "shared_memory"
        notes.mkdir()
        name = f"sglang_note_{os.getpid()}"
        (notes / name).touch()
        Path("/dev/shm", name).touch()
        owners[0].send_signal(signal.SIGKILL)
        owners[0].wait()
        assert killed in remove_abandoned(parent)
        assert not killed.exists() and living.exists() and not Path("/dev/shm", name).exists()
    finally:
        for owner in owners:
            owner.kill()
            owner.wait()
            owner.stdout.close()
    remove_abandoned(parent)


def test_a_place_that_is_too_deep_for_sockets_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "_LONGEST_SOCKET_PATH", 107)
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with scratch_directory() as path:
        assert path.parent == Path("/tmp")
        assert len(str(path)) + scratch._LONGEST_NAME_IN_RAY <= 107
    assert not path.exists()
