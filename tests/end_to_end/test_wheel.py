"""Wheels in environments of their own: commands run from any directory, and tools stand alone, without the checkout."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

from megatron_retool.runs.metrics_file import read_metrics
from tests.end_to_end.conftest import FinishedRun, copy_checkout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


ROOT = Path(__file__).parents[2]
TOOLS = sorted(path.parent.name for path in ROOT.glob("tools/*/pyproject.toml"))


def environment_with(source: Path, directory: Path) -> Path:
    """A new environment: the wheel of ``source``, which is removed, and this test's packages without the checkout."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", directory, source]
    subprocess.run(build, check=True)
    shutil.rmtree(source)
    environment = directory / "environment"
    venv.create(environment, with_pip=False)
    # Paths of a .pth file are searched, but .pth files in them, such as the checkout's, are not read.
    packages = environment / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (environment / "sglang_only").symlink_to(Path(sys.prefix) / "sglang_only")
    (wheel,) = directory.glob("*.whl")
    subprocess.run([*pip, "--python", environment / "bin" / "python", "install", "--no-deps", wheel], check=True)
    return environment


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment of the project's wheel."""
    directory = tmp_path_factory.mktemp("wheel")
    copy_checkout(directory / "source")
    return environment_with(directory / "source", directory)


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_stands_alone(name: str, tmp_path: Path) -> None:
    """Its tests, the README's examples among them, pass where nothing else of the project is."""
    copied = tmp_path / name
    ignored = shutil.ignore_patterns("__pycache__", ".*", "build", "*.egg-info")
    shutil.copytree(ROOT / "tools" / name, tmp_path / "source", ignore=ignored)
    python = environment_with(tmp_path / "source", tmp_path) / "bin" / "python"
    shutil.copytree(ROOT / "tools" / name, copied, ignore=ignored)
    shutil.rmtree(copied / name)  # the package: what was installed is tested
    for other in ("megatron_retool", "sglang_rollout", "tools"):
        assert subprocess.run([python, "-c", f"import {other}"], cwd=tmp_path, stderr=subprocess.DEVNULL).returncode
    subprocess.run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", copied], cwd=copied, check=True)
    (command,) = tomllib.loads((copied / "pyproject.toml").read_text())["project"]["scripts"]
    done = subprocess.run([python.parent / command, "--help"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert command in done.stdout


def test_commands_run_from_any_directory(installed: Path, demo_run: FinishedRun, tmp_path: Path) -> None:
    def run(*words: str | Path) -> str:
        command = [installed / "bin" / words[0], *words[1:]]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    packages = "megatron_retool, sglang_rollout, conversion, tools, answer_equality"
    where = run("python", "-c", f"import {packages}; print(*(m.__file__ for m in ({packages})))").split()
    assert len(where) == 5 and all(Path(path).is_relative_to(installed) for path in where)
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
