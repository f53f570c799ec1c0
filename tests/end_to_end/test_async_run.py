"""An asynchronous run on the real stack: ages, a kill in the middle, and the same run from what it stored."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from megatron_retool.runs.checkpoints import complete_checkpoints
from megatron_retool.runs.engines import read_engines
from megatron_retool.runs.leave import REQUEUE
from megatron_retool.runs.metrics_file import read_metrics
from megatron_retool.trajectory import read_trajectories
from run_files.steps import step_path
from tests.campaign.demo import write_config
from tests.end_to_end.conftest import ROOT, CommandLine, kill_driver, pids_of, wait_until_gone

pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow]
STEPS = 5


def trained(run_dir) -> list[list[int]]:
    """Group ids that each step trained on."""
    return [
        sorted(
            {t.group_id for t in read_trajectories(step_path(run_dir / "rollouts", step)) if t.reward_info["trained"]}
        )
        for step in range(1, STEPS + 1)
    ]


@pytest.mark.rare
def test_engines_are_added_and_removed_during_a_run(tmp_path):
    """One is added, the first is taken away, and the one that is left dies and is replaced."""
    config = write_config(
        *(tmp_path, "changing", 100_000), mode="async", max_age=2, save_freq=0, test_freq=0, val_before_train=False
    )
    command_line = CommandLine(config)
    small = ("demo.pretrain_rows=1", "demo.sft_rows=1", "demo.sft_val_rows=1", "data.max_val_samples=2")
    code, output = command_line.run("make-demo", *small)
    assert code == 0, output
    run_dir = tmp_path / "changing"
    process, marker = command_line.start("train", *small)

    def rows() -> list[dict[str, float]]:
        return read_metrics(run_dir / "metrics.jsonl") if (run_dir / "metrics.jsonl").exists() else []

    def wait_until(reached) -> None:
        deadline = time.monotonic() + 300
        while not reached():
            assert time.monotonic() < deadline and process.poll() is None, process.communicate()[0]
            time.sleep(0.2)

    def engines(*arguments: str) -> str:
        command = [sys.executable, "-m", "megatron_retool", "engines", str(run_dir), *arguments]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        return f"{ended.returncode} {ended.stdout}"

    wait_until(rows)
    assert "1 error: engine 0 is the only one that serves" in engines("--remove", "0")
    assert engines("--add", "1").startswith("0 engine 1 serves at http://127.0.0.1:")
    added = len(rows())
    wait_until(lambda: len(rows()) > added + 4)
    assert engines("--remove", "0").startswith("0 engine 0 has gone")
    [before] = read_engines(run_dir)
    for pid in pids_of(marker, "sglang::scheduler"):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: [engine.url for engine in read_engines(run_dir)] != [before.url])
    back = len(rows())
    wait_until(lambda: len(rows()) > back + 4)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == REQUEUE, output
    assert wait_until_gone(marker, 10) == {}
    assert "engines.json is missing" in engines()

    found = rows()
    assert [row["step"] for row in found] == list(range(1, len(found) + 1))
    numbers = [row["rollout/engines"] for row in found]
    assert numbers[0] == numbers[-1] == 1 and max(numbers) == 2
    assert sum(row["rollout/engines_lost"] for row in found) <= 1  # 0 where a weight sync alone met its death
    sampled_by = set()
    for step in range(1, len(found) + 1):
        for trajectory in read_trajectories(step_path(run_dir / "rollouts", step)):
            assert trajectory.finish_reason != "aborted"
            sampled_by.add(trajectory.timing.engine)
            versions = trajectory.weight_versions[trajectory.loss_mask]
            assert step - 3 <= versions.min() and versions.max() <= step - 1
    assert sampled_by == {0, 1}


def test_a_killed_run_trains_every_group_once_and_can_be_replayed(tmp_path):
    config = write_config(
        *(tmp_path, "free", STEPS), mode="async", max_age=2, save_freq=1, test_freq=3, val_before_train=False
    )
    command_line = CommandLine(config)
    small = ("demo.pretrain_rows=1", "demo.sft_rows=1", "demo.sft_val_rows=1", "data.max_val_samples=2")
    code, output = command_line.run("make-demo", *small)
    assert code == 0, output
    run_dir = tmp_path / "free"

    process, marker = command_line.start("train", *small)
    deadline = time.monotonic() + 300
    while not complete_checkpoints(run_dir) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    kill_driver(process, marker)
    code, output = command_line.run("train", *small)
    assert code == 0, output

    rows = read_metrics(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(0 <= row["async/age_max"] <= 2 for row in rows)
    taken = trained(run_dir)
    assert all(len(groups) == 4 for groups in taken)
    assert len({group for groups in taken for group in groups}) == 4 * STEPS, "a group was trained twice"
    for step in range(1, STEPS + 1):
        for trajectory in read_trajectories(step_path(run_dir / "rollouts", step)):
            sampled = trajectory.weight_versions[trajectory.loss_mask]
            assert step - 3 <= sampled.min() and sampled.max() <= step - 1

    again = (f"rollout.replay_dir={run_dir / 'rollouts'}", f"demo.directory={run_dir / 'data'}")
    code, output = command_line.run("train", *small, *again, "trainer.experiment_name=again")
    assert code == 0, output
    assert trained(tmp_path / "again") == taken
    repeated = read_metrics(tmp_path / "again" / "metrics.jsonl")
    for key in ("actor/grad_norm", "actor/pg_loss", "rollout_corr/log_prob_abs_diff"):
        assert [row[key] for row in repeated] == pytest.approx([row[key] for row in rows], rel=1e-4, abs=1e-7), key
