"""Wheels in environments of their own: commands run from any directory, and tools stand alone, without the checkout."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron_retool.runs.metrics_file import read_metrics
from tests.end_to_end.conftest import FinishedRun, copy_checkout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


ROOT = Path(__file__).parents[2]
TOOLS = sorted(path.parent.name for path in ROOT.glob("tools/*/pyproject.toml"))
LONG = ("code_interpreter", "sglang_cpu_engine")


SGLANG = ("sglang_cpu_engine",)
"""Tools that need SGLang, which lies apart from this environment's other packages."""

OF_MINUTES = {"code_interpreter": "test_readme or test_languages or test_sessions or test_attacks_by_language"}
"""Which tests run here where all take minutes. The checkout's own run has all of them."""


def environment_with(source: Path, directory: Path, extras: Collection[str] | None = None) -> Path:
    """A new environment: the wheel of ``source``, which is removed, and this test's packages without the checkout.

    Args:
        extras: of the wheel. With them the environment has what the wheel requires and no other package; None: all.
    """
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", directory, source]
    subprocess.run(build, check=True)
    shutil.rmtree(source)
    environment = directory / "environment"
    venv.create(environment, with_pip=False)
    packages = environment / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    (wheel,) = directory.glob("*.whl")
    subprocess.run([*pip, "--python", environment / "bin" / "python", "install", "--no-deps", wheel], check=True)
    if extras is None:
        # Paths of a .pth file are searched, but .pth files in them, such as the checkout's, are not read.
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        (environment / "sglang_only").symlink_to(Path(sys.prefix) / "sglang_only")
    else:
        (installed,) = importlib.metadata.distributions(path=[str(packages)])
        copy_requirements(installed, extras, packages)
    return environment


def copy_requirements(distribution: importlib.metadata.Distribution, extras: Collection[str], packages: Path) -> None:
    """Copy what ``distribution`` requires, and what that requires, from this environment into ``packages``."""
    todo, copied = [(distribution, frozenset(extras))], {(distribution.name, frozenset(extras))}
    while todo:
        requiring, extras = todo.pop()
        for requirement in map(Requirement, requiring.requires or ()):
            if requirement.marker and not any(requirement.marker.evaluate({"extra": each}) for each in ("", *extras)):
                continue
            found = importlib.metadata.distribution(requirement.name)
            assert found.version in requirement.specifier, f"{requirement} is not {found.version}"
            if (found.name, frozenset(requirement.extras)) in copied:
                continue
            copied.add((found.name, frozenset(requirement.extras)))
            todo.append((found, frozenset(requirement.extras)))
            for file in found.files or ():
                if ".." not in file.parts and "__pycache__" not in file.parts:
                    (packages / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(str(found.locate_file(file)), packages / file)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment of the project's wheel."""
    directory = tmp_path_factory.mktemp("wheel")
    copy_checkout(directory / "source")
    return environment_with(directory / "source", directory)


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """Every user may read it, as the sandbox's tests for ordinary users need; pytest's own are closed."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.rare if name in LONG else ()) for name in TOOLS])
def test_a_tool_stands_alone(name: str, open_directory: Path) -> None:
    """Its tests, the README's examples among them, pass where nothing else of the project is."""
    directory, copied = open_directory, open_directory / name
    ignored = shutil.ignore_patterns("__pycache__", ".*", "build", "*.egg-info")
    shutil.copytree(ROOT / "tools", directory / "tools", ignore=ignored)
    project = tomllib.loads((ROOT / "tools" / name / "pyproject.toml").read_text())["project"]
    extras = None if name in SGLANG else project["optional-dependencies"].keys()
    python = environment_with(directory / "tools" / name, directory, extras) / "bin" / "python"
    shutil.rmtree(directory / "tools")
    shutil.copytree(ROOT / "tools" / name, copied, ignore=ignored)
    shutil.rmtree(copied / name)  # the package: what was installed is tested
    for other in ("megatron_retool", "sglang_rollout", "tools"):
        assert subprocess.run([python, "-c", f"import {other}"], cwd=directory, stderr=subprocess.DEVNULL).returncode
    chosen = ("-k", OF_MINUTES[name]) if name in OF_MINUTES else ()
    subprocess.run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, copied], cwd=copied, check=True)
    for command in project.get("scripts", ()):
        help_of = [python.parent / command, "--help"]
        assert command in subprocess.run(help_of, cwd=directory, capture_output=True, text=True, check=True).stdout


def test_commands_run_from_any_directory(installed: Path, demo_run: FinishedRun, tmp_path: Path) -> None:
    def run(*words: str | Path) -> str:
        command = [installed / "bin" / words[0], *words[1:]]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    packages = "megatron_retool, sglang_rollout, conversion, tools, answer_equality, code_interpreter, untrusted"
    packages += ", run_files, run_viewer"
    where = run("python", "-c", f"import {packages}; print(*(m.__file__ for m in ({packages})))").split()
    assert len(where) == 9 and all(Path(path).is_relative_to(installed) for path in where)
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
