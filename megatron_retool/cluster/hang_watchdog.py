"""Notices that a run stands still, and writes down where every process of it stands.

A hang is a phase of a step (see ``StepTimer``) without any progress for ``trainer.hang_timeout_seconds``, or a phase in
which processes start without any for ``trainer.start_hang_timeout_seconds``. The stacks then go to
logs/stacks_<time>_<phase>.txt: of the driver (threads and asyncio tasks), and by py-spy of every Python process below
it and, on several nodes, below the other nodes' Ray.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TextIO

import psutil
from rich.console import Console

from megatron_retool.config import TrainerConfig
from megatron_retool.errors import OperationError
from megatron_retool.runs.leave import REQUEUE
from megatron_retool.runs.step_timer import StepTimer
from run_files.phases import Phase

DUMP_SECONDS = 30.0
"""Longest look at one process."""
ABORT_GRACE_SECONDS = 60.0
"""How long a driver that was asked to end may continue; then it is ended, and its children with it."""


class RunHung(OperationError):
    """The run stood still, and ``trainer.hang_action`` is abort. The message names phase and stacks."""


class HangWatchdog:
    """Watches ``StepTimer``s from a thread of its own, for the length of an ``async with`` block.

    Args:
        remote_stacks: (node name, stacks) of other nodes; may block.

    Raises:
        RunHung: at the end of the block, which is cancelled, where the run hangs and ``trainer.hang_action`` is abort.
    """

    def __init__(
        self,
        trainer: TrainerConfig,
        console: Console,
        remote_stacks: Callable[[], Iterable[tuple[str, str]]] = tuple,
    ) -> None:
        self._logs = trainer.run_dir / "logs"
        self._settings = trainer
        self._abort = trainer.hang_action == "abort"
        self._console = console
        self._remote_stacks = remote_stacks
        self._timers: weakref.WeakKeyDictionary[StepTimer, str] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: RunHung | None = None

    def watch(self, timer: StepTimer, setting: str = "hang_timeout_seconds") -> StepTimer:
        """From now on ``timer``'s phases count. ``setting``: the key of ``trainer`` that limits them."""
        with self._lock:
            self._timers[timer] = setting
        return timer

    def watch_start(self, timer: StepTimer) -> StepTimer:
        """The same for a timer of phases in which processes start."""
        return self.watch(timer, "start_hang_timeout_seconds")

    def progress(self, phase: Phase) -> None:
        """``phase`` is alive; for phases in which much happens one after another."""
        for timer, _ in self._watched():
            if phase in timer.running:
                timer.touch()

    def _watched(self) -> list[tuple[StepTimer, str]]:
        with self._lock:
            return list(self._timers.items())

    def _limit(self, setting: str) -> float:
        limit: float = getattr(self._settings, setting)
        return limit

    async def __aenter__(self) -> HangWatchdog:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        limits = [self._limit(setting) for setting in ("hang_timeout_seconds", "start_hang_timeout_seconds")]
        self._interval = min([10.0, *(limit / 4 for limit in limits if limit > 0)])
        if any(limit > 0 for limit in limits):
            threading.Thread(target=self._run, name="hang-watchdog", daemon=True).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        # Cleaning up after the cancellation may end in another error, which is not what the run died of.
        if self._error is not None and error is not None:
            assert self._task is not None
            self._task.uncancel()
            raise self._error from error

    def _run(self) -> None:
        reported: dict[int, float] = {}  # timer -> since when it had not moved
        while not self._ended.wait(self._interval):
            for timer, setting in self._stuck():
                if reported.get(id(timer)) == timer.last_change:
                    continue
                reported[id(timer)] = timer.last_change
                self._report(timer, setting)
                if self._abort:
                    self._end_run()
                    return

    def _stuck(self) -> list[tuple[StepTimer, str]]:
        now = time.monotonic()
        return [
            (timer, setting)
            for timer, setting in self._watched()
            if timer.running and 0 < self._limit(setting) < now - timer.last_change
        ]

    def _report(self, timer: StepTimer, setting: str) -> None:
        phase, seconds = timer.running[-1] if timer.running else "?", time.monotonic() - timer.last_change
        path = self._logs / f"stacks_{time.strftime('%Y%m%d-%H%M%S')}_{phase}.txt"
        what = f"no progress in phase {phase} for {seconds:.0f} s (trainer.{setting}={self._limit(setting):g})"
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(what + "\n")
                write_driver_stacks(file, self._loop)
                write_process_stacks(file, psutil.Process())
                for node, text in self._remote_stacks():
                    file.write(f"\n===== node {node}\n{text}")
            where = f"the stacks of every process are in {path}"
        except Exception as error:  # the watchdog continues whatever a look at a sick run meets
            where = f"the stacks in {path} are incomplete: {error}"
        self._console.print(f"{what}; {where}", style="bold red", markup=False, highlight=False)
        if self._abort:
            self._error = RunHung(
                f"{what}; {where}. trainer.hang_action=abort ends the run, which resumes from its last checkpoint"
            )

    def _end_run(self) -> None:
        assert self._task is not None
        self._loop.call_soon_threadsafe(self._task.cancel)
        if not self._ended.wait(ABORT_GRACE_SECONDS):
            self._console.print("[bold red]the driver itself hangs: ending it[/]")
            os._exit(REQUEUE)


