"""The end of a server that the driver cannot continue without."""

from __future__ import annotations

import subprocess
import sys

from megatron_retool.runs.leave import REQUEUE

DRIVER = """
import psutil, subprocess, sys, time
from megatron_retool.cluster.runtime import ended_with
server = psutil.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
with ended_with([server]):
    pass
with ended_with([server]):
    if sys.argv[1] == "dies":
        server.kill()
        time.sleep(30)
server.kill()
"""


def run(fate: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", DRIVER, fate], capture_output=True, text=True, timeout=25)


def test_the_driver_ends_at_once_with_a_server_of_ray_and_says_how_to_go_on() -> None:
    done = run("dies")
    assert done.returncode == REQUEUE
    assert "ended, and the run cannot continue without it" in done.stdout and "resumes it from its last" in done.stdout
    assert run("lives").returncode == 0
