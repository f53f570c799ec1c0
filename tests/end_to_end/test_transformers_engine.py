"""The second engine in a real run, with Ray, learner and sandbox: the run does not care which engine it has."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_retool.runs.metrics_file import read_metrics
from megatron_retool.trajectory import read_trajectories
from tests.end_to_end.conftest import FinishedRun


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_few_steps_with_transformers_as_engine(demo_run: FinishedRun):
    run_dir = demo_run.run_dir.with_name("reference")
    code, output = demo_run.command_line.run(
        "train",
        "trainer.deterministic=false",
        "rollout.engine.backend=transformers",
        "trainer.experiment_name=reference",
        f"demo.directory={demo_run.run_dir / 'data'}",
        f"model.path={demo_run.run_dir / 'sft_hf'}",
        "trainer.val_before_train=false",
        "trainer.total_steps=2",
    )
    assert code == 0, output
    assert not list((run_dir / "logs").glob("*sglang*")) and not (run_dir / "logs" / "engine_0.log").exists()
    rows = {row["step"]: row for row in read_metrics(run_dir / "metrics.jsonl")}
    assert sorted(rows) == [1, 2]
    assert 0 <= rows[1]["weight_sync/log_prob_difference_max"] < 1e-4
    for step in (1, 2):
        # The learner's weights after every update, in an engine that has nothing in common with SGLang.
        assert rows[step]["rollout_corr/log_prob_abs_diff"] < 1e-4 and rows[step]["actor/grad_norm"] > 0
        assert rows[step]["weight_sync/gigabytes"] > 0
        trajectories = read_trajectories(run_dir / "rollouts" / f"step_{step:06d}.parquet")
        assert len(trajectories) == 4 * 8
        for t in trajectories:
            assert set(t.weight_versions[t.loss_mask]) == {step - 1} and np.all(t.rollout_log_probs[t.loss_mask] <= 0)
