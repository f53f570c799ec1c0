"""A process that is stopped (SIGSTOP) and not continued answers no request and closes nothing: worse than a dead one.

What works for the run is replaced when it dies, so the cure is to end it. On other nodes than the driver's an engine's
guard does the same for its engine, and the hang watchdog finds the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import psutil
from rich.console import Console

LOOK_SECONDS = 2.0
STOPPED_LOOKS = 5
"""Looks in a row that must find a process stopped. Not a time: whoever suspends and continues a whole job does so to
the driver as well."""


async def end_stopped_processes(console: Console) -> None:
    """Until cancelled: SIGKILL to every process below this one that stays stopped."""
    seen: Counter[psutil.Process] = Counter()
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        result = await asyncio.to_thread(_stopped)
        seen = Counter({process: seen[process] + 1 for process in result})
        for process in [process for process, looks in seen.items() if looks >= STOPPED_LOOKS]:
            with contextlib.suppress(psutil.Error):
                text = f"process {process.pid} ({process.name()}) was stopped and not continued: ending it"
                console.print(text, style="yellow", markup=False, highlight=False)
                process.kill()


def _stopped() -> list[psutil.Process]:
    result = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            # A debugger's stop is another state.
            if process.status() == psutil.STATUS_STOPPED:
                result.append(process)
    return result
