"""What a step leaves in rollouts/, read again."""

import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from rich.console import Console

from megatron_retool.config import load_config
from megatron_retool.loop.experience import Collected, replay_groups
from megatron_retool.loop.resume import contents_after
from megatron_retool.loop.rollout_files import store_step, write_estimates
from megatron_retool.loop.state import TrainerState
from megatron_retool.trajectory import TrajectoryBatch
from run_files.steps import read_estimates
from tests.loop.stand_ins import run_of
from tests.loop.test_columns import make_batch, trajectory
from tests.test_routed_experts import make_rows


def test_estimates_on_disk_are_found_by_group_and_index(tmp_path):
    rows = [trajectory(7, 0, 1.0), trajectory(9, 3, 0.0)]
    batch = make_batch(*rows).with_columns(entropy=np.arange(8))
    write_estimates(batch, tmp_path / "rollouts" / "step.learner.parquet")
    found = read_estimates(tmp_path / "rollouts" / "step.learner.parquet")
    assert set(found) == {(7, 0, 0), (9, 3, 0)}
    np.testing.assert_array_equal(found[9, 3, 0]["entropy"], [4, 5, 6, 7])
    np.testing.assert_array_equal(found[7, 0, 0]["old_log_probs"], rows[0].rollout_log_probs)
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step.learner.parquet"]


def test_replayed_steps_have_the_experts_that_the_engine_chose(tmp_path):
    """rollout.replay_dir in the place of engines: the learner is given what it was given then."""
    rows = [trajectory(7, 0, 1.0), trajectory(7, 1, 0.0), trajectory(9, 0, 1.0)]
    lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
    known = [make_rows(length, seed=seed) for seed, length in enumerate(lengths)]
    rows = [replace(row, routed_experts=column) for row, column in zip(rows, [known[0], None, known[2]], strict=True)]
    config = load_config(
        None,
        [
            f"trainer.runs_dir={tmp_path}",
            "trainer.experiment_name=first",
            f"rollout.replay_dir={tmp_path}/first/rollouts",
        ],
    )
    run = run_of(config, Console(quiet=True), 1)
    store_step(run, 1, rows, TrajectoryBatch.from_trajectories(rows[1:]))
    prompts = [SimpleNamespace(prompt_ids=row.prompt_ids) for row in (rows[0], rows[2])]
    source = SimpleNamespace(next_batch=lambda count: prompts[:count])
    replayed = [row for group in replay_groups(tmp_path / "first" / "rollouts", source, 1).values() for row in group]
    for name in ("rows", "starts"):
        before, after = (TrajectoryBatch.from_trajectories(step).routed_experts for step in (rows, replayed))
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name))


def test_a_checkpoint_that_is_still_being_written_does_not_hold_the_step():
    config = load_config(None, [])
    collected = Collected([trajectory(7, 0, 1.0)], [trajectory(7, 0, 1.0)], {})
    contents = contents_after(run_of(config, Console(quiet=True), 3), TrainerState.first(config), collected)
    gone = weakref.ref(collected)
    del collected
    assert gone() is None and contents.write is not None
