"""The program that is pid 1 of a snippet's pid namespace."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from sandboxes import start

from code_interpreter import filesystem, first_process
from code_interpreter.protocol import Outcome


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


_WITHOUT_PROGRAM = """
import asyncio, runpy, sys

warden = '''
import runpy, sys
from code_interpreter import first_process
first_process._CODE.clear()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
'''
start = asyncio.create_subprocess_exec
asyncio.create_subprocess_exec = lambda *command, **more: start(*command[:3], "-c", warden, *command[3:], **more)
del sys.argv[: sys.argv.index("-m") + 1]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""Runs the server that follows it on a command line, whose machine has no program."""


@pytest.mark.parametrize("known", [True, False])
def test_a_fork_takes_its_place_on_an_unknown_machine(known: bool) -> None:
    wrapper = () if known else (sys.executable, "-c", _WITHOUT_PROGRAM)
    sandbox = start("namespaces", workers=1, wrapper=wrapper)
    try:
        code = f"import os\nprint(os.path.exists({filesystem.FIRST_PROCESS!r}), os.getpid(), os.path.exists('/proc/1'))"
        for _ in range(2):
            assert sandbox.run(code).stdout == f"{known} 2 True\n"
        ended = sandbox.run("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
        assert (ended.outcome, ended.return_code) == (Outcome.FINISHED, -9), ended
        sandbox.check_alive()
    finally:
        sandbox.process.stop()
