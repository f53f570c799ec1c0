"""A run that stands still: stacks of every process, and its end where that is asked for."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from megatron_retool.cluster import deployment, hang_watchdog
from megatron_retool.cluster.deployment import Deployment
from megatron_retool.cluster.gpu_phases import GpuPhases
from megatron_retool.cluster.hang_watchdog import HangWatchdog, RunHung, py_spy_dump
from megatron_retool.cluster.learner_failures import LearnerDied
from megatron_retool.config import load_config
from megatron_retool.loop import train as train_loop
from megatron_retool.runs.leave import REQUEUE, LeaveRequest
from megatron_retool.runs.step_timer import StepTimer
from run_files.phases import Phase

CHILD = (
    "import time\ndef stuck_in_the_child():\n    print('ready', flush=True)\n    time.sleep(60)\nstuck_in_the_child()"
)


def watchdog(tmp_path: Path, console: Console, action: str = "dump", **options: Any) -> HangWatchdog:
    config = load_config(
        None,
        [f"trainer.runs_dir={tmp_path}", "trainer.hang_timeout_seconds=0.8", f"trainer.hang_action={action}"],
    )
    return HangWatchdog(config.trainer, console, **options)


def stacks(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "experiment" / "logs").glob("stacks_*.txt"))


async def waiting_for_an_engine(seconds: float) -> None:
    await asyncio.sleep(seconds)


def test_stacks_of_driver_children_and_other_nodes_are_written_once(tmp_path: Path) -> None:
    console = Console(record=True, width=400)

    async def hang() -> None:
        async with watchdog(tmp_path, console, remote_stacks=lambda: [("node7", "stuck_over_there\n")]) as dog:
            timer = dog.watch(StepTimer())
            with timer.phase(Phase.STEP), timer.phase(Phase.UPDATE_ACTOR):
                await waiting_for_an_engine(2.5)

    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline()
        asyncio.run(hang())
    finally:
        child.kill()
        child.communicate()
    (path,) = stacks(tmp_path)
    assert path.name.endswith("_update_actor.txt")
    text = path.read_text()
    for words in ("no progress in phase update_actor", "waiting_for_an_engine", "driver, process"):
        assert words in text
    # Containers may forbid tracing; the file then tells what would allow it.
    traced = "stuck_in_the_child" in text[text.index("===== process") :]
    assert traced or "SYS_PTRACE" in text
    assert "===== node node7\nstuck_over_there" in text
    assert path.name in console.export_text()


def test_progress_and_ended_phases_are_no_hang(tmp_path: Path) -> None:
    async def work() -> None:
        async with watchdog(tmp_path, Console(quiet=True)) as dog:
            timer = dog.watch(StepTimer())
            with timer.phase(Phase.GENERATION):
                for _ in range(8):
                    await asyncio.sleep(0.15)
                    dog.progress(Phase.GENERATION)
            for _ in range(3):
                with timer.phase(Phase.UPDATE_ACTOR):
                    await asyncio.sleep(0.15)
            await asyncio.sleep(1.2)

    asyncio.run(work())
    assert stacks(tmp_path) == []


def test_abort_ends_the_block_with_the_reason(tmp_path: Path) -> None:
    cleaned = []

    async def hang() -> None:
        async with watchdog(tmp_path, Console(quiet=True), "abort") as dog:
            with dog.watch(StepTimer()).phase(Phase.GENERATION):
                try:
                    await asyncio.sleep(60)
                finally:
                    cleaned.append(True)

    start = time.monotonic()
    with pytest.raises(RunHung, match="no progress in phase gen.*stacks_.*_gen.txt.*resumes"):
        asyncio.run(hang())
    assert cleaned and time.monotonic() - start < 20


def test_a_cancellation_from_outside_stays_one(tmp_path: Path) -> None:
    async def cancelled() -> None:
        async with watchdog(tmp_path, Console(quiet=True), "abort"):
            asyncio.current_task().cancel()
            await asyncio.sleep(1)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


def test_a_driver_that_cannot_be_cancelled_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(hang_watchdog, "ABORT_GRACE_SECONDS", 0.2)
    monkeypatch.setattr(os, "_exit", codes.append)

    async def blocked() -> None:
        async with watchdog(tmp_path, Console(quiet=True), "abort") as dog:
            with dog.watch(StepTimer()).phase(Phase.GENERATION):
                deadline = time.monotonic() + 15
                while not codes and time.monotonic() < deadline:
                    time.sleep(0.05)  # the event loop itself does not run
            await asyncio.sleep(0)

    with pytest.raises(RunHung):
        asyncio.run(blocked())
    assert codes == [REQUEUE]


def test_starting_has_a_limit_of_its_own(tmp_path: Path) -> None:
    limits = ["trainer.hang_timeout_seconds=0.3", "trainer.start_hang_timeout_seconds=1.2"]
    config = load_config(None, [f"trainer.runs_dir={tmp_path}", *limits])
    console = Console(record=True, width=400)

    async def start(seconds: float) -> None:
        async with HangWatchdog(config.trainer, console) as dog:
            with dog.watch_start(StepTimer()).phase(Phase.START_ENGINES):
                await asyncio.sleep(seconds)

    asyncio.run(start(0.9))
    assert stacks(tmp_path) == []
    asyncio.run(start(2.0))
    assert [path.name.rpartition("-")[2][7:] for path in stacks(tmp_path)] == ["start_engines.txt"]
    assert "(trainer.start_hang_timeout_seconds=1.2)" in console.export_text()


class StuckGroup:
    """A learner whose ranks wait for each other for ever from the ``fine_starts``-th start on."""

    fine_starts = 0
    started: list[StuckGroup] = []

    def __init__(self, *_: Any, **__: Any) -> None:
        self.killed = False
        self.started.append(self)

    async def setup(self, steps: int) -> None:
        if len(self.started) > self.fine_starts:
            await asyncio.sleep(60)

    def kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize("fine_starts", [0, 1], ids=["at_the_start", "built_anew_after_a_death"])
def test_a_learner_that_does_not_come_up_ends_the_run_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fine_starts: int
) -> None:
    config = load_config(
        None,
        [f"trainer.runs_dir={tmp_path}", "trainer.start_hang_timeout_seconds=0.6", "trainer.hang_action=abort"],
    )
    stopped: list[bool] = []

    class OnlyLearner(Deployment):
        """A run of nothing but a learner."""

        async def _start(self) -> None:
            self._stack.callback(stopped.append, True)
            self._placement, self.total_steps = SimpleNamespace(node_ids=()), 1
            self.gpu_phases = GpuPhases(False, list, list)
            self.rollout = SimpleNamespace(drop_paused=lambda: None)
            self.prompts = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
            await self._start_learner()

    async def dies(*_: Any) -> bool:
        raise LearnerDied("learner rank 0 died")

    monkeypatch.setattr(StuckGroup, "fine_starts", fine_starts)
    monkeypatch.setattr(StuckGroup, "started", [])
    monkeypatch.setattr(deployment, "LearnerGroup", StuckGroup)
    monkeypatch.setattr(train_loop, "Deployment", OnlyLearner)
    monkeypatch.setattr(train_loop, "train_from_checkpoint", dies)
    with pytest.raises(RunHung, match=r"phase start_learner .*trainer\.start_hang_timeout_seconds=0\.6.*resumes"):
        asyncio.run(asyncio.wait_for(train_loop.train(config, Console(quiet=True), LeaveRequest()), 30))
    assert stopped and len(StuckGroup.started) == fine_starts + 1
    assert all(group.killed for group in StuckGroup.started)


def test_no_process_no_stacks() -> None:
    assert py_spy_dump(2**22 + 1).startswith("py-spy: ")
