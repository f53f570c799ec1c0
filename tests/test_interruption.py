"""What signals do to a command, in processes that stand for its phases."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

PREAMBLE = """
import sys, time
from pathlib import Path
from megatron_retool.interruption import end_when_interrupted, interrupts, run_stage, run_interruptible, stopped
from contextlib import nullcontext
end_when_interrupted()
def ready():
    print("ready", flush=True)
    time.sleep(30)
"""

IMPORTS = PREAMBLE + "ready()"

CLEANS_UP = (
    PREAMBLE
    + """
def command():
    with interrupts(how_to_go_on=lambda: "go on so"):
        try:
            ready()
        finally:
            time.sleep(0.6)
            print("clean", flush=True)
sys.exit(run_interruptible(command))
"""
)

ANSWERS_BY_ITSELF = (
    PREAMBLE
    + """
import asyncio
async def main():
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    with interrupts(lambda: loop.call_soon_threadsafe(task.cancel)):
        print("ready", flush=True)
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            await asyncio.sleep(0.6)
            print("clean", flush=True)
            raise KeyboardInterrupt from None
sys.exit(run_interruptible(lambda: asyncio.run(main())))
"""
)

HAS_A_STAGE = PREAMBLE + (
    "sys.exit(run_interruptible(lambda: run_stage([sys.executable, '-c', sys.argv[1]], lambda _: nullcontext())))"
)

ERROR_ON_THE_WAY_OUT = (
    PREAMBLE
    + """
def command():
    try:
        ready()
    finally:
        raise ValueError("what a library makes of it")
sys.exit(run_interruptible(command))
"""
)


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("how", ["terminal", "driver", "group", "twice"])
@pytest.mark.parametrize(
    "script", [IMPORTS, CLEANS_UP, ANSWERS_BY_ITSELF, HAS_A_STAGE, ERROR_ON_THE_WAY_OUT],
    ids=["imports", "cleans_up", "asynchronous", "stage", "error"],
)  # fmt: skip
def test_one_line_and_the_documented_exit_code(script, how):
    arguments = [CLEANS_UP] if script == HAS_A_STAGE else []
    process = start(script, *arguments)
    if how == "driver":
        os.kill(process.pid, signal.SIGTERM)
    else:
        os.killpg(process.pid, signal.SIGTERM if how == "group" else signal.SIGINT)
    if how == "twice" and script != IMPORTS:
        time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 130, output
    lines = output.splitlines()
    assert len([line for line in lines if line.startswith("stopped")]) == 1 and "Traceback" not in output
    if script in (CLEANS_UP, ANSWERS_BY_ITSELF, HAS_A_STAGE):
        assert lines[0] == "clean"
    if script == CLEANS_UP:
        assert lines[-1].endswith("; go on so")


def test_a_stage_ends_with_the_command_that_is_killed(tmp_path):
    stage = CLEANS_UP.replace('print("clean"', f'Path({str(tmp_path / "clean")!r}).touch(); print("clean"')
    process = start(HAS_A_STAGE, stage)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 10
    while not (tmp_path / "clean").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_error_without_a_signal_stays_one():
    script = PREAMBLE + "sys.exit(run_interruptible(lambda: int('x')))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "ValueError" in done.stderr and "stopped" not in done.stdout


def test_clean_up_that_takes_too_long_can_be_left():
    script = PREAMBLE + (
        "from megatron_retool import interruption\ninterruption.PATIENCE_SECONDS = 0.3\n"
        "def command():\n    try:\n        ready()\n    finally:\n        time.sleep(30)\n"
        "run_interruptible(command)"
    )
    process = start(script)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    assert process.wait(5) == 130
    assert process.stdout is not None
    process.stdout.close()
