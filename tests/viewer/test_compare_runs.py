"""Where two runs part: the first step, response, token and column, and what else is told of both."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from megatron_retool.__main__ import main
from run_viewer.compare_runs import comparison, first_difference, print_comparison
from run_viewer.curves import first_shown
from tests.viewer.two_runs import ROWS, make_run, read_step, write_rows, write_step


@pytest.fixture
def runs(tmp_path):
    return make_run(tmp_path / "a"), make_run(tmp_path / "b")


def parted(runs):
    a, b = runs
    problems = []
    found = first_difference(a, b, problems)
    assert problems == []
    return found and (found.kind, found.step, found.index, found.token, found.column, found.a, found.b)


def test_equal_runs_do_not_part(runs):
    assert parted(runs) is None
    assert all(row["first_step_apart"] is None for row in comparison(*runs)["metrics"])


def test_the_first_token_that_differs_in_any_column_is_found(runs):
    rows = read_step(runs[1], 2)
    rows[1].response_ids[4] = 99
    rows[1].rollout_log_probs[3] = -7.0
    write_step(runs[1], 2, rows)
    assert parted(runs) == ("token", 2, 1, 3, "rollout_log_probs", pytest.approx(-0.3), -7.0)
    write_step(runs[1], 2, rows, old_log_probs=np.array([0, -1, 5, 0, 0, 0, 0, 0, 0, 0]))
    assert parted(runs) == ("token", 2, 0, 2, "old_log_probs", -2.0, 5.0)
    rows = read_step(runs[1], 1)
    rows[0].reward = 0.5
    write_step(runs[1], 1, rows)
    assert parted(runs) == ("response", 1, 0, None, "reward", 0.0, 0.5)
    rows[0].prompt_ids[2] = 9
    write_step(runs[1], 1, rows)
    assert parted(runs) == ("prompt", 1, 0, 2, "prompt_ids", 3, 9)
    write_step(runs[1], 1, rows[1:])
    assert parted(runs) == ("response", 1, 0, None, "response", "there", None)


def test_a_reward_that_is_no_number_in_both_is_equal(runs):
    for run_dir in runs:
        rows = read_step(run_dir, 1)
        rows[0].reward = float("nan")
        write_step(run_dir, 1, rows)
    assert parted(runs) is None


def test_metrics_count_where_responses_are_equal_and_the_clock_does_not(runs):
    write_rows(runs[1], [ROWS[0], ROWS[1] | {"timing_s/step": 9.0}, ROWS[2] | {"rollout/acc/mean": 0.5}])
    assert parted(runs) == ("metric", 2, None, None, "rollout/acc/mean", 0.375, 0.5)
    found = {row["name"]: row for row in comparison(*runs)["metrics"]}
    assert found["rollout/acc/mean"] == {
        "name": "rollout/acc/mean", "a": 0.375, "b": 0.5, "first_step_apart": 2, "largest_distance": 0.125,
        "largest_distance_step": 2, "clock": False,
    }  # fmt: skip
    assert found["timing_s/step"]["clock"] and found["timing_s/step"]["largest_distance"] == 5.0


def test_a_damaged_step_is_named_and_the_next_is_compared(runs):
    path = runs[1] / "rollouts" / "step_000001.parquet"
    path.write_bytes(path.read_bytes()[:-50])
    rows = read_step(runs[1], 2)
    rows[0].response_ids[0] = 99
    write_step(runs[1], 2, rows)
    a, b = runs
    problems = []
    found = first_difference(a, b, problems)
    assert found is not None and (found.step, found.token) == (2, 0)
    assert len(problems) == 1 and "step_000001.parquet" in problems[0] and "step 1 is not compared" in problems[0]


def test_the_command_says_all_of_it(runs, capsys):
    rows = read_step(runs[1], 1)
    rows[1].response_ids[2] = 99
    write_step(runs[1], 1, rows)
    assert main(["diff", *map(str, runs)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "first difference: step 1, group 7, response 1, token 2: response_ids is 6 and 99" in said
    assert "from step" in said and "settings that differ" in said


def test_no_name_is_broken_on_a_narrow_terminal(runs):
    output = io.StringIO()
    print_comparison(runs[0], runs[1], Console(width=30, file=output))
    said = output.getvalue()
    names = first_shown([metric["name"] for metric in comparison(*runs)["metrics"] if not metric["clock"]])
    assert names and all(name in said for name in names)
