"""The wheel in an environment of its own: commands run from any directory, without the checkout."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from megatron_retool.runs.metrics_file import read_metrics
from tests.end_to_end.conftest import FinishedRun, copy_checkout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment: the wheel, and the packages of this test's environment, but not its link to the checkout."""
    directory = tmp_path_factory.mktemp("wheel")
    copy_checkout(directory / "source")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", directory, directory / "source"]
    subprocess.run(build, check=True)
    shutil.rmtree(directory / "source")
    environment = directory / "environment"
    venv.create(environment, with_pip=False)
    # Paths of a .pth file are searched, but .pth files in them, such as the checkout's, are not read.
    packages = environment / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (environment / "sglang_only").symlink_to(Path(sys.prefix) / "sglang_only")
    (wheel,) = directory.glob("*.whl")
    subprocess.run([*pip, "--python", environment / "bin" / "python", "install", "--no-deps", wheel], check=True)
    return environment


def test_commands_run_from_any_directory(installed: Path, demo_run: FinishedRun, tmp_path: Path) -> None:
    def run(*words: str | Path) -> str:
        command = [installed / "bin" / words[0], *words[1:]]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    packages = "megatron_retool, sglang_rollout, conversion, tools"
    where = run("python", "-c", f"import {packages}; print(*(m.__file__ for m in ({packages})))").split()
    assert len(where) == 4 and all(Path(path).is_relative_to(installed) for path in where)
    assert "pipeline" in run("megatron-retool", "--help")
    assert "GiB" in run("megatron-retool", "plan", "--model", "qwen3-0.6b", "--gpus", "H100x8")
    run("megatron-retool", "view", demo_run.run_dir, "--export", tmp_path / "page.html")
    assert "metrics.md is not there" not in (tmp_path / "page.html").read_text()
    model = ("--hf-dir", demo_run.run_dir / "sft_hf", "--mcore-dir", tmp_path / "mcore")
    run("python", "-m", "conversion.hf_to_mcore", *model)


def test_the_built_in_demo_trains(installed: Path, demo_run: FinishedRun, tmp_path: Path) -> None:
    command_line = dataclasses.replace(
        demo_run.command_line, config=None, python=installed / "bin" / "python", directory=tmp_path
    )
    code, output = command_line.run(
        "train",
        "trainer.runs_dir=runs",
        "trainer.total_steps=1",
        "trainer.val_before_train=false",
        f"demo.directory={demo_run.run_dir / 'data'}",
        f"model.path={demo_run.run_dir / 'sft_hf'}",
        "data.train_batch_size=4",
        "learner.world_size=1",
        "learner.mini_batch_size=16",
        "algorithm.dynamic_sampling.enable=false",
    )
    assert code == 0, output
    assert [row["step"] for row in read_metrics(tmp_path / "runs" / "demo" / "metrics.jsonl")] == [1]
