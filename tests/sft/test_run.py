"""Supervised fine-tuning on the real learner, in one process: it learns and resumes exactly."""

from __future__ import annotations

import shutil

import pytest

from megatron_retool.config import ConfigError
from megatron_retool.runs.checkpoints import SaveError, complete_checkpoints
from megatron_retool.sft.launch import fine_tune
from megatron_retool.sft.run import Run
from tests.sft.conftest import QUIET, losses, metrics, with_name, with_sft


def test_stages_follow_one_another_and_learn(config):
    fine_tune(config, QUIET)
    rows = metrics(config)
    assert [row["step"] for row in rows] == list(range(1, 21))
    found = losses(config)
    assert found[0] > 5.5
    assert found[9] < 0.8 * found[0]
    assert found[-1] < found[10]
    assert [row["step"] for row in rows if "sft/val_loss" in row] == [20]
    assert rows[-1]["sft/val_loss"] < found[10]
    rates = [row["sft/lr"] for row in rows]
    # Each stage warms up again; the first stage then stays, the second falls to a tenth.
    assert rates[:5] == pytest.approx([0.00125, 0.0025, 0.00375, 0.005, 0.005])
    assert rates[9] == pytest.approx(0.005)
    assert rates[10] == pytest.approx(0.00125)
    assert rates[13] == max(rates[10:])
    assert rates[-1] < 0.0015
    assert all(row["perf/throughput"] > 0 and row["perf/max_process_memory_gb"] > 0.1 for row in rows)
    assert [c.step for c in complete_checkpoints(config.trainer.run_dir)] == [20]
    assert (config.trainer.run_dir / "COMPLETE").exists()
    before = (config.trainer.run_dir / "metrics.jsonl").read_bytes()
    fine_tune(config, QUIET)
    assert (config.trainer.run_dir / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("stop", [5, *(pytest.param(step, marks=pytest.mark.slow) for step in (10, 13))])
def test_a_stopped_run_resumes_as_if_it_had_not(config, monkeypatch, stop):
    """Stopped in the first stage, between the stages, and in the second."""
    config = with_sft(config, save_freq=stop)
    fine_tune(with_name(config, "whole"), QUIET)

    class Killed(BaseException):
        pass

    update = Run._update
    steps = 0

    def stop_after(self, stage, step, window):
        nonlocal steps
        if steps == stop + 2:
            raise Killed
        steps += 1
        return update(self, stage, step, window)

    stopped = with_name(config, "stopped")
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_update", stop_after)
        with pytest.raises(Killed):
            fine_tune(stopped, QUIET)
    assert len(metrics(stopped)) == stop + 2
    assert not (stopped.trainer.run_dir / "COMPLETE").exists()
    fine_tune(stopped, QUIET)
    assert [row["step"] for row in metrics(stopped)] == list(range(1, 21))
    assert losses(stopped) == pytest.approx(losses(with_name(config, "whole")), abs=1e-6)
    assert metrics(stopped)[-1]["sft/val_loss"] == pytest.approx(
        metrics(with_name(config, "whole"))[-1]["sft/val_loss"], abs=1e-6
    )
    with pytest.raises(ConfigError, match="made with other settings.*resume_mode=disable"):
        (stopped.trainer.run_dir / "COMPLETE").unlink()
        fine_tune(with_name(config, "stopped", seed=3), QUIET)


def test_a_run_goes_back_to_an_older_checkpoint(config):
    config = with_sft(config, save_freq=15)
    fine_tune(config, QUIET)
    first, origin = losses(config), config.trainer.run_dir / "checkpoints" / "global_step_15"
    back = with_name(config, "run", resume_mode="resume_path", resume_from_path=str(origin), keep_checkpoints=1)
    fine_tune(back, QUIET)
    assert losses(config) == pytest.approx(first, abs=1e-6) and (config.trainer.run_dir / "COMPLETE").exists()
    assert [c.step for c in complete_checkpoints(config.trainer.run_dir)] == [15, 20]
    (aside,) = config.trainer.run_dir.parent.glob("run.*")
    assert [c.step for c in complete_checkpoints(aside)] == [20] and (aside / "COMPLETE").exists()


def test_a_full_disk_ends_it_and_the_older_checkpoint_stays(config, monkeypatch):
    config = with_sft(config, save_freq=10)
    free = iter([2**40, 0])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**40, 0, next(free)))
    with pytest.raises(SaveError, match=r"step 20 was not written: .* 0 bytes free.*global_step_10 is intact"):
        fine_tune(config, QUIET)
    assert [path.name for path in (config.trainer.run_dir / "checkpoints").iterdir()] == ["global_step_10"]
    assert not (config.trainer.run_dir / "COMPLETE").exists()
