"""The table of runs, curves and seconds of steps: what they show is what the files have."""

from __future__ import annotations

import json
import os
import socket
import time

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from megatron_retool.loop.rollout_files import store_times
from megatron_retool.runs.step_timer import StepTimer
from megatron_retool.runs.write_errors import WriteErrors
from run_files.phases import Phase
from run_files.process import process_start
from run_viewer.curves import curves_page
from run_viewer.runs_table import run_page, runs_page
from run_viewer.timeline import step_time_page, time_page
from tests.viewer.two_runs import ROWS, make_run, write_rows


def test_the_table_has_last_and_best_figures_and_the_settings_that_differ(tmp_path):
    make_run(tmp_path / "plain")
    make_run(tmp_path / "other", "rollout.train.top_p=0.9")
    found = runs_page(tmp_path)
    assert sorted(row["name"] for row in found["runs"]) == ["other", "plain"]
    assert found["differing"] == ["rollout.train.top_p"]
    (plain,) = [row for row in found["runs"] if row["name"] == "plain"]
    assert plain["settings"] == {"rollout.train.top_p": 1.0} and plain["problems"] == []
    assert plain["figures"]["val-core/all/acc/mean@4"] == {"last": 0.125, "best": 0.25, "best_step": 0}
    assert plain["figures"]["rollout/acc/mean"] == {"last": 0.375, "best": 0.5, "best_step": 1}
    assert (plain["status"], plain["step"], plain["total_steps"], plain["seconds"]) == ("finished", 2, 2, 14.0)
    json.dumps(found, allow_nan=False)


def test_the_state_is_told_from_what_lies_on_disk(tmp_path, monkeypatch):
    run_dir = make_run(tmp_path / "run", "trainer.total_steps=9")
    now = time.time()

    def state(later=0.0):
        page = run_page(run_dir, "run", now + later)
        return page["status"], page["reason"]

    assert state()[0] == "running"
    assert state(3600)[0] == "died" and "no checkpoint is complete" in state(3600)[1]
    record = {"host": "here", "process": os.getpid(), "process_start": process_start(os.getpid())}
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    (run_dir / "environment.json").write_text(json.dumps(record))
    assert state(3600) == ("running", "its process is at work on this host")
    (run_dir / "environment.json").write_text(json.dumps(record | {"process_start": -1}))
    assert state()[0] == "died" and "its process is gone" in state()[1]
    (run_dir / "checkpoints" / "global_step_1").mkdir(parents=True)
    (run_dir / "checkpoints" / "global_step_1" / "COMPLETE").touch()
    assert "checkpoint of step 1 is complete" in state()[1]
    (run_dir / "pipeline.json").write_text(json.dumps({"steps": {"export": 2}, "seconds": {"rl": 5.0}}))
    assert state()[0] == "finished" and run_page(run_dir, "run")["stages"] == {"rl": 5.0}


def test_damaged_and_foreign_files_are_named_and_the_rest_is_shown(tmp_path):
    run_dir = make_run(tmp_path / "run")
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('[1, 2]\n{"loss": 1.0}\n{"step": 3, "rollout/ac')
    (run_dir / "environment.json").write_text("{half")
    (run_dir / "config.yaml").write_text("a: [")
    broken = runs_page(tmp_path)["runs"][0]
    said = "\n".join(broken["problems"])
    for part in ("line 4 is no JSON object", "line 6 is no JSON object", "no whole number as its step",
                 "environment.json cannot be read", "config.yaml cannot be read"):  # fmt: skip
        assert part in said
    assert broken["figures"]["rollout/acc/mean"]["last"] == 0.375


def test_curves_are_the_numbers_of_the_file_with_the_words_of_the_glossary(tmp_path):
    found = curves_page(make_run(tmp_path / "run"), ["rollout/acc/mean", "actor/grad_norm", "invented/metric"])
    assert found["steps"] == [0, 1, 2]
    assert found["metrics"] == {"rollout/acc/mean": [None, 0.5, 0.375], "actor/grad_norm": [None, None, "Infinity"]}
    assert found["captions"]["rollout/acc/mean"]["good"] == "rises; not biased by dynamic sampling"
    assert found["problems"] == ["metrics.jsonl has no invented/metric"]
    assert found["opening"] == ["val-core/all/acc/mean@4", "rollout/acc/mean", "actor/grad_norm", "timing_s/step"]
    assert set(found["names"]) == {name for row in ROWS for name in row} - {"step"}


