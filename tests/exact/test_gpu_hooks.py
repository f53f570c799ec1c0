"""Everything that the exact plugin replaces in SGLang on a GPU is there, by its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_rollout.engine.process import torchvision_directory

ROOT = Path(__file__).parents[2]


@pytest.mark.rare
def test_every_hook_has_a_target() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.exact.hooks_on_gpu"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(torchvision_directory())])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["missing"] == [] and found["hooks"] > 20
    assert found["apart"] == 0.0 and found["sum"] > 1
