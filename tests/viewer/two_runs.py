"""Two runs of two steps on disk that are equal to the bit, for tests that then change one of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from megatron_retool.config import load_config, save_config
from megatron_retool.loop.rollout_files import write_estimates
from megatron_retool.trajectory import (
    FinishReason,
    RolloutTiming,
    ToolCall,
    Trajectory,
    TrajectoryBatch,
    read_trajectories,
    write_trajectories,
)

STARTED = 1_700_000_000.0
ROWS: list[dict[str, Any]] = [
    {"step": 0, "val-core/all/acc/mean@4": 0.25},
    {"step": 1, "rollout/acc/mean": 0.5, "actor/grad_norm": float("nan"), "timing_s/step": 4.0, "timing_s/gen": 2.5,
     "timing_s/reward": 0.5, "timing_s/update_actor": 1.25, "perf/slowest_rank_ratio": 1.5},
    {"step": 2, "rollout/acc/mean": 0.375, "actor/grad_norm": float("inf"), "timing_s/step": 3.0, "timing_s/gen": 1.0,
     "timing_s/testing": 7.0, "val-core/all/acc/mean@4": 0.125},
]  # fmt: skip


def make_run(run_dir: Path, *overrides: str) -> Path:
    """config.yaml, metrics.jsonl, and two steps of two responses with what the learner computed."""
    run_dir.mkdir(parents=True)
    name = f"trainer.experiment_name={run_dir.name}"
    save_config(load_config(None, [name, "trainer.total_steps=2", *overrides]), run_dir / "config.yaml")
    write_rows(run_dir, ROWS)
    for step in (1, 2):
        write_step(run_dir, step, [_trajectory(step, index) for index in (0, 1)])
    return run_dir


def write_rows(run_dir: Path, rows: list[dict[str, Any]]) -> None:
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_step(run_dir: Path, step: int, trajectories: list[Trajectory], **columns: np.ndarray) -> None:
    path = run_dir / "rollouts" / f"step_{step:06d}.parquet"
    write_trajectories(trajectories, path)
    batch = TrajectoryBatch.from_trajectories(trajectories)
    tokens = np.arange(batch.num_response_tokens, dtype=np.float32)
    write_estimates(batch.with_columns(**{"old_log_probs": -tokens} | columns), path.with_suffix(".learner.parquet"))


def read_step(run_dir: Path, step: int) -> list[Trajectory]:
    return read_trajectories(run_dir / "rollouts" / f"step_{step:06d}.parquet")


def _trajectory(step: int, index: int) -> Trajectory:
    started = STARTED + 10 * step + index
    return Trajectory(
        prompt_ids=[1, 2, 3],
        response_ids=[4, 5, 6, 7, 8],
        loss_mask=[True, True, False, True, True],
        rollout_log_probs=[-0.1, -0.2, 0.0, -0.3, -0.4],
        turn_ids=[0, 0, -1, 1, 1],
        weight_versions=[step, step, -1, step, step],
        group_id=7,
        index=index,
        finish_reason=FinishReason.STOP,
        reward=float(index),
        reward_info={"acc": float(index)},
        tool_calls=[ToolCall("code_interpreter", "{}", "ok", 0.25, position=1, started=started + 0.5)],
        timing=RolloutTiming(1.5, 0.25, 0.125, started, started + 2.0, index),
    )
