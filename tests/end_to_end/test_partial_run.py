"""Partial rollout and over-sampling in a real run that is killed between steps: every prompt is accounted for."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from megatron_retool.runs.checkpoints import complete_checkpoints
from megatron_retool.runs.metrics_file import read_metrics
from megatron_retool.trajectory import read_trajectories
from run_files.steps import read_estimates
from sglang_rollout.agent.paused_groups import read_paused_groups
from tests.end_to_end.conftest import FinishedRun, kill_driver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.rare
def test_paused_trajectories_go_on_in_the_next_step_and_after_a_kill(demo_run: FinishedRun):
    run_dir = demo_run.run_dir.with_name("partial")
    arguments = [
        "trainer.experiment_name=partial",
        f"demo.directory={demo_run.run_dir / 'data'}",
        f"model.path={demo_run.run_dir / 'sft_hf'}",
        f"model.mcore_path={demo_run.run_dir / 'sft_mcore'}",
        "trainer.val_before_train=false",
        "learner.world_size=1",
        "learner.mini_batch_size=32",  # one update a step, which computes its old log-probs itself
        "trainer.total_steps=6",
        "trainer.keep_checkpoints=0",
        "trainer.deterministic=false",
        "rollout.partial.enable=true",
        # Of two paused groups, what is unfinished may be all but done: of eight, some is in the midst of a turn.
        "rollout.partial.over_sampling_factor=3",
        # A call that takes longer than a stream waits for is made again in the next.
        "tools.code_interpreter.run_timeout_seconds=2",
        "rollout.partial.max_age=6",
    ]
    process, marker = demo_run.command_line.start("train", *arguments)
    deadline = time.monotonic() + 300
    while len(read_metrics(run_dir / "metrics.jsonl")) < 3:  # a step's row follows its checkpoint
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    kill_driver(process, marker)
    checkpoint = complete_checkpoints(run_dir)[-1]
    code, output = demo_run.command_line.run("train", *arguments)
    assert code == 0, output
    assert f"global_step_{checkpoint.step} (step {checkpoint.step} of 6)" in " ".join(output.split())

    rows = read_metrics(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    paused, resumed = ([row[f"rollout/{name}_trajectories"] for row in rows] for name in ("paused", "resumed"))
    assert sum(paused) > 0 and resumed == [0, *paused[:-1]]
    assert all(row["rollout/dropped_trajectories"] == 0 for row in rows)

    assert "old log-probs: of the update's own forward pass" in " ".join(output.split())
    learned = [row for row in rows if not row["actor/skipped_updates"]]
    assert learned and all(row["actor/fused_old_log_probs"] == 1.0 for row in learned)
    assert all(row["timing_s/old_log_prob"] < 0.1 and row["rollout_corr/log_prob_abs_diff"] >= 0 for row in learned)
    stored = read_estimates(run_dir / "rollouts" / f"step_{learned[0]['step']:06d}.learner.parquet")
    assert all(row.keys() >= {"old_log_probs", "entropy", "importance_weights", "keep"} for row in stored.values())

    steps = [read_trajectories(run_dir / "rollouts" / f"step_{step:06d}.parquet") for step in range(1, 7)]
    assert all(len(step) == 4 * 8 for step in steps)
    done = [(t.group_id, t.index) for step in steps for t in step]
    last = complete_checkpoints(run_dir)[-1]
    position = json.loads((last.path / "prompt_source.json").read_text())
    assert last.step == 6 and position["drawn"] == 6 * 4 + 8
    # 3 x 4 groups are always under way; those that no step has finished wait in the checkpoint.
    waiting = [
        (group.group_id, state.index) for group in read_paused_groups(last.paused_groups) for state in group.states
    ]
    assert sorted(done + waiting) == [(group, index) for group in range(position["drawn"]) for index in range(8)]

    mixed = 0
    before = {(s.group_id, s.index): s for g in read_paused_groups(checkpoint.paused_groups) for s in g.states}
    assert len(before) == 8 * 8
    for number, step in enumerate(steps, start=1):
        for t in step:
            versions = set(t.weight_versions[t.loss_mask].tolist())
            assert max(versions) <= number - 1
            mixed += len(versions) > 1
            state = before.get((t.group_id, t.index))
            if state is not None:
                known = len(state.response_ids)
                assert number > checkpoint.step
                assert t.response_ids[:known].tolist() == state.response_ids
                assert t.rollout_log_probs[:known].tolist() == np.float32(state.log_probs).tolist()
                assert t.weight_versions[:known].tolist() == state.weight_versions
    assert mixed > 0
