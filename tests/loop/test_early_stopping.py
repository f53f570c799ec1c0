"""A run whose validations get no better ends, as a complete one, at the same step with and without interruptions."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megatron_retool.config import Config, ConfigError, EarlyStoppingConfig, load_config
from megatron_retool.loop import train as train_loop
from megatron_retool.loop import validation
from megatron_retool.loop.early_stopping import EarlyStopping, judge
from megatron_retool.loop.experience import Collected
from megatron_retool.loop.resume import announce_resume
from megatron_retool.loop.state import TrainerState
from megatron_retool.runs.checkpointer import Checkpointer
from megatron_retool.runs.checkpoints import complete_checkpoints, find_resume_point
from megatron_retool.runs.leave import LeaveRequest
from megatron_retool.runs.metrics_file import read_metrics
from megatron_retool.trajectory import TrajectoryBatch
from tests.loop.stand_ins import Experience, run_of
from tests.loop.test_skipped_steps import trajectory
from tests.loop.test_sudden_end import Weights

METRIC = "val-core/all/acc/mean@4"
QUICK = "val-quick/all/acc/mean@2"
VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=12)


def watched(values: list[float], **settings: Any) -> tuple[EarlyStopping, list[int]]:
    """Early stopping that saw ``values`` in steps 0, 1, …, and the steps after which it said stop."""
    stopping, stops = EarlyStopping(EarlyStoppingConfig(metric=METRIC, **settings)), []
    for step, value in enumerate(values):
        stopping.record(step, {METRIC: value})
        if stopping.stops:
            stops.append(step)
    return stopping, stops


def test_patience_counts_validations_since_the_best() -> None:
    _, stops = watched([0.2, 0.5, 0.4, 0.5, 0.6, 0.6, 0.1, 0.59], patience=3)
    assert stops == [7]
    _, stops = watched([0.2, 0.5, 0.4, 0.5, 0.6, 0.6, 0.1, 0.59], patience=2)
    assert stops == [3, 6, 7], "0.5 again is not better"
    _, stops = watched([0.5, 0.5625, 0.625, 0.6875], patience=2, min_delta=0.125)
    assert stops == [2], "each is better, none by enough before the last"
    stopping, stops = watched([3.0, 2.0, 2.5, 2.5], patience=2, mode="min", min_delta=0.1)
    assert stops == [3]
    assert stopping.reason == (
        f"early stopping: {METRIC} was 2 in step 1 and is not smaller by more than 0.1 in the 2 validations since "
        "(trainer.early_stopping.patience=2)"
    )


@given(VALUES, st.integers(1, 4), st.floats(0, 0.5), st.integers(0, 12))
def test_a_run_that_goes_on_from_a_checkpoint_judges_as_one_that_never_stopped(
    values, patience, min_delta, cut
) -> None:
    whole, stops = watched(values, patience=patience, min_delta=min_delta)
    first, _ = watched(values[:cut], patience=patience, min_delta=min_delta)
    resumed = EarlyStopping(EarlyStoppingConfig(metric=METRIC, patience=patience, min_delta=min_delta))
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in range(cut, len(values)):
        resumed.record(step, {METRIC: values[step]})
    assert resumed.state_dict() == whole.state_dict() and resumed.stops == whole.stops


@given(values=VALUES, min_delta=st.floats(0, 0.5))
def test_min_is_max_of_the_negative_and_more_patience_never_ends_a_run_earlier(
    values: list[float], min_delta: float
) -> None:
    rows = list(enumerate(values))
    found = judge(rows, "max", min_delta)
    mirrored = judge([(step, -value) for step, value in rows], "min", min_delta)
    assert (found.best, found.best_step, found.waited) == (-mirrored.best, mirrored.best_step, mirrored.waited)
    assert 0 <= found.waited < len(values) and values[found.best_step] == found.best
    assert all(value - found.best <= min_delta for value in values[found.best_step :])
    firsts = [(watched(values, patience=patience, min_delta=min_delta)[1] or [99])[0] for patience in range(1, 6)]
    assert firsts == sorted(firsts)


def test_what_is_not_a_value_is_no_validation() -> None:
    stopping = EarlyStopping(EarlyStoppingConfig(metric=METRIC, patience=1))
    assert stopping.record(1, {"actor/loss": 1.0}) == {} and not stopping.stops
    assert stopping.record(2, {METRIC: 0.5}) == {
        "early_stopping/best": 0.5, "early_stopping/best_step": 2.0, "early_stopping/waited": 0.0
    }  # fmt: skip
    assert stopping.record(3, {METRIC: float("nan")}) == {} and not stopping.stops
    stopping.record(2, {METRIC: 0.4})
    assert stopping.state_dict()["values"] == [[2, 0.4]], "a step counts once"
    other = EarlyStopping(EarlyStoppingConfig(metric=QUICK))
    other.load_state_dict(stopping.state_dict())
    assert other.state_dict()["values"] == []
    assert EarlyStopping(EarlyStoppingConfig()).record(1, {METRIC: 1.0}) == {}


def test_a_name_that_only_a_validation_can_tell_is_checked_there() -> None:
    stopping = EarlyStopping(EarlyStoppingConfig(metric="val-aux/qa/f2/mean@4"))
    assert stopping.record(1, {"val-quick/qa/f1/mean@2": 0.5}) == {}
    with pytest.raises(ConfigError, match=r"metric=val-aux/qa/f2/mean@4 is no metric .* are val-aux/qa/f1/mean@4"):
        stopping.record(2, {METRIC: 0.1, "val-aux/qa/f1/mean@4": 0.5})
    absent = EarlyStopping(EarlyStoppingConfig(metric="val-aux/tool/use_rate/search"))
    assert absent.record(2, {METRIC: 0.1}) == {}, "there once the tool is called"


# ---- the loop


def settings(directory: Path, name: str, *overrides: str) -> Config:
    return load_config(
        None,
        [
            f"trainer.runs_dir={directory}", f"trainer.experiment_name={name}", "trainer.total_steps=20",
            "trainer.save_freq=3", "trainer.test_freq=4", "trainer.quick_test_freq=2", "trainer.loggers=[jsonl]",
            "trainer.early_stopping.patience=2", "data.train_batch_size=1", "rollout.train.n=2",
            "learner.mini_batch_size=2", *overrides,
        ],
    )  # fmt: skip


class Killed(BaseException):
    """What ends a run at once."""


def train(
    config: Config, monkeypatch: pytest.MonkeyPatch, *, leave_in: int = 0, killed_in: int = 0
) -> tuple[bool, str]:
    """The loop from its newest checkpoint on. Validations are best in step 6.

    Args:
        leave_in, killed_in: steps in which the run is asked to leave, or ends at once.
    """
    console, leave = Console(record=True, width=400, file=io.StringIO()), LeaveRequest()
    model, resume = Weights(config.trainer.run_dir), find_resume_point(config.trainer)
    if resume is not None and announce_resume(config, resume, console):
        return True, console.export_text()
    run = run_of(config, console, config.trainer.total_steps or 0)
    checkpointer = Checkpointer(config, console, lambda: {"learner": model}, resume)
    group = [trajectory(0), trajectory(1)]

    class Drawn(Experience):
        async def take(self, step: int) -> Collected:
            if step == killed_in:
                raise Killed
            leave._asked = step == leave_in
            return Collected(group, group, {"drawn": step})

    async def learn(*_: Any) -> train_loop.Learned:
        return train_loop.Learned(TrajectoryBatch.from_trajectories(group), {}, None)

    async def restore(run: Any, checkpointer: Checkpointer) -> TrainerState:
        state = TrainerState.first(config)
        if (newest := await checkpointer.load()) is not None:
            state.load_state_dict(newest.read("trainer_state.json"))
        return state

    async def validate(run: Any, step: int, log: Any) -> dict[str, float]:
        return {METRIC: 1.0 - abs(step - 6) / 10}

    async def validate_quickly(run: Any, step: int) -> dict[str, float]:
        return {QUICK: 0.5 - abs(step - 6) / 10}

    for module, stand_in in (
        (train_loop, learn), (train_loop, restore), (train_loop, validate), (validation, validate),
        (validation, validate_quickly),
    ):  # fmt: skip
        monkeypatch.setattr(module, stand_in.__name__, stand_in)
    monkeypatch.setattr(train_loop, "step_source", Drawn)
    finished = asyncio.run(train_loop.train_from_checkpoint(run, checkpointer, leave))
    return finished, console.export_text()


def validated(config: Config) -> tuple[list[int], list[int]]:
    """Steps of full and of quick validations."""
    rows = read_metrics(config.trainer.run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(len(rows)))
    return [row["step"] for row in rows if METRIC in row], [row["step"] for row in rows if QUICK in row]


@pytest.mark.parametrize(
    "interruptions",
    [[], [{"leave_in": 5}], [{"leave_in": 8}], [{"killed_in": 9}, {"leave_in": 8}, {"killed_in": 12}]],
    ids=["never", "left_in_5", "left_in_8", "killed_often"],
)
@pytest.mark.parametrize(
    ("metric", "last", "full", "quick"),
    # The full validations of steps 4 and 8 are equally good. The quick ones are best in step 6, and step 8 has none.
    [(METRIC, 12, [0, 4, 8, 12], [2, 6, 10]), (QUICK, 14, [0, 4, 8, 12, 14], [2, 6, 10, 14])],
    ids=["full", "quick"],
)
def test_the_run_ends_as_a_complete_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    interruptions: list[dict[str, int]],
    metric: str,
    last: int,
    full: list[int],
    quick: list[int],
) -> None:
    config = settings(tmp_path, "run", f"trainer.early_stopping.metric={metric}")
    for interruption in interruptions:
        with contextlib.suppress(Killed):
            assert train(config, monkeypatch, **interruption)[0] is False
    finished, text = train(config, monkeypatch)
    assert finished
    assert validated(config) == (full, quick)
    assert f"in the 2 validations since (trainer.early_stopping.patience=2): step {last} of 20 is the last one" in text
    assert complete_checkpoints(config.trainer.run_dir)[-1].step == last
    row = read_metrics(config.trainer.run_dir / "metrics.jsonl")[-1]
    assert row["early_stopping/waited"] == 2 and row["early_stopping/best_step"] == (4 if metric == METRIC else 6)
    assert "timing_s/save_checkpoint" in row

    again, text = train(config, monkeypatch)
    assert again and f"global_step_{last} is the last step, and there is nothing to train" in text
    assert validated(config) == (full, quick)
    patient = settings(tmp_path, "run", f"trainer.early_stopping.metric={metric}", "trainer.early_stopping.patience=3")
    assert train(patient, monkeypatch)[0]
    assert validated(patient)[0][-1] > last


def test_without_a_metric_the_run_reaches_its_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(tmp_path, "run")
    finished, text = train(config, monkeypatch)
    assert finished and "early stopping" not in text
    assert validated(config) == ([0, 4, 8, 12, 16, 20], [2, 6, 10, 14, 18])
    assert not any(name.startswith("early_stopping") for row in read_metrics(config.trainer.run_dir / "metrics.jsonl")
                   for name in row)  # fmt: skip
