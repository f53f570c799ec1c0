"""What every refusal has in common: one message, nothing left behind, no time lost."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import ray

from megatron_retool.__main__ import main
from tests.kit.processes import is_alive

SECONDS = 5.0
Refused = Callable[..., str]
Command = Callable[[list[str]], int]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """refused("train trainer.seed=x", "words") runs a command in ``tmp_path`` and returns its message.

    It fails unless there is one message with all the words, no traceback, a status that is not 0, no new file, no new
    process, and little time spent.
    """
    monkeypatch.chdir(tmp_path)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(ray, "init", _refuse_to_start)

    def check(arguments: str | list[str], *words: str, command: Command = main) -> str:
        if isinstance(arguments, str):
            arguments = arguments.split()
        files, children = _files(tmp_path), _children()
        start = time.process_time()
        try:
            status = command(arguments)
        except SystemExit as end:  # argparse's way
            status = end.code
        seconds = time.process_time() - start
        captured = capsys.readouterr()
        output = re.sub(r"(?m)^usage: .*\n(\s+.*\n)*", "", captured.out + captured.err)
        messages = re.findall(r"error: (.*)", output)
        assert len(messages) == 1, f"not one message: {output}"
        assert status not in (0, None), "the status is that of success"
        for word in words:
            assert word in messages[0], f"{word!r} is not in: {messages[0]}"
        assert "Traceback" not in output and len(output) < 2000, output
        assert _files(tmp_path) == files, "it left something behind"
        assert _children() == children, "it left a process behind"
        assert seconds < SECONDS
        return messages[0]

    return check


def _refuse_to_start(*arguments: object, **keywords: object) -> None:
    raise AssertionError("Ray is started")


def _files(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in directory.rglob("*")}


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children() if is_alive(child)}