def write_driver_stacks(file: TextIO, loop: asyncio.AbstractEventLoop) -> None:
    """Stacks of this process's threads and of the tasks of ``loop``."""
    file.write(f"\n===== driver, process {os.getpid()}: threads\n")
    file.flush()
    faulthandler.dump_traceback(file, all_threads=True)
    file.write("\n===== driver: tasks\n")
    for task in asyncio.all_tasks(loop):
        task.print_stack(file=file)
    file.flush()


def write_process_stacks(file: TextIO, root: psutil.Process) -> None:
    """Stacks of every Python process below ``root``, one section each, as py-spy sees them."""
    result = [process for process in root.children(recursive=True) if _is_python(process)]
    with ThreadPoolExecutor(4) as pool:
        for process, text in zip(result, pool.map(lambda process: py_spy_dump(process.pid), result), strict=True):
            file.write(f"\n===== process {process.pid}: {_command(process)}\n{text}\n")
            file.flush()


def py_spy_dump(pid: int) -> str:
    """The stacks of a Python process, or the reason why they cannot be had."""
    folder = os.path.dirname(sys.executable)
    program = shutil.which("py-spy", path=f"{folder}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        return "py-spy is not installed: pip install py-spy"
    command = [program, "dump", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DUMP_SECONDS)
    except subprocess.TimeoutExpired:
        return f"py-spy saw nothing in {DUMP_SECONDS:.0f} s"
    if done.returncode:
        return (
            f"py-spy: {done.stderr.strip()} (it needs the right to trace: root, the capability SYS_PTRACE, or "
            "kernel.yama.ptrace_scope=0)"
        )
    return done.stdout


def ray_node_stacks(node_ids: Sequence[str], timeout_seconds: float = 120.0) -> list[tuple[str, str]]:
    """(node, stacks) of every Python process below Ray on each of ``node_ids``."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(_below_ray)
    calls = [
        look.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        for node in node_ids
    ]
    ready, _ = ray.wait(calls, num_returns=len(calls), timeout=timeout_seconds)
    result = []
    for node, call in zip(node_ids, calls, strict=True):
        try:
            result.append(ray.get(call) if call in ready else (node, f"no answer in {timeout_seconds:.0f} s\n"))
        except Exception as error:
            result.append((node, f"{error}\n"))
    return result


def _below_ray() -> tuple[str, str]:
    import io
    import socket

    file = io.StringIO()
    raylet = psutil.Process().parent()
    if raylet is not None:
        write_process_stacks(file, raylet)
    return socket.gethostname(), file.getvalue()


def _is_python(process: psutil.Process) -> bool:
    try:
        return "python" in os.path.basename(process.exe()) and process.pid != os.getpid()
    except psutil.Error:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:300]
    except psutil.Error:
        return "ended"
