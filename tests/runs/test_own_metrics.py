"""Metrics of one's own: tried before a run, and left out where they fail in it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from megatron_retool.config import Config, ConfigError, load_config
from megatron_retool.runs.own_metrics import _made_up, check_own_metrics, own_metrics

FUNCTIONS = """
import numpy as np

def second_turns(trajectories, *, scale=1.0):
    return {"second_turn": scale * np.mean([(t.turn_ids == 1).sum() for t in trajectories])}

def fails_with_many(trajectories):
    return {"many": 1 / (3 - len(trajectories))}

def number(trajectories):
    return 3.0

def words(trajectories):
    return {"words": "many"}
"""


@pytest.fixture
def load(tmp_path: Path):
    (tmp_path / "my_metrics.py").write_text(FUNCTIONS)

    def make(*names: str, kwargs: str = "{}") -> Config:
        targets = ", ".join(f"my_metrics.py:{name}" for name in names)
        file = tmp_path / "run.yaml"
        file.write_text(f"trainer:\n  metrics: [{targets}]\n  metrics_kwargs: {kwargs}\n")
        return load_config(file)

    return make


def test_numbers_have_their_names(load) -> None:
    trainer = load("second_turns", kwargs='{"my_metrics.py:second_turns": {scale: 10}}').trainer
    check_own_metrics(trainer)
    assert own_metrics(trainer, _made_up()) == {"own/second_turn": 5.0}
    assert own_metrics(trainer, []) == {}


def test_one_that_fails_in_a_step_costs_its_own_numbers_alone(load, caplog: pytest.LogCaptureFixture) -> None:
    trainer = load("fails_with_many", "second_turns").trainer
    check_own_metrics(trainer)
    three = [*_made_up(), _made_up()[0]]
    with caplog.at_level(logging.WARNING):
        assert own_metrics(trainer, three) == {"own/second_turn": pytest.approx(2 / 3)}
    assert (
        "fails_with_many raised ZeroDivisionError at line 8" in caplog.text and "left out of this step" in caplog.text
    )


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("number", "{}", "it returned float: return numbers by name"),
        ("words", "{}", "returned 'many' as 'words'"),
        ("missing", "{}", "has no 'missing'"),
        ("second_turns", '{"my_metrics.py:second_turns": {scal: 2}}', "no parameter of that name; its own are scale"),
        ("second_turns", "{other: {}}", "other is none of trainer.metrics"),
    ],
)
def test_what_gives_no_numbers_is_refused_before_the_run(load, name: str, kwargs: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_own_metrics(load(name, kwargs=kwargs).trainer)
