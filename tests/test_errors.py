"""Who sees a traceback: a user's mistake is one line, a fault of the program is reported with all of it."""

from __future__ import annotations

import argparse

import pytest
from ray.exceptions import RayTaskError

from megatron_retool.__main__ import main
from megatron_retool.commands import command_line
from megatron_retool.config import ConfigError
from megatron_retool.errors import FAULT, InputError, OperationError
from megatron_retool.interruption import run_interruptible
from sglang_rollout.engine.base import EngineStartError


def in_an_actor(error: Exception) -> Exception:
    return RayTaskError("call", f"Traceback\n{error}", error).as_instanceof_cause()


MENDED_BY_THE_USER = [
    ConfigError("learner.dtype=int3: choose another"),
    InputError("--step 3: the run has steps 1 and 2"),
    OperationError("Ray did not start: end what else runs here"),
    EngineStartError("the engine ended while it was starting: see its log"),
    FileNotFoundError(2, "No such file or directory", "gone.yaml"),
    in_an_actor(ConfigError("learner.dtype=int3: choose another")),
]
FAULTS = [
    ValueError("could not broadcast shapes"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    KeyError("column"),
    in_an_actor(RuntimeError("mat1 and mat2 shapes cannot be multiplied")),
]


@pytest.mark.parametrize("error", [*MENDED_BY_THE_USER, *FAULTS], ids=lambda error: type(error).__name__)
def test_what_a_command_prints(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raising(*arguments: object) -> int:
        raise error

    monkeypatch.setattr(command_line, "parse", lambda arguments: (raising, argparse.Namespace()))
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["train"]) == 1
    printed = capsys.readouterr().out
    if error in FAULTS:
        assert "Traceback" in printed
        assert printed.rstrip().endswith(FAULT)
    else:
        assert printed.startswith("error: ")
        assert "Traceback" not in printed
        assert FAULT not in printed


def test_what_a_converter_prints(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        raise KeyError("column")

    assert run_interruptible(command) == 1
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert said.rstrip().endswith(FAULT)
