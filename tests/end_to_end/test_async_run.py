"""An asynchronous run on the real stack: ages, a kill in the middle, and the same run from what it stored."""

from __future__ import annotations

import time

import pytest

from megatron_retool.loop.rollout_files import step_path
from megatron_retool.runs.checkpoints import complete_checkpoints
from megatron_retool.runs.metrics_file import read_metrics
from megatron_retool.trajectory import read_trajectories
from tests.campaign.demo import write_config
from tests.end_to_end.conftest import CommandLine, kill_driver

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
