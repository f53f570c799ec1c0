"""A run with a loss, an advantage, a reward, tools, an agent and data of one's own, outside of the repository."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from megatron_retool.runs.metrics_file import read_metrics
from megatron_retool.trajectory import read_trajectories
from tests.end_to_end.conftest import FinishedRun
from tests.extending_page import write_snippets


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_snippets_of_the_page_train(demo_run: FinishedRun, tmp_path: Path) -> None:
    write_snippets(tmp_path)
    subprocess.run([sys.executable, "my_data.py"], cwd=tmp_path, check=True)
    settings = [OmegaConf.load(tmp_path / f"my_{name}.yaml") for name in
                ("data", "loss", "advantage", "reward", "tool", "agent")]  # fmt: skip
    config = OmegaConf.merge({"extends": str(demo_run.command_line.config)}, *settings)
    OmegaConf.save(config, tmp_path / "own.yaml")
    command_line = dataclasses.replace(demo_run.command_line, config=tmp_path / "own.yaml", directory=tmp_path)
    code, output = command_line.run(
        "train",
        f"trainer.runs_dir={tmp_path}",
        "trainer.experiment_name=own",
        "trainer.total_steps=2",
        "trainer.save_freq=0",
        f"demo.directory={demo_run.run_dir / 'data'}",
        f"model.path={demo_run.run_dir / 'sft_hf'}",
        "learner.mini_batch_size=32",  # one update a step
        "data.max_prompt_length=1200",
        "data.max_response_length=120",
        "rollout.engine.context_length=1400",
    )
    assert code == 0, output
    rows = {row["step"]: row for row in read_metrics(tmp_path / "own" / "metrics.jsonl")}
    for step in (1, 2):
        row = rows[step]
        assert row["rollout_corr/log_prob_abs_diff"] < 1e-4 and row["actor/grad_norm"] > 0
        assert "actor/distance" in row and row["reward/notes/mean"] >= 1, "each prompt of the page begins with a note"
        assert "timing_s/ref" in row, "the loss asked for the reference policy"
    assert rows[1]["actor/distance"] == pytest.approx(0, abs=1e-5), "the policy is its reference before it learns"
    assert any(name.startswith("val-aux/sums/notes/mean@") for name in rows[2])
    for trajectory in read_trajectories(tmp_path / "own" / "rollouts" / "step_000001.parquet"):
        assert trajectory.reward_info["tools"]["notes"] >= 1
        assert not trajectory.loss_mask[trajectory.turn_ids == -1].any() and (trajectory.turn_ids == 0).sum() <= 6
