"""Processes of the run that somebody stops and does not continue."""

from __future__ import annotations

import asyncio
import io
import sys

import psutil
import pytest
from rich.console import Console

from megatron_retool.cluster import stopped_processes


def test_a_process_that_stays_stopped_is_ended_and_one_that_is_continued_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stopped_processes, "LOOK_SECONDS", 0.1)
    console = Console(file=io.StringIO(), width=200)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    staying, continued = psutil.Popen(command), psutil.Popen(command)

    async def scenario() -> None:
        watch = asyncio.create_task(stopped_processes.end_stopped_processes(console))
        staying.suspend()
        continued.suspend()
        await asyncio.sleep(0.2)
        continued.resume()
        deadline = asyncio.get_running_loop().time() + 20
        while staying.poll() is None:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.05)
        watch.cancel()

    try:
        asyncio.run(scenario())
        assert continued.poll() is None
        assert f"process {staying.pid} (" in console.file.getvalue()  # type: ignore[attr-defined]
    finally:
        for process in (staying, continued):
            if process.poll() is None:
                process.kill()
            process.wait()
