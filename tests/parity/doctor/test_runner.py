"""Whatever becomes of a step, it is reported with its cure, nothing of it stays, and the others run."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_retool.parity.doctor import runner
from megatron_retool.parity.doctor.catalogue import DoctorStep
from megatron_retool.parity.doctor.outcome import StepOutcome, StepVerdict
from megatron_retool.parity.doctor.session import DoctorSession


def step(name: str, *needs: str, **options) -> DoctorStep:
    check = f"tests.parity.doctor.stand_in_steps:{name}"
    return DoctorStep(
        name, "group", "summary", check, f"cure of {name}", **{"needs": needs, "timeout_seconds": 60, **options}
    )


def run(directory: Path, *steps: DoctorStep) -> dict[str, StepOutcome]:
    return {each.step: each for each in runner.run_steps(steps, DoctorSession(directory, gpus=0), lambda _: None)}


@pytest.fixture(autouse=True)
def short_patience(monkeypatch):
    monkeypatch.setattr(runner, "_PATIENCE_SECONDS", 1.0)


def test_each_end_is_reported_and_the_others_run(tmp_path):
    found = run(
        tmp_path,
        step("raises"),
        step("hangs", timeout_seconds=2),
        step("crashes"),
        step("leaves"),
        step("is_too_slow"),
        step("knows_why"),
        step("is_skipped"),
        step("passes"),
    )
    assert {name: outcome.verdict for name, outcome in found.items()} == {
        **dict.fromkeys(["raises", "hangs", "crashes", "leaves", "is_too_slow", "knows_why"], StepVerdict.FAIL),
        "is_skipped": StepVerdict.SKIPPED,
        "passes": StepVerdict.PASS,
    }
    assert found["raises"].reason == "ValueError: no such kernel"
    assert "hangs: no end within 2 s" in found["hangs"].reason and "waiting for the others" in found["hangs"].reason
    assert "SIGSEGV" in found["crashes"].reason
    assert "exit code 3" in found["leaves"].reason
    assert found["is_too_slow"].reason == "speed: 0.5 GB/s (at least 1)"
    assert found["knows_why"].cure == "plug it in"
    for name in ("raises", "hangs", "crashes", "leaves", "is_too_slow"):
        assert found[name].cure == f"cure of {name}"
    assert found["is_skipped"].reason == "there is no GPU" and not found["is_skipped"].cure
    assert 2 < found["hangs"].seconds < 20
    child = int((tmp_path / "child.pid").read_text())
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or ") Z " in state.read_text()


def test_what_a_step_starts_lives_until_the_last_that_needs_it(tmp_path):
    found = run(tmp_path, step("serves", stays=True), step("is_served", "serves"), step("is_alone"))
    assert {outcome.verdict for outcome in found.values()} == {StepVerdict.PASS}


def test_steps_whose_needs_did_not_pass_are_skipped(tmp_path):
    found = run(tmp_path, step("raises"), step("is_skipped"), step("passes", "raises"), step("is_served", "is_skipped"))
    assert found["passes"].reason == "needs raises, which failed"
    assert found["is_served"].reason == "needs is_skipped, which was skipped: there is no GPU"
    assert not list(tmp_path.glob("passes*"))
