"""Every shell script: what it says when it is asked for help, and what shellcheck says of it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(
    path
    for folder in ("scripts", "scripts/slurm", ".ci")
    for path in (ROOT / folder).iterdir()
    if path.is_file() and path.suffix != ".env"
)
WITH_ARGUMENTS = ("setup.sh", "test.sh", "train_dapo_megatron.sh", "submit.sh", "interactive.sh")


@pytest.fixture(scope="module")
def refusing_programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PATH on which everything that installs, submits or runs leaves a trace."""
    directory = tmp_path_factory.mktemp("bin")
    for name in ("python", "python3", "python3.12", "pip", "sbatch", "salloc", "srun", "apt-get", "ray", "scontrol"):
        program = directory / name
        program.write_text(f'#!/bin/bash\necho {name} >>"$TRACE"\nexit 7\n')
        program.chmod(0o755)
    return directory


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_help_is_printed_and_nothing_done(script: Path, refusing_programs: Path, tmp_path: Path) -> None:
    environment = {
        "PATH": f"{refusing_programs}:{os.defpath}",
        "TRACE": str(tmp_path / "trace"),
        "MEGATRON_RETOOL_VENV": str(tmp_path / "venv"),
    }
    for arguments in (
        ["--help"],
        ["-h"],
        *([["--config", "x.yaml", "--help"]] if script.name in WITH_ARGUMENTS else []),
    ):
        done = subprocess.run(
            ["bash", str(script), *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env=environment,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[0] == script.read_text(encoding="utf-8").splitlines()[1].removeprefix("# ")
        assert "\nSBATCH" not in done.stdout and "\nshellcheck " not in done.stdout
    assert not list(tmp_path.iterdir()), "it was only asked for help"


def test_usage_names_the_command_and_where_settings_are() -> None:
    for name in WITH_ARGUMENTS:
        script = next(path for path in SCRIPTS if path.name == name)
        done = subprocess.run(["bash", str(script), "--help"], capture_output=True, text=True, check=True)
        assert f"  bash {script.relative_to(ROOT)} " in done.stdout
        if name.startswith("train"):
            assert "megatron-retool pipeline --help" in done.stdout


def test_what_follows_two_dashes_is_another_programs() -> None:
    command = ["bash", "-c", f"source {ROOT}/scripts/usage.sh; echo went on", "x", "--", "--help"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "went on\n"


@pytest.mark.skipif(
    shutil.which("shellcheck") is None, reason="shellcheck is not installed (bash .ci/install_packages.sh)"
)
def test_shellcheck() -> None:
    command = ["shellcheck", "-x", *map(str, SCRIPTS), "scripts/slurm/nccl.env"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stdout
