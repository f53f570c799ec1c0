"""A run that is asked to leave gives up its validation, and keeps the step before it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from megatron_retool.config import load_config
from megatron_retool.loop import train as train_loop
from megatron_retool.loop import validation
from megatron_retool.loop.experience import Collected
from megatron_retool.loop.state import TrainerState
from megatron_retool.runs.leave import LeaveRequest
from megatron_retool.runs.metrics_file import read_metrics
from megatron_retool.trajectory import TrajectoryBatch
from tests.loop.stand_ins import Experience, run_of
from tests.loop.test_skipped_steps import trajectory


@pytest.mark.parametrize(
    ("asked_after", "rows", "said"),
    [
        (0, [], "the first validation was given up, and no step was begun"),
        (2, [0, 1, 2], "the validation after step 2 was given up"),
    ],
)
def test_a_validation_is_given_up(
    asked_after: int, rows: list[int], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(
        None,
        [f"trainer.runs_dir={tmp_path}", "trainer.save_freq=0", "trainer.test_freq=1", "trainer.loggers=[jsonl]",
         "data.train_batch_size=1", "rollout.train.n=2", "learner.mini_batch_size=2"],
    )  # fmt: skip
    group = [trajectory(0), trajectory(1)]
    saved: list[int] = []
    stopped: list[int] = []

    class Stored(Experience):
        async def take(self, step: int) -> Collected:
            return Collected(group, group, {})

    async def learn(*_: Any) -> train_loop.Learned:
        return train_loop.Learned(TrajectoryBatch.from_trajectories(group), {}, None)

    async def save(step: int, *_: Any, wait: bool, weights: bool) -> dict[str, float]:
        saved.append(step)
        return {}

    async def nothing(*_: Any) -> dict[str, float]:
        return {}

    async def restore(*_: Any) -> TrainerState:
        return TrainerState.first(config)

    async def validate(run: Any, step: int, log: Any) -> dict[str, float]:
        if step == asked_after:
            os.kill(os.getpid(), signal.SIGUSR1)
            try:
                await asyncio.sleep(600)
            finally:
                stopped.append(step)
        return {"val-core/all/acc/mean@1": 0.5}

    for name, stand_in in (("step_source", Stored), ("learn", learn), ("restore", restore), ("validate", validate)):
        monkeypatch.setattr(train_loop, name, stand_in)
    monkeypatch.setattr(validation, "validate", validate)
    console = Console(record=True, width=300)
    run = run_of(config, console, 3)
    checkpointer: Any = SimpleNamespace(
        write=save, commit=nothing, finish=nothing, overdue=False, weights_overdue=False, newest=None
    )
    began = time.monotonic()
    with LeaveRequest() as leave:
        finished = asyncio.run(train_loop.train_from_checkpoint(run, checkpointer, leave))
    assert not finished and time.monotonic() - began < 60
    assert stopped == [asked_after] and saved == rows[-1:]
    path = config.trainer.run_dir / "metrics.jsonl"
    assert [row["step"] for row in (read_metrics(path) if path.exists() else [])] == rows
    assert said in console.export_text()
