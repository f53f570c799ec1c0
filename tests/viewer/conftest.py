"""A run on disk with two groups, whose trajectories mean harm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_retool.config import load_config, save_config
from megatron_retool.loop.rollout_files import write_estimates
from megatron_retool.trajectory import FinishReason, ToolCall, Trajectory, TrajectoryBatch, write_trajectories
from tests.kit.markov_policy import build_tokenizer

HOSTILE = "\x1b[2J\x1b]0;owned\x07[bold]not bold[/bold]"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Step 7: groups 5 and 6 of two responses each; the learner trained on group 5."""
    directory, tokenizer = tmp_path / "run", build_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    directory.mkdir()
    save_config(load_config(None, [f"model.path={tmp_path / 'model'}"]), directory / "config.yaml")
    trajectories = []
    for group_id, index in ((5, 0), (5, 1), (6, 0), (6, 1)):
        ids = tokenizer.encode(f"Let me see {HOSTILE}\nGrüße 東京<|im_end|>", add_special_tokens=False)
        length = len(ids)
        trajectories.append(
            Trajectory(
                [1, 2],
                ids,
                [True] * length,
                np.full(length, -0.1 * (index + 1)),
                [0] * length,
                [6] * length,
                group_id=group_id,
                index=index,
                finish_reason=FinishReason.STOP,
                reward=1.0 if index else -1.0,
                reward_info={"acc": float(index), "pred": HOSTILE, "trained": group_id == 5},
                tool_calls=[ToolCall("code_interpreter", "{}", "timeout", 2.5, True, 12)],
                extra_info={"question": "What is 6 * 7?", "ground_truth": "42"},
            )  # fmt: skip
        )
    path = directory / "rollouts" / "step_000007.parquet"
    write_trajectories(trajectories, path, [("a prompt\n", "not looked at")] * 4)
    batch = TrajectoryBatch.from_trajectories(trajectories[:2])
    zeros = np.zeros(batch.num_response_tokens, np.float32)
    write_estimates(batch.with_columns(old_log_probs=zeros, keep=zeros), path.with_suffix(".learner.parquet"))
    return directory
