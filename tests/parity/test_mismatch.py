import json

import numpy as np
import pytest

from megatron_retool.config import load_config, save_config
from megatron_retool.loop.rollout_files import write_estimates
from megatron_retool.parity.mismatch import (
    log_perplexities,
    mismatch_statistics,
    read_sample,
    write_mismatch_report,
)
from megatron_retool.trajectory import FinishReason, ToolCall, Trajectory, TrajectoryBatch, write_trajectories


def trajectory(group, log_probs, calls=1):
    turns = [0, 0, -1, 1]
    return Trajectory(
        [1], [2, 3, 4, 5], [True, True, False, True], log_probs, turns, [0, 0, -1, 0], group, 0, FinishReason.STOP,
        reward=1.0, tool_calls=[ToolCall("code_interpreter", "", "ok", 0.1)] * calls,
    )  # fmt: skip


@pytest.fixture
def run_dir(tmp_path):
    """Two steps; the learner is 0.5 below the engine at one token of probability 0.05 in a later turn."""
    for step in (1, 2):
        rows = [
            trajectory(0, np.log([0.95, 0.6, 1.0, 0.05])),
            trajectory(1, np.log([0.99, 0.3, 1.0, 0.97]), calls=2),
            trajectory(2, np.log([0.9, 0.9, 1.0, 0.9])),  # generated, not trained on: has no row in the other file
        ]
        batch = TrajectoryBatch.from_trajectories(rows[:2])
        learner = batch.rollout_log_probs.copy()
        learner[3] -= 0.5
        write_trajectories(rows, tmp_path / "rollouts" / f"step_{step:06d}.parquet")
        write_estimates(
            batch.with_columns(old_log_probs=learner), tmp_path / "rollouts" / f"step_{step:06d}.learner.parquet"
        )
    metrics = [{"step": step, "rollout/score/mean": 0.5, "actor/grad_norm": 1.0} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    return tmp_path


def test_differences_are_found_where_they_are(run_dir):
    sample = read_sample(run_dir)
    assert len(sample) == 2 * 6
    rows = {(row["split"], row["category"]): row for row in mismatch_statistics(sample)}
    assert rows["all", "all"]["mean_abs_difference"] == pytest.approx(0.5 / 6, rel=1e-5)
    low = rows["probability", "0.01–0.1"]
    assert low["tokens"] == 2 and low["mean_difference"] == pytest.approx(-0.5, rel=1e-5)
    assert low["k3_kl"] == pytest.approx(np.exp(-0.5) - 1 + 0.5, rel=1e-5) and low["share_above_0.1"] == 1.0
    assert rows["probability", "0.9–1"]["max_abs_difference"] == 0.0
    assert rows["turn", "0"]["mean_abs_difference"] == 0.0 and rows["turn", "1"]["tokens"] == 4
    assert rows["tool_calls", "1"]["tokens"] == 6 and rows["tool_calls", "2"]["mean_abs_difference"] == 0.0
    rollout, learner = log_perplexities(sample, sample.turns == 1)
    np.testing.assert_allclose((learner - rollout)[[0, 2]], 0.5, rtol=1e-5)
    np.testing.assert_allclose((learner - rollout)[[1, 3]], 0.0)


def test_steps_are_spread_over_the_run(run_dir):
    assert set(read_sample(run_dir, max_steps=1).steps) == {1}


def test_report_of_a_run(run_dir):
    page, _ = write_mismatch_report(run_dir)
    text = page.read_text()
    for name in ("over_probability", "log_ppl", "probability", "by_category", "over_steps"):
        assert (page.parent / f"mismatch_{name}.png").stat().st_size > 5000 and f"mismatch_{name}.png" in text
    assert len(json.loads((page.parent / "mismatch.json").read_text())) > 8


def test_what_cannot_be_reported_is_said(run_dir, tmp_path_factory):
    with pytest.raises(FileNotFoundError, match="has not trained a step"):
        write_mismatch_report(tmp_path_factory.mktemp("empty"))
    nothing = tmp_path_factory.mktemp("nothing")
    write_estimates(TrajectoryBatch.from_trajectories([]), nothing / "rollouts" / "step_000001.learner.parquet")
    write_trajectories([], nothing / "rollouts" / "step_000001.parquet")
    with pytest.raises(FileNotFoundError, match="no step trained on a response"):
        write_mismatch_report(nothing)
    write_trajectories([trajectory(5, [-1.0, -1.0, 0.0, -1.0])], run_dir / "rollouts" / "step_000002.parquet")
    with pytest.raises(ValueError, match=r"step_000002\.learner\.parquet: row \(0, 0, 0\)"):
        write_mismatch_report(run_dir)
    bypass = ["algorithm.rollout_correction.bypass_old_log_probs=true", "algorithm.rollout_correction.mode=none"]
    save_config(load_config(None, bypass), run_dir / "config.yaml")
    with pytest.raises(ValueError, match="bypass"):
        write_mismatch_report(run_dir)
