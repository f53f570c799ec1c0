"""Programs on tinker-cookbook, which has an environment of its own beside this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.end_to_end.conftest import ROOT

COOKBOOK = Path(sys.prefix) / "cookbook_only"
"""Where scripts/setup.sh puts requirements/cookbook_only.txt on hosts without a GPU."""


def run_with_cookbook(words: list[str], directory: Path, url: str, **environment: str) -> None:
    """Run Python with ``words`` in ``directory`` as a client of the server at ``url``; it has to end well."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=directory,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(COOKBOOK), str(ROOT)]),
            "TINKER_BASE_URL": url,
            "TINKER_API_KEY": "tml-local",
            "HF_HUB_OFFLINE": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
