"""A full disk under the loop: rollouts and metrics that have no room are told, counted, and nothing is half-written."""

from __future__ import annotations

import asyncio
import resource
import weakref
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
from megatron_retool.trajectory import TrajectoryBatch, read_trajectories
from tests.loop.stand_ins import Experience, run_of
from tests.loop.test_skipped_steps import trajectory


def test_the_loop_goes_on_and_leaves_no_debris(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(
        None,
        [f"trainer.runs_dir={tmp_path}", "trainer.save_freq=0", "trainer.test_freq=0", "trainer.val_before_train=false",
         "trainer.loggers=[jsonl]", "data.train_batch_size=1", "rollout.train.n=2", "learner.mini_batch_size=2"],
    )  # fmt: skip
    group = [trajectory(0), trajectory(1)]
    rollouts = config.trainer.run_dir / "rollouts"
    saved: list[int] = []
    batches: list[weakref.ref[TrajectoryBatch]] = []

    class Stored(Experience):
        async def take(self, step: int) -> Collected:
            assert [batch() for batch in batches] == [None] * (step - 1)  # no step is held while another is generated
            if step == 2:  # the quota is reached
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, unlimited))
            elif step == 3:
                resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
            return Collected(group, group, {})

    async def learn(*_: Any) -> train_loop.Learned:
        batch = TrajectoryBatch.from_trajectories(group)
        batches.append(weakref.ref(batch))
        return train_loop.Learned(batch, {}, None)

    async def save(step: int, *_: Any, wait: bool, weights: bool) -> dict[str, float]:
        saved.append(step)
        return {}

    async def commit() -> None:
        pass

    async def finish() -> dict[str, float]:
        return {}

    async def restore(*_: Any) -> TrainerState:
        return TrainerState.first(config)

    async def validate(run: Any, step: int, log: Any) -> dict[str, float]:
        return {}

    for name, stand_in in (("step_source", Stored), ("learn", learn), ("restore", restore)):
        monkeypatch.setattr(train_loop, name, stand_in)
    monkeypatch.setattr(validation, "validate", validate)
    console = Console(record=True, width=300)
    run = run_of(config, console, 3)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    try:
        checkpointer: Any = SimpleNamespace(
            write=save, commit=commit, finish=finish, overdue=False, weights_overdue=False, newest=None
        )
        assert asyncio.run(train_loop.train_from_checkpoint(run, checkpointer, LeaveRequest()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
    assert sorted(path.name for path in rollouts.iterdir()) == [
        f"step_00000{step}.{kind}" for step in (1, 3) for kind in ("learner.parquet", "parquet", "time.json")
    ]
    assert len(read_trajectories(rollouts / "step_000003.parquet")) == 2
    rows = read_metrics(config.trainer.run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3] and saved == [3]
    # Two parquet files and the times of the step, and then the row itself.
    assert [row.get("monitor/write_errors") for row in rows] == [None, 3.0, 4.0]
    assert "step_000002.parquet was not written" in console.export_text()
