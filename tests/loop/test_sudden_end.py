"""A run that ends between any two operations on files, and is started again: nothing is missing or there twice."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

import pyarrow.parquet  # noqa: F401  (here, and not in each of a hundred forks)
import pytest
from rich.console import Console

import megatron_retool.runs.event_file  # noqa: F401  (the same)
from megatron_retool.config import Config, load_config
from megatron_retool.loop import train as train_loop
from megatron_retool.loop import validation as validation_module
from megatron_retool.loop.experience import Collected
from megatron_retool.loop.state import TrainerState
from megatron_retool.runs import checkpointer as checkpointer_module
from megatron_retool.runs.checkpointer import Checkpointer
from megatron_retool.runs.checkpoints import complete_checkpoints, find_resume_point, remove_unfinished
from megatron_retool.runs.leave import LeaveRequest
from megatron_retool.runs.metrics_file import read_metrics
from megatron_retool.runs.weights_checkpoints import weights_checkpoints
from megatron_retool.trajectory import TrajectoryBatch, read_trajectories, write_trajectories
from tests.loop.stand_ins import Experience, run_of
from tests.loop.test_skipped_steps import trajectory

STEPS = 2
ENDED = 99
begun = 0
"""The step that a run is in."""
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
"""Audit events of calls that change a directory; those of ``open`` are told by their flags."""


class Weights:
    """A model whose one weight is the number of steps it was trained."""

    def __init__(self, run_dir: Path) -> None:
        self.steps = 0

    async def save(self, directory: Path, *, asynchronous: bool, weights_only: bool = False) -> None:
        directory.mkdir()
        (directory / "weights").write_text(str(self.steps))
        (directory / "COMPLETE").touch()

    async def finish_save(self) -> None: ...

    async def load(self, directory: Path) -> None:
        self.steps = int((directory / "weights").read_text())


def train(config: Config) -> None:
    """The loop from its newest checkpoint on. What is sampled and learned stands for the step alone."""
    model = Weights(config.trainer.run_dir)
    run = run_of(config, Console(quiet=True), STEPS)
    checkpointer = Checkpointer(config, run.console, lambda: {"learner": model}, find_resume_point(config.trainer))

    class Drawn(Experience):
        async def take(self, step: int) -> Collected:
            global begun
            begun = step
            group = [trajectory(0), trajectory(1)]
            for each in group:
                each.reward = float(step)
            return Collected(group, group, {"drawn": step})

    async def learn(run: Any, state: TrainerState, kept: list[Any], timer: Any) -> train_loop.Learned:
        model.steps += 1
        assert model.steps == state.step
        return train_loop.Learned(TrajectoryBatch.from_trajectories(kept), {"actor/steps": model.steps}, None)

    async def restore(run: Any, checkpointer: Checkpointer) -> TrainerState:
        state = TrainerState.first(config)
        if (newest := await checkpointer.load()) is not None:
            state.load_state_dict(newest.read("trainer_state.json"))
            assert newest.read("prompt_source.json") == {"drawn": state.step}
        return state

    async def validate(run: Any, step: int, log: Any) -> dict[str, float]:
        write_trajectories([trajectory(0)], config.trainer.run_dir / "validation" / f"step_{step:06d}.parquet")
        return {"val-core/all/acc/mean@1": float(step)}

    async def validate_quickly(run: Any, step: int) -> dict[str, float]:
        write_trajectories([trajectory(0)], config.trainer.run_dir / "validation_quick" / f"step_{step:06d}.parquet")
        return {"val-quick/all/acc/mean@1": float(step)}

    vars(checkpointer_module).update(link_weights=shutil.copytree)
    vars(validation_module).update(validate_quickly=validate_quickly, validate=validate)
    vars(train_loop).update(step_source=Drawn, learn=learn, restore=restore, validate=validate)
    assert asyncio.run(train_loop.train_from_checkpoint(run, checkpointer, LeaveRequest()))


def in_another_process(config: Config, change: int | None = None) -> int:
    """Exit code of ``train`` in a fork of this process: 0; ENDED, before a change of files; 1 for an error."""
    child = os.fork()
    if child == 0:
        os.fsync = lambda descriptor: None  # nobody cuts the power
        try:
            if change is not None:
                end_before_change(change, config.trainer.run_dir)
            train(config)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def end_before_change(number: int, directory: Path) -> None:
    """End this process at the last step's ``number``-th change below ``directory``; what is appended is half there."""
    left = number
    write = os.write

    def due() -> bool:
        nonlocal left
        left -= begun == STEPS
        return left == 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and arguments[2] is not None and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if ((writes and str(arguments[0]).startswith(str(directory))) or event in CHANGES) and due():
            os._exit(ENDED)

    def half_write(descriptor: int, data: Any) -> int:
        if due():
            write(descriptor, bytes(data)[: len(data) // 2])
            os._exit(ENDED)
        return write(descriptor, data)

    os.write = half_write
    sys.addaudithook(watch)


def scalar_steps(directory: Path) -> list[int]:
    """Steps that TensorBoard shows of one metric."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return [event.step for event in events.Scalars("actor/steps")]


def check(config: Config) -> None:
    run_dir = config.trainer.run_dir
    rows = read_metrics(run_dir / "metrics.jsonl")
    assert [(row["step"], row.get("actor/steps")) for row in rows] == [(0, None), (1, 1.0), (2, 2.0)]
    assert [row["val-core/all/acc/mean@1"] for row in rows if row["step"] != 1] == [0.0, 2.0]
    assert [row["step"] for row in rows if "val-quick/all/acc/mean@1" in row] == [1]
    # The value of step 0 is the checkpoint's to keep: in step 2 it is a row of an earlier process.
    waited = [(row["early_stopping/best_step"], row["early_stopping/waited"]) for row in rows if row["step"] != 1]
    assert waited == [(0.0, 0.0), (0.0, 1.0)]
    assert all("timing_s/save_checkpoint" in row for row in rows[1:])
    assert scalar_steps(run_dir / "tensorboard") == [1, 2]
    kinds = (".learner.parquet", ".parquet", ".time.json")
    names = [f"step_00000{step}{kind}" for step in (1, 2) for kind in kinds]
    assert sorted(path.name for path in (run_dir / "rollouts").iterdir()) == names
    for step in (1, 2):
        stored = read_trajectories(run_dir / "rollouts" / f"step_00000{step}.parquet")
        assert [t.reward for t in stored] == [step, step]
    assert sorted(path.name for path in (run_dir / "validation").iterdir()) == [
        f"step_00000{step}.parquet" for step in (0, 2)
    ]
    assert [path.name for path in (run_dir / "validation_quick").iterdir()] == ["step_000001.parquet"]
    newest = complete_checkpoints(run_dir)[-1]
    assert newest.step == 2 and (newest.learner / "weights").read_text() == "2"
    assert [(each.step, (each.path / "weights").read_text()) for each in weights_checkpoints(run_dir)] == [(2, "2")]
    remove_unfinished(run_dir)
    names = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert names - {"global_step_1"} == {"global_step_2", "weights_step_2"}


@pytest.mark.parametrize(
    ("asynchronous", "stride"),
    [(False, 3), (True, 5), pytest.param(False, 1, marks=pytest.mark.rare)],
    ids=["saved_at_once", "saved_meanwhile", "at_every_change"],
)
def test_no_moment_of_a_sudden_end_loses_or_doubles_anything(tmp_path: Path, asynchronous: bool, stride: int) -> None:
    number, code = 0, ENDED
    while code == ENDED:
        number += stride
        config = load_config(
            None,
            [
                f"trainer.runs_dir={tmp_path}", f"trainer.experiment_name=ended_{number}", "trainer.save_freq=1",
                "trainer.test_freq=2", "trainer.quick_test_freq=1", "trainer.keep_checkpoints=1",
                "trainer.early_stopping.metric=val-core/all/acc/mean@1", "trainer.early_stopping.mode=min",
                "trainer.save_weights_freq=2",
                "trainer.loggers=[jsonl,tensorboard]",
                f"trainer.async_save={str(asynchronous).lower()}", "data.train_batch_size=1", "rollout.train.n=2",
                "learner.mini_batch_size=2",
            ],
        )  # fmt: skip
        code = in_another_process(config, number)
        assert code in (0, ENDED)
        if code == ENDED:
            assert in_another_process(config) == 0, f"ended before change {number} of the run's files"
        try:
            check(config)
        except AssertionError as error:
            raise AssertionError(f"ended before change {number} of the run's files") from error
    assert number > 20
