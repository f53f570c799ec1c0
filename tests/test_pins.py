"""The lists of requirements/ agree with pyproject.toml and with each other, and docs/gpu_first_run.md with them.

The package index is asked by ``pytest -m package_index``, which then fails where pins are behind, and names them.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from megatron_retool.parity.doctor.host_steps import read_pins

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
GROUPS: dict[str, list[str]] = PROJECT["dependency-groups"]
REQUIRED: list[str] = PROJECT["project"]["dependencies"]
LOCKED = ("cpu", "gpu", *GROUPS)


def _name(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[=<>;]", requirement)[0]).lower()


def _exact(requirements: list[str]) -> dict[str, str]:
    return {_name(name): version for name, found, version in (each.partition("==") for each in requirements) if found}


def _pins(name: str) -> dict[str, str]:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    return {_name(package): version for package, version in read_pins(text)}


def _imported(*folders: str) -> set[str]:
    """Top-level names of what the Python files of ``folders`` import, also within functions."""
    found = set()
    for file in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        if "tests" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").partition(".")[0])
    return found


def test_what_the_packages_import_is_declared() -> None:
    declared = {
        _name(each) for each in [*REQUIRED, *(each for name in EXTRAS if name != "test" for each in EXTRAS[name])]
    }
    of_package = importlib.metadata.packages_distributions()
    imported = _imported("megatron_retool", "sglang_rollout", "conversion", "tools")
    # Several distributions may share a name, as those of google do.
    distributions = [{_name(each) for each in of_package[name]} for name in imported & of_package.keys()]
    undeclared = {sorted(each)[0] for each in distributions if not each & declared}
    undeclared.discard(_name(PROJECT["project"]["name"]))
    # mcp brings mcp-types and httpx2, and anyio comes with both; ipython brings traitlets, and torch for
    # CUDA Triton; a snippet may run pytest.
    assert undeclared <= {"anyio", "httpx2", "mcp-types", "traitlets", "triton", "pytest"}


@pytest.mark.parametrize("name", LOCKED)
def test_a_list_has_what_is_pinned_and_a_hash_for_each(name: str) -> None:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text()
    entries = re.split(r"\n(?=\S)", lines.strip())
    assert all("==" in entry and "--hash=sha256:" in entry for entry in entries if not entry.startswith("#"))
    asked = [*REQUIRED, *EXTRAS["gpu"]] if name == "gpu" else [*REQUIRED, *EXTRAS["cpu"]]
    if name in GROUPS:
        asked = GROUPS[name]
    exact = _exact(asked)
    if name == "cpu":
        assert [exact.pop("torch")] == list(_pins("cpu-torch").values())
    pins = _pins(name)
    assert exact and {package: pins.get(package) for package in exact} == exact


def test_hosts_with_and_without_gpus_have_the_same_releases() -> None:
    cpu, gpu = _pins("cpu") | _pins("cpu-torch"), _pins("gpu")
    shared = cpu.keys() & gpu.keys()
    assert len(shared) > 150
    assert {name: cpu[name] for name in shared} == {name: gpu[name] for name in shared}
    first = _pins("gpu-torch")
    assert {name: gpu[name] for name in first} == first


def test_nothing_that_is_left_out_on_a_cpu_is_in_its_list() -> None:
    lines = (ROOT / "requirements" / "left_out_on_cpu.txt").read_text().splitlines()
    left_out = {_name(line) for line in lines if line and not line.startswith("#")}
    assert len(left_out) > 20 and not left_out & _pins("cpu").keys()
    assert not {name for name in _pins("cpu") if name.startswith(("nvidia-cu", "nvidia-nccl", "cuda-"))}


def test_the_page_has_the_pinned_versions() -> None:
    page = (ROOT / "docs" / "gpu_first_run.md").read_text(encoding="utf-8")
    table = page.partition("## Versions that agree")[2].partition("## ")[0]
    documented = dict(re.findall(r"^\| ([\w-]+) \| (\d\S*) \|", table, flags=re.MULTILINE))
    pins = _pins("gpu")
    assert len(documented) > 10
    assert {_name(name): version for name, version in documented.items()} == {
        _name(name): pins[_name(name)] for name in documented
    }
    # The compiler and the headers are of the release of torch's CUDA.
    release = ".".join(documented["cuda-toolkit"].split(".")[:2])
    assert {pins[name][:4] for name in ("nvidia-cuda-crt", "nvidia-cuda-cccl", "nvidia-nvvm")} == {release}


@pytest.mark.package_index
def test_the_index_agrees_and_which_pins_are_behind(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if "package_index" not in request.config.option.markexpr:
        pytest.skip("the package index is asked when asked for: pytest -m package_index")
    for name in ("scripts", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    subprocess.run(["bash", "scripts/pins.sh"], cwd=tmp_path, check=True)
    for name in LOCKED:
        assert (tmp_path / "requirements" / f"{name}.txt").read_text() == (
            ROOT / "requirements" / f"{name}.txt"
        ).read_text(), "bash scripts/pins.sh was not run after pyproject.toml changed"
    pins = _pins("cpu") | _pins("gpu")
    names = tmp_path / "names.in"
    names.write_text("\n".join(sorted(_name(each) for each in [*REQUIRED, *EXTRAS["gpu"], *EXTRAS["test"]])))
    command = [".venv/bin/uv", "pip", "compile", "--quiet", "--no-deps", "--no-header", "--python-version", "3.12"]
    newest = subprocess.run([*command, names], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    behind = [f"{name} {pins[_name(name)]}: {new}" for name, new in read_pins(newest) if pins[_name(name)] != new]
    assert not behind, "pinned, and newest:\n" + "\n".join(behind)
