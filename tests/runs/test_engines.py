"""The files by which a run is asked for engines."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron_retool.errors import InputError
from megatron_retool.runs.engines import (
    Answer,
    EngineRequest,
    RunEngine,
    answer,
    ask,
    begin,
    end,
    read_engines,
    take_answer,
    take_requests,
    withdraw,
    write_engines,
)

ENGINES = [RunEngine(0, "http://127.0.0.1:3000", 0, ()), RunEngine(3, "http://10.0.0.2:3000", 1, (4, 5))]


def test_engines_are_read_back(tmp_path: Path) -> None:
    write_engines(tmp_path, ENGINES)
    assert read_engines(tmp_path) == ENGINES
    end(tmp_path)
    with pytest.raises(InputError, match=r"engines.json is missing: no training is at work in"):
        read_engines(tmp_path)


def test_a_run_that_is_gone_is_named(tmp_path: Path) -> None:
    write_engines(tmp_path, ENGINES)
    path = tmp_path / "engines.json"
    gone = 2**22 + 1  # beyond the kernel's largest process id
    path.write_text(path.read_text().replace(str(os.getpid()), str(gone)))
    with pytest.raises(InputError, match=f"is not at work: its process {gone} has ended"):
        read_engines(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"host": "a", "process": 1, "engines": [{}]}', "[" * 10_000])
def test_a_damaged_list_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "engines.json").write_text(text)
    with pytest.raises(InputError, match="engines.json is damaged"):
        read_engines(tmp_path)


@pytest.mark.parametrize("request_", [EngineRequest(add=2), EngineRequest(remove=(0, 3))], ids=["add", "remove"])
def test_a_request_is_taken_once_and_answered(tmp_path: Path, request_: EngineRequest) -> None:
    begin(tmp_path)
    path = ask(tmp_path, request_)
    assert take_answer(path) is None
    assert take_requests(tmp_path) == [(path, request_)] and take_requests(tmp_path) == []
    answer(path, Answer(True, "engine 1 serves"))
    assert take_answer(path) == Answer(True, "engine 1 serves")
    assert list((tmp_path / "engine_requests").iterdir()) == []
    withdraw(ask(tmp_path, request_))
    assert take_requests(tmp_path) == []


@pytest.mark.parametrize(
    "value",
    [[], {}, {"add": 0}, {"add": 65}, {"add": True}, {"add": 1.0}, {"add": 1, "remove": [0]}, {"remove": []},
     {"remove": [-1]}, {"remove": ["0"]}, {"remove": 0}, {"other": 1}],
    ids=str,
)  # fmt: skip
def test_what_is_no_request_is_answered_with_the_reason(tmp_path: Path, value: object) -> None:
    begin(tmp_path)
    path = tmp_path / "engine_requests" / "1.json"
    path.write_text(json.dumps(value))
    assert take_requests(tmp_path) == []
    said = take_answer(path)
    assert said is not None and not said.done and "is neither {'add': N}" in said.text


def test_files_of_any_size_are_answered(tmp_path: Path) -> None:
    begin(tmp_path)
    path = tmp_path / "engine_requests" / "1.json"
    path.write_bytes(b" " * (2**20 + 1))
    assert take_requests(tmp_path) == []
    said = take_answer(path)
    assert said is not None and "at most 1048576 are read" in said.text


def test_a_run_forgets_what_an_earlier_process_was_asked(tmp_path: Path) -> None:
    begin(tmp_path)
    ask(tmp_path, EngineRequest(add=1))
    begin(tmp_path)
    assert take_requests(tmp_path) == []
