"""The demo with a mixture of experts on the real stack: a bfloat16 engine's choice of experts in a float32 learner."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_retool.routed_experts import is_missing
from megatron_retool.runs.metrics_file import read_metrics
from megatron_retool.trajectory import read_trajectories
from run_files.steps import read_estimates, step_path
from tests.campaign.demo import write_config
from tests.end_to_end.conftest import CommandLine

pytestmark = pytest.mark.timeout(1200)


@pytest.mark.rare
def test_the_learner_takes_the_experts_that_the_engine_chose(tmp_path):
    """Two steps from random weights, where engine and learner differ most."""
    config = write_config(tmp_path, "experts", 2, variant="demo_moe_cpu", val_before_train=False, test_freq=0)
    command_line = CommandLine(config)
    small = ("demo.pretrain_rows=1", "demo.sft_rows=1", "demo.sft_val_rows=1", "data.max_val_samples=2")
    for command in ("make-demo", "train"):
        code, output = command_line.run(command, *small)
        assert code == 0, output
    rows = read_metrics(tmp_path / "experts" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["actor/grad_norm"] > 0
        assert 0 < row["routing_replay/differing_token_layers"] < row["routing_replay/differing_tokens"] < 0.5
        # The last tokens of a trajectory were input to no layer.
        assert row["routing_replay/missing_rows"] < 0.05
        assert 1e-8 < row["rollout_corr/k3_kl"] < 1e-4
    folder = tmp_path / "experts" / "rollouts"
    estimates = read_estimates(step_path(folder, 2, "learner"))
    assert estimates
    for trajectory in read_trajectories(step_path(folder, 2)):
        assert trajectory.routed_experts is not None
        missing = is_missing(trajectory.routed_experts)
        sampled = len(trajectory.prompt_ids) + np.flatnonzero(trajectory.loss_mask)
        assert not missing[: sampled[-1]].any() and missing[-1]
        if trajectory.key in estimates:
            flips = estimates[trajectory.key]["routing_flips"]
            np.testing.assert_array_equal(np.isnan(flips), missing[len(trajectory.prompt_ids) :])
