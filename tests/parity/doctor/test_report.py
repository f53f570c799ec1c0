"""Figures, verdicts, the choice of steps, the JSON file, the tables: what needs no process."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from megatron_retool.config import load_config
from megatron_retool.parity.doctor import demo_steps, run, tested_page
from megatron_retool.parity.doctor.catalogue import STEPS, UnknownStep, select
from megatron_retool.parity.doctor.host_steps import PINS, REQUIREMENTS, differing, read_pins
from megatron_retool.parity.doctor.outcome import Skipped, StepFigure, StepOutcome, StepVerdict
from megatron_retool.parity.doctor.report import DoctorReport, ReportError
from megatron_retool.parity.doctor.session import DoctorSession
from megatron_retool.parity.doctor.table import outcomes_table, summary

ROOT = Path(__file__).parents[3]
MACHINE = {"processor": "Some CPU", "cores": 4, "memory_gib": 15.6, "gpus": []}


@pytest.mark.parametrize(
    ("figure", "holds"),
    [
        (StepFigure("a", 1.0, at_most=1.0), True),
        (StepFigure("a", 1.01, at_most=1.0), False),
        (StepFigure("a", 0.9, at_least=1.0), False),
        (StepFigure("a", 5.0, at_least=1.0, at_most=4.0), False),
        (StepFigure("a", math.nan, at_most=1.0), False),
        (StepFigure("a", -math.inf, at_most=1.0), False),
        (StepFigure("a", "RuntimeError", at_most=1.0), False),
        (StepFigure("a", "words"), True),
        (StepFigure("a", math.nan), True),
    ],
)
def test_a_figure_holds_within_its_bounds_alone(figure, holds):
    assert figure.holds is holds


def test_a_step_passes_where_every_figure_holds():
    good, bad = StepFigure("good", 1.0, at_most=2.0), StepFigure("bad", 3.0, "nats", at_most=2.0)
    assert StepOutcome.judged("step", [good, StepFigure("free", 9.0)], "cure").verdict is StepVerdict.PASS
    failed = StepOutcome.judged("step", [good, bad], "cure")
    assert (failed.verdict, failed.reason, failed.cure) == (StepVerdict.FAIL, "bad: 3 nats (at most 2)", "cure")


def test_steps_by_name_and_group_come_with_what_they_need_in_order():
    assert [step.name for step in select(["sync_disk"])] == ["reference", "engine", "sync_disk"]
    assert [step.name for step in select(["speed", "host"])] == ["host", "versions", "driver", "bandwidth", "step_time"]
    assert select(None) == list(STEPS)
    with pytest.raises(UnknownStep, match="the nearest is sync_tensor"):
        select(["sync_tensr"])


def test_every_step_exists_has_a_cure_and_needs_earlier_ones():
    before: set[str] = set()
    for step in STEPS:
        module, _, name = step.check.partition(":")
        assert callable(getattr(importlib.import_module(module), name)), step.name
        assert step.cure and set(step.needs) <= before
        before.add(step.name)
    assert len(before) == len(STEPS)


def test_the_page_has_every_step_in_its_group():
    page = (ROOT / "docs" / "gpu_first_run.md").read_text(encoding="utf-8")
    rows = {
        cells[1].strip(): re.findall(r"`(\w+)`", cells[2])
        for line in page.splitlines()
        if line.startswith("| ") and len(cells := line.split("|")) == 5
    }
    for group in {step.group for step in STEPS}:
        assert rows[group] == [step.name for step in STEPS if step.group == group]


def report(*outcomes: StepOutcome, **machine) -> DoctorReport:
    return DoctorReport("2026-01-02T03:04:05Z", MACHINE | machine, {"torch": "2"}, outcomes)


def test_the_file_has_every_figure_and_comes_back(tmp_path):
    outcomes = (
        StepOutcome("host", StepVerdict.PASS, 1.25, figures=(StepFigure("cores", 4, at_least=1), StepFigure("n", "x"))),
        StepOutcome("driver", StepVerdict.SKIPPED, 0.1, "none"),
        StepOutcome("engine", StepVerdict.FAIL, 3.0, "ended", "look", (StepFigure("bad", math.nan, at_most=1.0),)),
    )
    path = tmp_path / "new" / "doctor.json"
    report(*outcomes).write(path)
    found = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert found["verdict"] == "fail" and found["machine"] == MACHINE
    assert found["steps"][0]["figures"][0] == {"name": "cores", "value": 4, "holds": True, "at_least": 1}
    assert found["steps"][2]["figures"][0] == {"name": "bad", "value": "nan", "holds": False, "at_most": 1.0}
    again = DoctorReport.read(path)
    assert again.failed and [each.as_json() for each in again.outcomes] == found["steps"]
    assert [each.name for each in path.parent.iterdir()] == ["doctor.json"]


@pytest.mark.parametrize("text", ["{", "{}", '{"format": 0}', "[]"])
def test_what_is_no_report_is_named(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ReportError, match=r"x\.json"):
        DoctorReport.read(tmp_path / "x.json")


def test_the_table_has_figures_of_what_passed_and_the_cure_of_what_failed():
    outcomes = [
        StepOutcome(
            "host",
            StepVerdict.PASS,
            1.0,
            figures=(StepFigure("free", "x"), StepFigure("near [its] bound", 0.9, at_most=1.0)),
        ),
        StepOutcome("engine", StepVerdict.FAIL, 2.0, "ended [/x]", "look there"),
        StepOutcome("demo", StepVerdict.SKIPPED, 0.0, "no GPU"),
    ]
    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(outcomes_table(outcomes))
    text = console.export_text()
    assert all(words in text for words in ("near [its] bound: 0.9 (at most 1)", "ended [/x]", "cure: look there"))
    assert summary(outcomes) == "1 passed, 1 failed, 1 skipped"


def test_the_page_has_the_table_of_the_reports_that_are_committed():
    text = tested_page.PAGE.read_text(encoding="utf-8")
    assert tested_page.page(text) == text, "python -m megatron_retool.parity.doctor.tested_page"
    assert list(tested_page.REPORTS.glob("*.json"))


def test_a_column_for_each_report_the_newest_first():
    old = report(StepOutcome("host", StepVerdict.PASS), StepOutcome("driver", StepVerdict.SKIPPED, reason="none"))
    new = DoctorReport(
        "2026-02-02T00:00:00Z", MACHINE | {"gpus": ["NVIDIA X"] * 2}, {}, (StepOutcome("host", StepVerdict.FAIL),)
    )
    lines = tested_page.table([("docs/doctor/old.json", old), ("docs/doctor/new.json", new)]).splitlines()
    assert "[2 x NVIDIA X, Some CPU, 4 cores, 16 GiB, 2026-02-02](docs/doctor/new.json) | [Some CPU" in lines[0]
    assert lines[2] == "| host | fail: host | 1 pass; skipped: driver |"
    assert lines[3] == "| kernels | not run | not run |"


def test_committed_reports_have_no_paths_and_what_failed_is_explained():
    page = (ROOT / "docs" / "gpu_first_run.md").read_text(encoding="utf-8")
    for path in tested_page.REPORTS.glob("*.json"):
        assert not re.search(r'"/|[ =:]/\w', path.read_text(encoding="utf-8")), path
        for outcome in DoctorReport.read(path).outcomes:
            if outcome.verdict is StepVerdict.FAIL:
                assert f"(doctor/{path.name})" in page and f"`{outcome.step}` fails" in page


def test_packages_of_another_version_are_named(monkeypatch):
    pins = dict(
        read_pins("# torch==1\nnumpy==2.0\n\ntransformer-engine[core,pytorch]==2.3 # why\ntorchvision\nray==2\n")
    )
    assert pins == {"numpy": "2.0", "transformer-engine": "2.3", "ray": "2"}
    installed = {"numpy": "2.0+cu130", "transformer-engine": "2.4"}
    monkeypatch.setattr("megatron_retool.parity.doctor.host_steps.installed", installed.get)
    assert differing(pins) == ["transformer-engine 2.4 (pinned: 2.3)", "ray is missing (pinned: 2)"]
    for files in PINS.values():
        pinned = dict(pin for name in files for pin in read_pins((REQUIREMENTS / name).read_text(encoding="utf-8")))
        assert {"torch", "sglang", "megatron-core"} <= pinned.keys()


def test_ranks_are_a_power_of_two_and_what_is_missing_is_said(tmp_path):
    assert [DoctorSession(tmp_path, gpus).ranks for gpus in (0, 1, 2, 3, 6, 8, 16)] == [2, 1, 2, 2, 4, 8, 8]
    with pytest.raises(Skipped, match="a broadcast needs 2 GPUs, and 1 may be used here"):
        DoctorSession(tmp_path, 1).need_gpus(2, "a broadcast")
    with pytest.raises(Skipped, match="sleep needs a GPU, and this host has none"):
        DoctorSession(tmp_path, 0).need_gpus(1, "sleep")


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_the_demo_s_settings_fit_together(tmp_path, gpus):
    config = load_config(demo_steps.CONFIG, demo_steps.overrides(DoctorSession(tmp_path, gpus)))
    assert config.cluster.placement == "colocated" and config.learner.world_size == gpus == config.rollout.engine.count


def test_slurm_gets_the_script_with_the_options(tmp_path, monkeypatch):
    program = tmp_path / "sbatch"
    program.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" >{tmp_path}/given\nexit 4\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    assert run.submit("--nodes=2 --partition='a b'", 8, ["layouts"], tmp_path / "d.json") == 4
    given = (tmp_path / "given").read_text().splitlines()
    assert given[:2] == ["--nodes=2", "--partition=a b"] and given[2].endswith("scripts/slurm/doctor.sbatch")
    assert given[3:] == [str(tmp_path / "d.json"), "--gpus", "8", "--steps", "layouts"]
    with pytest.raises(UnknownStep):
        run.submit("", None, ["layout"], tmp_path / "d.json")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(FileNotFoundError, match="no sbatch on this host"):
        run.submit("", None, None, tmp_path / "d.json")
