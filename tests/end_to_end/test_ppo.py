"""PPO with a critic on the real stack, sampled at temperature 0.7 with top_p, checkpointed and resumed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_retool.runs.metrics_file import read_metrics
from megatron_retool.trajectory import read_trajectories
from run_files.steps import read_estimates
from tests.end_to_end.conftest import FinishedRun

pytestmark = pytest.mark.timeout(1200)


@pytest.mark.rare
def test_ppo_trains_what_was_sampled_and_resumes(demo_run: FinishedRun):
    run_dir = demo_run.run_dir.with_name("ppo")
    arguments = [
        "trainer.experiment_name=ppo",
        "trainer.val_before_train=false",
        "data.max_val_samples=2",
        f"demo.directory={demo_run.run_dir / 'data'}",
        f"model.path={demo_run.run_dir / 'sft_hf'}",
        f"model.mcore_path={demo_run.run_dir / 'sft_mcore'}",
        "learner.world_size=1",
        "rollout.train.temperature=0.7",
        "rollout.train.top_p=0.9",
        "algorithm.advantage=gae",
        "algorithm.kl_in_reward=0.01",
        "algorithm.adaptive_kl_target=0.1",
        "algorithm.adaptive_sampling.enable=true",
        "algorithm.adaptive_sampling.stages=['0 6']",
        "algorithm.adaptive_sampling.hard_n=10",
        "learner.critic.warmup_steps=1",
        "learner.critic.optimizer.lr=1e-3",
    ]
    for total_steps in (1, 2):
        code, output = demo_run.command_line.run("train", *arguments, f"trainer.total_steps={total_steps}")
        assert code == 0, output
    assert "resuming from" in output and "  trainer.total_steps: 1, now 2\nthey hold from step 2 on" in output
    first, second = read_metrics(run_dir / "metrics.jsonl")
    for row in (first, second):
        # The engine's sampler and the learner's head agree on what temperature and top_p leave.
        assert row["rollout_corr/log_prob_abs_diff"] < 1e-4
        assert row["critic/vf_loss"] > 0 and row["critic/grad_norm"] > 0
        assert row["reward/scored"] == row["rollout/trajectories"] == 4 * 6
        assert row["rollout/sampled_tokens"] > 0 and row["timing_s/values"] > 0
    # In the warm-up the critic learns alone, and the policy still is its reference.
    assert "actor/grad_norm" not in first and first["actor/reward_kl_penalty"] == pytest.approx(0.0, abs=1e-6)
    assert first["critic/values/mean"] == 0.0 and second["critic/values/mean"] != 0.0
    assert second["actor/grad_norm"] > 0
    assert second["actor/reward_kl_penalty_coeff"] < first["actor/reward_kl_penalty_coeff"] == 0.01

    state = json.loads((run_dir / "checkpoints/global_step_2/trainer_state.json").read_text())
    assert len(state["accuracies"]) == 8 and 0 < state["kl_coefficient"] < second["actor/reward_kl_penalty_coeff"]
    assert (run_dir / "checkpoints/global_step_2/critic").is_dir()
    trajectories = {t.key: t for t in read_trajectories(run_dir / "rollouts" / "step_000002.parquet")}
    estimates = read_estimates(run_dir / "rollouts" / "step_000002.learner.parquet")
    assert set(estimates) == set(trajectories)
    for key, columns in estimates.items():
        mask = trajectories[key].loss_mask
        np.testing.assert_allclose(columns["old_log_probs"][mask], trajectories[key].rollout_log_probs[mask], atol=2e-3)
        assert {"values", "returns", "advantages", "entropy", "ref_log_probs", "importance_weights"} <= set(columns)
