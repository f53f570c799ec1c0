"""Each thing that can be wrong with a run's files is seen, and a whole run is not blamed."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from megatron_retool.loop.rollout_files import write_estimates
from megatron_retool.runs.checkpoints import checkpoint_workspace, publish_checkpoint, seal_checkpoint
from megatron_retool.trajectory import FinishReason, Trajectory, TrajectoryBatch, write_trajectories
from tests.campaign import checks
from tests.campaign.checks import Expected, differences, violations

EXPECTED = Expected(steps=2, groups=2, responses=2, validated=frozenset({0, 2}))


def trajectory(group: int, index: int) -> Trajectory:
    return Trajectory(
        group_id=group, index=index, prompt_ids=np.array([1]), response_ids=np.array([2, 3]),
        loss_mask=np.array([True, True]), rollout_log_probs=np.array([-1.0, -2.0]), turn_ids=np.array([0, 0]),
        weight_versions=np.array([0, 0]), finish_reason=FinishReason.STOP, reward=1.0, reward_info={}, tool_calls=[],
        extra_info={},
    )  # fmt: skip


def write_step(run_dir, step, groups):
    made = [trajectory(group, index) for group in groups for index in range(EXPECTED.responses)]
    path = run_dir / "rollouts" / f"step_{step:06d}.parquet"
    write_trajectories(made, path)
    batch = TrajectoryBatch.from_trajectories(made)
    batch.columns["entropy"] = np.zeros(int(batch.response_lengths.sum()), np.float32)
    write_estimates(batch, path.with_suffix(".learner.parquet"))


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    class Readable:
        def __init__(self, path):
            if not path.is_dir():
                raise OSError(f"{path} is missing")
            self.tensors = {}

    monkeypatch.setattr(checks, "DistCheckpoint", Readable)
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "validation").mkdir()
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": s, "actor/x": 1.0}) + "\n" for s in range(3)))
    for step in (1, 2):
        write_step(tmp_path, step, range(2 * step - 2, 2 * step))
        (checkpoint_workspace(tmp_path, step) / "learner").mkdir()
        workspace = checkpoint(tmp_path, step)
        seal_checkpoint(workspace, {"trainer_state.json": {"step": step}})
        publish_checkpoint(workspace, step)
    for step in EXPECTED.validated:
        write_trajectories([trajectory(0, 0)], tmp_path / "validation" / f"step_{step:06d}.parquet")
    return tmp_path


def checkpoint(run_dir, step):
    return run_dir / "checkpoints" / f".global_step_{step}.partial"


def test_a_whole_run_is_not_blamed(run_dir):
    assert violations(run_dir, EXPECTED) == []


def row_lost(run_dir):
    path = run_dir / "metrics.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"step": 1' not in line))


def row_doubled(run_dir):
    path = run_dir / "metrics.jsonl"
    path.write_text(path.read_text() + path.read_text().splitlines(True)[-1])


def row_torn(run_dir):
    path = run_dir / "metrics.jsonl"
    path.write_text(path.read_text()[:-5])


def rollout_cut(run_dir):
    path = run_dir / "rollouts" / "step_000002.parquet"
    path.write_bytes(path.read_bytes()[:100])


def rollout_lost(run_dir):
    (run_dir / "rollouts" / "step_000001.parquet").unlink()


def group_doubled(run_dir):
    write_step(run_dir, 2, [1, 2])


def group_short(run_dir):
    write_step(run_dir, 2, [2])


def validation_lost(run_dir):
    (run_dir / "validation" / "step_000000.parquet").unlink()


def checkpoint_lost(run_dir):
    shutil.rmtree(run_dir / "checkpoints" / "global_step_2")


def checkpoint_unreadable(run_dir):
    shutil.rmtree(run_dir / "checkpoints" / "global_step_1" / "learner")


def deletion_cut_short(run_dir):
    (run_dir / "checkpoints" / "global_step_1" / "COMPLETE").unlink()


def partial_file(run_dir):
    (run_dir / ".config.yaml.partial").touch()


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (row_lost, "steps [0, 2]"), (row_doubled, "steps [0, 1, 2, 2]"), (row_torn, "ends within a row"),
        (rollout_cut, "step_000002.parquet"), (rollout_lost, "step_000001.parquet"), (group_doubled, "lost or doubled"),
        (group_short, "2 trajectories, and not 4"), (validation_lost, "validation/step_000000"),
        (checkpoint_lost, "last complete checkpoint is global_step_1"), (checkpoint_unreadable, "cannot be loaded"),
        (deletion_cut_short, "global_step_1 is not complete"), (partial_file, ".config.yaml.partial is left over"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_harm_is_seen(run_dir, harm, words):
    harm(run_dir)
    assert any(words in violation for violation in violations(run_dir, EXPECTED))


def test_training_values_are_compared_and_nothing_else():
    rows = [{"step": 1, "actor/x": 1.0, "timing_s/step": 3.0}, {"step": 2, "actor/x": 2.0, "critic/new": 1.0}]
    assert list(differences(rows[:1], {1: {"actor/x": 1.0 + 1e-6, "timing_s/step": 9.0}})) == []
    found = list(differences(rows, {1: {"actor/x": 1.1}, 2: {"actor/x": 2.0}}))
    assert len(found) == 2 and "step 1: actor/x is 1.0" in found[0] and "critic/new" in found[1]
