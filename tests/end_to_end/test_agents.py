"""Steps of the demo through an agent on the plain ``openai`` client are the built-in loop's, number for number."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

from megatron_retool.config import load_config
from megatron_retool.loop.columns import split_mini_batches
from megatron_retool.rollout_rows import AGENT_KEY
from megatron_retool.trajectory import FinishReason, TrajectoryBatch, read_trajectories
from tests.end_to_end.conftest import ROOT, FinishedRun
from tests.end_to_end.test_run import learnt, steps

pytestmark = pytest.mark.timeout(1800)
EXACT = ("prompt_ids", "response_ids", "loss_mask", "turn_ids", "weight_versions")
OF_THE_AGENT = ("agent/", "rollout/finish_reason/")
"""Only the built-in loop knows that it was its limit of turns that ended a response."""


def check_same_rollouts(one, other) -> None:
    """Of a step, in two runs' directories."""
    rows = read_trajectories(one)
    for mine, theirs in zip(rows, read_trajectories(other), strict=True):
        key = (mine.group_id, mine.index)
        assert key == (theirs.group_id, theirs.index) and theirs.segment == 0
        for column in EXACT:
            np.testing.assert_array_equal(getattr(mine, column), getattr(theirs, column), f"{key}: {column}")
        np.testing.assert_allclose(mine.rollout_log_probs, theirs.rollout_log_probs, rtol=0, atol=1e-6)
        assert mine.reward == theirs.reward and theirs.reward_info[AGENT_KEY]["outcome"] == "finished"
        assert theirs.finish_reason in (mine.finish_reason, FinishReason.STOP)
        calls = [
            [(c.name, c.arguments, c.status, c.output_tokens, c.position) for c in t.tool_calls] for t in (mine, theirs)
        ]
        assert calls[0] == calls[1]
        assert theirs.timing is not None and theirs.timing.generation > 0


def check_same_columns(one, other) -> None:
    """What the learner computed of a step's rows: old log-probs, importance weights, advantages, …"""
    mine, theirs = pq.read_table(one), pq.read_table(other)
    assert mine.column_names == theirs.column_names and "advantages" in mine.column_names
    for name in mine.column_names:
        for a, b in zip(mine[name].to_pylist(), theirs[name].to_pylist(), strict=True):
            if a is not None:
                np.testing.assert_allclose(np.array(b, np.float64), np.array(a, np.float64), 1e-6, 1e-6, err_msg=name)


def loss_weights(run_dir, step: int) -> list[np.ndarray]:
    """Of each mini-batch of a step; computed again, for no file has them."""
    path = run_dir / f"rollouts/step_{step:06d}.parquet"
    batch = TrajectoryBatch.from_trajectories(read_trajectories(path))
    keep = pq.read_table(path.with_suffix(".learner.parquet"))["keep"].combine_chunks().flatten().to_numpy()
    config = load_config(run_dir / "config.yaml", [])
    return [each.columns["loss_weights"] for each in split_mini_batches(config, batch.with_columns(keep=keep), step)]


def check_same_step(run_dir, other, step: int) -> None:
    check_same_rollouts(*(path / f"rollouts/step_{step:06d}.parquet" for path in (run_dir, other)))
    check_same_columns(*(path / f"rollouts/step_{step:06d}.learner.parquet" for path in (run_dir, other)))
    for weights in zip(*(loss_weights(path, step) for path in (run_dir, other)), strict=True):
        np.testing.assert_allclose(*weights, rtol=0, atol=1e-6)
        assert weights[0].any()
    mine, theirs = (
        {name: value for name, value in learnt(steps(path)[step]).items() if not name.startswith(OF_THE_AGENT)}
        for path in (run_dir, other)
    )
    assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-6)
    assert theirs["actor/grad_norm"] > 0 and theirs["tool/calls"] > 0


@pytest.mark.slow
def test_the_plain_client_takes_the_steps_of_the_built_in_loop(demo_run: FinishedRun):
    code, output = demo_run.command_line.run(
        "train",
        "trainer.experiment_name=agent",
        f"demo.directory={demo_run.run_dir / 'data'}",
        f"model.path={demo_run.run_dir / 'sft_hf'}",
        f"model.mcore_path={demo_run.run_dir / 'sft_mcore'}",
        f"rollout.agent={ROOT}/examples/run_tools_agent.py:run",
        "trainer.val_before_train=false",
        "trainer.at_end=[summary]",
    )
    assert code == 0, output
    run_dir = demo_run.run_dir.with_name("agent")
    for step in (1, 2, 3):
        check_same_step(demo_run.run_dir, run_dir, step)
