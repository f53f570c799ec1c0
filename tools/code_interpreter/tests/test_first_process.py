"""The program that is pid 1 of a snippet's pid namespace."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from code_interpreter import first_process


@pytest.mark.parametrize("sent", [b"", b"x"], ids=["end", "byte"])
def test_waits_for_its_input(tmp_path: Path, sent: bytes) -> None:
    path = str(tmp_path / "program")
    first_process.write_program(path)
    assert first_process.runs(path)
    reader, writer = os.pipe()
    process = os.posix_spawn(path, [path], {}, file_actions=[(os.POSIX_SPAWN_DUP2, reader, 0)])
    os.close(reader)
    assert os.waitpid(process, os.WNOHANG) == (0, 0)
    os.write(writer, sent)
    os.close(writer)
    assert os.waitpid(process, 0) == (process, 0)


def test_what_is_not_there_or_no_program_does_not_run(tmp_path: Path) -> None:
    path = tmp_path / "program"
    assert not first_process.runs(str(path))
    path.write_bytes(b"\x7fELF")
    path.chmod(0o555)
    assert not first_process.runs(str(path))


def test_nothing_is_written_for_an_unknown_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    first_process.write_program(str(tmp_path / "program"))
    assert not list(tmp_path.iterdir())
