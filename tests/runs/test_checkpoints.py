import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_retool.config import ConfigError, load_config
from megatron_retool.runs.checkpoints import (
    checkpoint_workspace,
    complete_checkpoints,
    find_resume_point,
    how_to_go_on,
    prune_checkpoints,
    publish_checkpoint,
    remove_unfinished,
    retained_steps,
    seal_checkpoint,
    set_aside,
    set_aside_later,
)
from megatron_retool.runs.weights_checkpoints import (
    prune_weights,
    publish_weights,
    weights_checkpoints,
    weights_workspace,
)


def settings(tmp_path, *overrides):
    return load_config(None, [f"trainer.runs_dir={tmp_path}", "trainer.experiment_name=e", *overrides])


def make_checkpoint(run_dir, step):
    workspace = checkpoint_workspace(run_dir, step)
    (workspace / "learner").mkdir()
    seal_checkpoint(workspace, {"trainer_state.json": {"step": step}})
    return publish_checkpoint(workspace, step)


def make_weights(run_dir, step):
    workspace = weights_workspace(run_dir, step)
    workspace.mkdir()
    (workspace / "COMPLETE").touch()
    return publish_weights(run_dir, step)


def names(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_weights_alone_are_no_resume_point(tmp_path):
    config = settings(tmp_path)
    weights = make_weights(config.trainer.run_dir, 12)
    assert (
        weights_checkpoints(config.trainer.run_dir) == [weights] and complete_checkpoints(config.trainer.run_dir) == []
    )
    assert find_resume_point(config.trainer) is None
    assert "weights_step_12 holds only weights), so the same command starts over" in how_to_go_on(config.trainer)
    make_checkpoint(config.trainer.run_dir, 10)
    assert find_resume_point(config.trainer).step == 10 and "continues after step 10" in how_to_go_on(config.trainer)
    by_path = settings(tmp_path, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={weights.path}")
    with pytest.raises(ConfigError, match=r"holds only the weights of step 12: .*model\.mcore_path=.*weights_step_12"):
        find_resume_point(by_path.trainer)


def test_neither_kind_is_deleted_for_the_other(tmp_path):
    run_dir = settings(tmp_path).trainer.run_dir
    start = make_weights(run_dir, 1)
    for step in (2, 3, 4, 5):
        make_checkpoint(run_dir, step)
        make_weights(run_dir, step)
    config = settings(
        tmp_path, "trainer.keep_checkpoints=1", "trainer.keep_weights=2", f"model.mcore_path={start.path}"
    )
    prune_checkpoints(config.trainer, complete_checkpoints(run_dir)[-1])
    assert names(run_dir) == ["global_step_5", *(f"weights_step_{step}" for step in (1, 2, 3, 4, 5))]
    prune_weights(config.trainer, config.model, weights_checkpoints(run_dir)[1])
    assert names(run_dir) == ["global_step_5", *(f"weights_step_{step}" for step in (1, 2, 4, 5))]
    config = settings(tmp_path)
    prune_weights(config.trainer, config.model, weights_checkpoints(run_dir)[-1])  # all are kept
    assert len(weights_checkpoints(run_dir)) == 4


def test_weights_that_were_cut_short_are_removed_and_later_ones_set_aside(tmp_path):
    run_dir = settings(tmp_path).trainer.run_dir
    first = make_checkpoint(run_dir, 1)
    for step in (1, 2):
        make_weights(run_dir, step)
    cut_short = run_dir / "checkpoints" / "weights_step_3"
    cut_short.mkdir()
    workspace = weights_workspace(run_dir, 4).parent
    assert remove_unfinished(run_dir) == sorted([cut_short, workspace])
    back = settings(tmp_path, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={first.path}")
    moved = set_aside_later(back.trainer.run_dir, back.trainer, find_resume_point(back.trainer))
    assert names(run_dir) == ["global_step_1", "weights_step_1"] and names(moved) == ["weights_step_2"]


def test_only_complete_checkpoints_are_found(tmp_path):
    config = settings(tmp_path)
    make_checkpoint(config.trainer.run_dir, 10)
    make_checkpoint(config.trainer.run_dir, 9)
    (config.trainer.run_dir / "checkpoints" / "global_step_30").mkdir()  # no COMPLETE: a crash while it was written
    checkpoint_workspace(config.trainer.run_dir, 20)  # never committed
    assert [c.step for c in complete_checkpoints(config.trainer.run_dir)] == [9, 10]
    assert find_resume_point(config.trainer).step == 10
    assert find_resume_point(config.trainer).read("trainer_state.json") == {"step": 10}


def test_resume_modes(tmp_path):
    config = settings(tmp_path)
    assert find_resume_point(config.trainer) is None
    first = make_checkpoint(config.trainer.run_dir, 1)
    make_checkpoint(config.trainer.run_dir, 2)
    assert find_resume_point(settings(tmp_path, "trainer.resume_mode=disable").trainer) is None
    by_path = settings(tmp_path, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={first.path}")
    assert find_resume_point(by_path.trainer).step == 1
    wrong = settings(tmp_path, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}")
    with pytest.raises(ConfigError, match="not a complete checkpoint"):
        find_resume_point(wrong.trainer)


def test_what_was_cut_short_is_removed_and_nothing_else(tmp_path):
    run_dir = settings(tmp_path).trainer.run_dir
    whole = make_checkpoint(run_dir, 1)
    cut_short = run_dir / "checkpoints" / "global_step_2"
    (cut_short / "learner").mkdir(parents=True)  # a deletion takes the marker first
    own = run_dir / "checkpoints" / "global_step_2_kept_by_hand"
    own.mkdir()
    workspace = checkpoint_workspace(run_dir, 3)
    assert remove_unfinished(run_dir) == sorted([cut_short, workspace])
    assert sorted((run_dir / "checkpoints").iterdir()) == sorted([whole.path, own])
    assert remove_unfinished(run_dir) == []


def test_a_stopped_run_says_how_to_go_on(tmp_path):
    config = settings(tmp_path)
    assert "starts over" in how_to_go_on(config.trainer)
    make_checkpoint(config.trainer.run_dir, 7)
    assert "continues after step 7" in how_to_go_on(config.trainer)
    assert "resume_mode=auto" in how_to_go_on(settings(tmp_path, "trainer.resume_mode=disable").trainer)


def test_retention_keeps_the_newest_and_clears_leftovers(tmp_path):
    config = settings(tmp_path)
    run_dir = config.trainer.run_dir
    newest = [make_checkpoint(run_dir, step) for step in (1, 2, 3)][-1]
    checkpoint_workspace(run_dir, 4)
    prune_checkpoints(config.trainer, newest)
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["global_step_2", "global_step_3"]


def test_retention_keeps_milestones_and_the_best(tmp_path):
    config = settings(
        tmp_path, "trainer.keep_checkpoints=1", "trainer.keep_every=4", "trainer.keep_best=1", "trainer.best_metric=acc"
    )
    newest = [make_checkpoint(config.trainer.run_dir, step) for step in range(1, 8)][-1]
    rows = [{"step": step, "acc": value} for step, value in ((2, 0.9), (3, None), (5, 0.7))]
    (config.trainer.run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prune_checkpoints(config.trainer, newest)
    assert [c.step for c in complete_checkpoints(config.trainer.run_dir)] == [2, 4, 7]
    with pytest.raises(ConfigError, match="best_metric"):
        settings(tmp_path, "trainer.keep_best=1")


def test_retention_keeps_what_was_just_written_and_what_the_run_went_back_to(tmp_path):
    run_dir = settings(tmp_path).trainer.run_dir
    for step in (1, 2, 8, 9):
        make_checkpoint(run_dir, step)
    config = settings(
        tmp_path, "trainer.keep_checkpoints=1", "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={run_dir}/checkpoints/global_step_1",
    )  # fmt: skip
    prune_checkpoints(config.trainer, make_checkpoint(run_dir, 3))
    assert [c.step for c in complete_checkpoints(run_dir)] == [1, 3, 9]


def test_going_back_sets_aside_what_came_later(tmp_path):
    config = settings(tmp_path)
    run_dir = config.trainer.run_dir
    for step in (1, 2, 3):
        make_checkpoint(run_dir, step)
    for name in (
        *(f"rollouts/step_00000{step}{end}" for step in (1, 2, 4) for end in (".parquet", ".learner.parquet")),
        "validation/step_000000.parquet",
        "validation/step_000003.parquet",
        "export/config.json",
        "logs/engine_0.log",
        "metrics.jsonl",
    ):
        (run_dir / name).parent.mkdir(exist_ok=True)
        (run_dir / name).touch()
    (run_dir / "metrics.jsonl").write_text('{"step": 3}\n')

    def files(directory):
        return {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file() and "global" not in str(p)}

    path = run_dir / "checkpoints" / "global_step_1"
    back = settings(tmp_path, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}")
    assert (
        set_aside_later(config.trainer.run_dir, config.trainer, find_resume_point(config.trainer)) is None
    )  # auto never goes back
    assert set_aside_later(back.trainer.run_dir, back.trainer, None) is None
    moved = set_aside_later(back.trainer.run_dir, back.trainer, find_resume_point(back.trainer))
    assert moved.parent == run_dir.parent and moved.name.startswith("e.")
    assert [c.step for c in complete_checkpoints(run_dir)] == [1] and find_resume_point(config.trainer).step == 1
    assert [c.step for c in complete_checkpoints(moved)] == [2, 3]
    assert files(run_dir) == {
        "rollouts/step_000001.parquet",
        "rollouts/step_000001.learner.parquet",
        "validation/step_000000.parquet",
        "logs/engine_0.log",
        "metrics.jsonl",
    }
    assert files(moved) == {
        *(f"rollouts/step_00000{step}{end}" for step in (2, 4) for end in (".parquet", ".learner.parquet")),
        "validation/step_000003.parquet",
        "export/config.json",
        "metrics.jsonl",
    }
    assert (moved / "metrics.jsonl").read_text() == '{"step": 3}\n'
    assert set_aside_later(back.trainer.run_dir, back.trainer, find_resume_point(back.trainer)) is None


def test_same_step_again_replaces(tmp_path):
    run_dir = settings(tmp_path).trainer.run_dir
    make_checkpoint(run_dir, 1)
    workspace = checkpoint_workspace(run_dir, 1)
    seal_checkpoint(workspace, {"trainer_state.json": {"step": 1, "again": True}})
    publish_checkpoint(workspace, 1)
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["global_step_1"]
    assert json.loads((run_dir / "checkpoints/global_step_1/trainer_state.json").read_text())["again"]


def test_set_aside_moves_and_keeps(tmp_path):
    run_dir = settings(tmp_path).trainer.run_dir
    assert set_aside(run_dir) is None
    make_checkpoint(run_dir, 1)
    moved = set_aside(run_dir)
    assert not run_dir.exists()
    assert complete_checkpoints(moved)[0].step == 1


class TestRetention:
    def test_union_of_last_multiples_and_best(self) -> None:
        steps = [10, 20, 30, 40, 50, 60, 70]
        assert retained_steps(steps, keep_last=2) == {60, 70}
        assert retained_steps(steps, keep_last=1, keep_every=30) == {30, 60, 70}
        accuracy = {10: 0.2, 20: 0.9, 30: float("nan"), 50: 0.9, 99: 1.0}
        assert retained_steps(steps, keep_last=1, best=accuracy, keep_best=1) == {50, 70}
        assert retained_steps(steps, keep_last=1, best=accuracy, keep_best=2) == {20, 50, 70}
        assert retained_steps(steps, keep_last=1, best=accuracy, keep_best=1, higher_is_better=False) == {10, 70}
        assert retained_steps([], keep_last=3) == set()
        with pytest.raises(ValueError, match="keep_last=0 must be at least 1"):
            retained_steps(steps, keep_last=0)

    @given(
        steps=st.sets(st.integers(0, 200), min_size=1),
        keep_last=st.integers(1, 5),
        keep_every=st.none() | st.integers(0, 50),
        best=st.dictionaries(st.integers(0, 200), st.floats()),
        keep_best=st.integers(0, 4),
    )
    def test_the_newest_stays_and_nothing_is_invented(self, steps, keep_last, keep_every, best, keep_best) -> None:
        kept = retained_steps(steps, keep_last=keep_last, keep_every=keep_every, best=best, keep_best=keep_best)
        assert max(steps) in kept and kept <= steps
        assert len(kept) >= min(len(steps), keep_last)
        # Dropping what is not kept changes nothing about what is kept.
        assert retained_steps(kept, keep_last=keep_last, keep_every=keep_every, best=best, keep_best=keep_best) == kept
