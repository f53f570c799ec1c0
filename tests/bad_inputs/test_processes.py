"""The same from outside: commands and scripts as processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "megatron_retool"]
CONVERTER = ROOT / "conversion" / "mcore_to_hf.py"
SUBMIT = ["bash", str(ROOT / "scripts" / "slurm" / "submit.sh"), "--dry-run"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([*COMMAND, "train", "trainer.sead=1"], "'trainer.seed'"),
        ([*COMMAND, "pipeline", "learner.world_size=0"], "learner.world_size=0 must be at least 1"),
        ([sys.executable, str(CONVERTER), "--mcore-dir=x", "--hf-dir=y"], "x does not exist"),
        ([*SUBMIT, "--config", "gone.yaml"], "gone.yaml does not exist"),
        ([*SUBMIT, "--nodes", "x"], "--nodes"),
    ],
)  # fmt: skip
def test_refused(command: list[str], words: str, tmp_path: Path) -> None:
    virtual_environment = str(Path(sys.executable).parents[1])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MEGATRON_RETOOL_VENV": virtual_environment}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
    output = done.stdout + done.stderr
    assert done.returncode == 1 and words in output and "Traceback" not in output
    assert not list(tmp_path.iterdir())