def test_four_hundred_steps_of_a_hundred_metrics_take_less_than_a_second(tmp_path):
    run_dir = make_run(tmp_path / "run")
    names = [f"reward/metric_{number}/mean" for number in range(100)]
    write_rows(run_dir, [{"step": step} | dict.fromkeys(names, step + 0.123456789) for step in range(400)])
    began = time.process_time()
    assert len(runs_page(tmp_path)["runs"]) == 1
    assert curves_page(run_dir, names)["metrics"][names[-1]][399] == 399.123456789
    assert time.process_time() - began < 1.0


def test_phases_are_those_of_the_file(tmp_path):
    run_dir = make_run(tmp_path / "run")
    found = time_page(run_dir)
    assert found["steps"] == [0, 1, 2]
    assert found["phases"]["gen"] == [None, 2.5, 1.0] and found["phases"]["testing"] == [None, None, 7.0]
    step = step_time_page(run_dir, 1)
    assert [(p["name"], p["seconds"], p["within"]) for p in step["phases"]] == [
        ("step", 4.0, None), ("gen", 2.5, "step"), ("update_actor", 1.25, "step"), ("reward", 0.5, "gen"),
    ]  # fmt: skip
    assert step["slowest_rank_ratio"] == 1.5


def test_responses_lie_on_one_clock_with_their_calls(tmp_path):
    found = step_time_page(make_run(tmp_path / "run"), 2)
    one, other = found["responses"]
    assert (one["start"], one["end"], one["engine"], one["waiting"]) == (0.0, 2.0, 0, 0.125)
    assert (other["start"], other["end"], other["engine"], other["tokens"], other["sampled"]) == (1.0, 3.0, 1, 5, 4)
    assert other["calls"] == [
        {"name": "code_interpreter", "status": "ok", "seconds": 0.25, "position": 1, "start": 1.5}
    ]
    assert not any("responses" in text for text in found["lacks"])


def test_phases_begin_and_ranks_last_as_the_loop_stored_it(tmp_path):
    run_dir = make_run(tmp_path / "run")
    timer = StepTimer()
    timer.spans += [(Phase.GENERATION, 0.5, 2.0), (Phase.STEP, 0.25, 4.0)]
    store_times(run_dir, WriteErrors(Console()), 2, timer, {"learner": [1.0, 1.5], "critic": []})
    found = step_time_page(run_dir, 2)
    assert found["spans"] == [
        {"name": "gen", "start": 0.5, "seconds": 2.0},
        {"name": "step", "start": 0.25, "seconds": 4.0},
    ]
    assert found["ranks"] == {"learner": [1.0, 1.5], "critic": []} and found["lacks"] == []
    (run_dir / "rollouts" / "step_000002.time.json").write_text('{"phases": [["gen"]]}')
    found = step_time_page(run_dir, 2)
    assert found["spans"] == [] and "step_000002.time.json is damaged" in found["problems"][0]


def test_what_an_older_run_did_not_store_is_said_and_not_made_up(tmp_path):
    run_dir = make_run(tmp_path / "run")
    path = run_dir / "rollouts" / "step_000001.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["timing"]), path)
    found = step_time_page(run_dir, 1)
    assert found["responses"][0]["start"] is None and found["responses"][0]["generation"] is None
    said = "\n".join(found["lacks"])
    for part in (
        "2 of 2 responses do not have when they began",
        "do not have which engine",
        "single learner ranks",
        "no step_000001.time.json",
    ):
        assert part in said
    path.write_bytes(path.read_bytes()[:-50])
    found = step_time_page(run_dir, 1)
    assert found["responses"] == [] and "step_000001.parquet" in found["problems"][0] and found["phases"]
    with pytest.raises(FileNotFoundError, match="neither metrics nor rollouts of step 8"):
        step_time_page(run_dir, 8)
