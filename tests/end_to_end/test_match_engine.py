"""A real run in which engine and learner compute every sampled token's log-prob to the same bit."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_retool.runs.metrics_file import read_metrics
from megatron_retool.trajectory import read_trajectories
from run_files.steps import read_estimates, step_path
from tests.campaign.demo import write_config
from tests.end_to_end.conftest import CommandLine

pytestmark = pytest.mark.timeout(1200)


@pytest.mark.rare
def test_a_mixture_of_experts_in_bfloat16(tmp_path):
    config = write_config(tmp_path, "exact", 2, variant="demo_moe_cpu", val_before_train=False, test_freq=0)
    small = ("demo.pretrain_rows=1", "demo.sft_rows=1", "demo.sft_val_rows=1", "data.max_val_samples=2")
    exact = (
        "learner.match_engine=exact", "learner.dtype=bfloat16", "rollout.engine.dtype=bfloat16",
        "rollout.train.temperature=0.8", "rollout.train.top_p=0.95",
    )  # fmt: skip
    for command in ("make-demo", "train"):
        code, output = CommandLine(config).run(command, *small, *exact)
        assert code == 0, output
    rows = read_metrics(tmp_path / "exact" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["actor/grad_norm"] > 0
        assert row["rollout_corr/log_prob_abs_diff"] == 0.0
        assert row["routing_replay/differing_tokens"] == 0.0
    folder, compared = tmp_path / "exact" / "rollouts", 0
    for step in (1, 2):
        estimates = read_estimates(step_path(folder, step, "learner"))
        for trajectory in read_trajectories(step_path(folder, step)):
            if trajectory.key in estimates:
                sampled = trajectory.loss_mask
                own = estimates[trajectory.key]["old_log_probs"][sampled]
                np.testing.assert_array_equal(own, trajectory.rollout_log_probs[sampled])
                compared += int(sampled.sum())
    assert compared > 1000
