"""Ray's own Nsight plugin, given what a rank gets, starts this Python under nsys with the run's options."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray._private.runtime_env.context import RuntimeEnvContext
from ray._private.runtime_env.nsight import NsightPlugin
from ray.runtime_env import RuntimeEnv

from megatron_retool.cluster.nsight import nsight_environment
from megatron_retool.config import Config, load_config

NSYS = """#!/bin/sh
# Notes its options, and runs what follows them, as nsys does.
printf '%s\\n' "$@" >> "{log}"
while [ $# -gt 0 ]; do case "$1" in python*|*/python*) break;; esac; shift; done
exec "$@"
"""


def settings(tmp_path: Path, *overrides: str) -> Config:
    return load_config(
        None,
        [f"trainer.runs_dir={tmp_path}/all runs", "trainer.profiler.tool=nsys",
         "trainer.profiler.steps=[3,5]", "learner.world_size=2", *overrides],
    )  # fmt: skip


def test_ranks_that_record_nothing_run_as_ever(tmp_path: Path) -> None:
    assert nsight_environment(settings(tmp_path).trainer, "learner", 1, {}) == {}
    torch_tool = settings(tmp_path, "trainer.profiler.tool=torch")
    assert nsight_environment(torch_tool.trainer, "learner", 0, {}) == {}
    assert nsight_environment(settings(tmp_path, "trainer.profiler.ranks=[]").trainer, "critic", 1, {}) != {}


def test_a_rank_runs_under_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, programs = tmp_path / "log", tmp_path / "bin"
    programs.mkdir()
    (programs / "nsys").write_text(NSYS.format(log=log))
    (programs / "nsys").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    config = settings(tmp_path)
    options: dict[str, Any] = {"env_vars": {"A": "1"}} | nsight_environment(config.trainer, "learner", 0, {"A": "1"})
    environment = RuntimeEnv(**options)
    plugin, context = NsightPlugin(str(tmp_path / "session" / "resources")), RuntimeEnvContext()
    asyncio.run(plugin.create(None, environment, context))
    plugin.modify_context([], environment, context)
    log.unlink()
    program = "import json, os, sys; print(json.dumps([sys.executable, os.environ['A']]))"
    started = subprocess.run(
        ["bash", "-c", f"exec {context.py_executable} -c \"{program}\""],
        env=os.environ | environment["env_vars"], capture_output=True, text=True, check=True,
    )  # fmt: skip
    executable, variable = json.loads(started.stdout)
    assert Path(executable).parent == Path(sys.executable).parent and variable == "1"
    given = log.read_text().splitlines()
    assert (
        given[0] == "profile" and "--capture-range=cudaProfilerApi" in given and "--capture-range-end=repeat:2" in given
    )
    assert given[given.index("-o") + 1] == str(config.trainer.run_dir.absolute() / "profile" / "learner_rank0_%p")
    assert given[given.index("-t") + 1] == "cuda,nvtx,cublas"
