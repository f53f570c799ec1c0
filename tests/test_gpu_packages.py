"""Whether the packages of requirements/gpu*.txt agree, and whether docs/gpu_first_run.md says which they are.

pip's resolver is asked for by ``pytest -m gpu_packages``: it needs the package index, and a minute or two.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LISTS = ("gpu-torch", "gpu-build", "gpu")
EXTENSION = "transformer-engine[core_cu13,pytorch]"
PIP = "pip==26.3"
"""Of its own: earlier ones download whole packages to look at their metadata."""


def _documented() -> dict[str, str]:
    page = (ROOT / "docs" / "gpu_first_run.md").read_text(encoding="utf-8")
    table = page.partition("## Versions that agree")[2].partition("## ")[0]
    return dict(re.findall(r"^\| ([\w-]+) \| (\d\S*) \|", table, flags=re.MULTILINE))


def _requirements() -> list[str]:
    lines = [line for name in LISTS for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_the_page_has_the_pinned_versions() -> None:
    pinned = {
        re.sub(r"\[.*\]", "", name).replace("-", "_"): version
        for name, _, version in (line.partition("==") for line in _requirements())
    }
    documented = {name.replace("-", "_"): version for name, version in _documented().items()}
    assert len(documented) > 10
    shared = documented.keys() & pinned.keys()
    assert shared >= {"torch", "sglang", "megatron_core", "transformer_engine", "nvidia_cuda_nvcc"}
    assert {name: documented[name] for name in shared} == {name: pinned[name] for name in shared}


def test_what_is_in_two_lists_is_the_same_in_both() -> None:
    lines = _requirements()
    names = [line.partition("==")[0] for line in lines]
    twice = {name for name in names if names.count(name) > 1}
    assert twice == {"nvidia-cuda-crt", "nvidia-cuda-cccl"}
    assert all(len({line for line in lines if line.startswith(f"{name}==")}) == 1 for name in twice)


@pytest.mark.gpu_packages
def test_pip_finds_versions_that_agree(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if "gpu_packages" not in request.config.option.markexpr:
        pytest.skip("the package index is asked when asked for: pytest -m gpu_packages")
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--upgrade", PIP], check=True)
    lines = _requirements()
    assert any(line.startswith(EXTENSION) for line in lines)
    # The extension's metadata needs CUDA's packages; what it asks for is its own version of the others.
    (tmp_path / "all.txt").write_text(
        "\n".join(line.replace(EXTENSION, "transformer-engine[core_cu13]") for line in lines)
    )
    report = tmp_path / "report.json"
    command = [python, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", report]
    done = subprocess.run([*command, "-r", tmp_path / "all.txt"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {item["metadata"]["name"]: item["metadata"] for item in json.loads(report.read_text())["install"]}
    documented = _documented()
    assert {name: found[name]["version"] for name in documented} == documented
    version = found["transformer_engine"]["version"]
    assert f'transformer_engine_torch=={version}; extra == "pytorch"' in found["transformer_engine"]["requires_dist"]
    # Built against CUDA 13.0, whose headers requirements/gpu-build.txt names.
    toolkit = "\n".join(found["cuda-toolkit"]["requires_dist"])
    for name in ("nvidia-cuda-crt", "nvidia-cuda-cccl", "nvidia-cuda-nvcc", "nvidia-nvvm"):
        assert f"{name}=={found[name]['version']}.*" in toolkit
