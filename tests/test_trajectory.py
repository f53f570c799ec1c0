import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_retool.trajectory import (
    FinishReason,
    RolloutTiming,
    ToolCall,
    Trajectory,
    TrajectoryBatch,
    read_trajectories,
    write_trajectories,
)


def make_trajectory(prompt: int, response: int, index: int = 0, seed: int = 0) -> Trajectory:
    rng = np.random.default_rng(seed)
    mask = rng.random(response) < 0.7
    return Trajectory(
        prompt_ids=rng.integers(0, 100, prompt),
        response_ids=rng.integers(0, 100, response),
        loss_mask=mask,
        rollout_log_probs=np.where(mask, -rng.random(response), 0),
        turn_ids=np.where(mask, 0, -1),
        weight_versions=np.where(mask, 3, -1),
        group_id=index // 2,
        index=index % 2,
        finish_reason=FinishReason.STOP,
        reward=float(rng.choice([-1, 1])),
        reward_info={"acc": 1.0},
        tool_calls=[ToolCall("code_interpreter", "{}", "ok", 0.1, position=2, started=1.7e9 + 0.5)],
        extra_info={"data_source": "x"},
        timing=RolloutTiming(1.5, 0.5, 0.25, 1.7e9, 1.7e9 + 2.25, 3) if index else None,
    )


def test_columns_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="loss_mask has 1 entries for 2"):
        Trajectory([1], [2, 3], [True], [0, 0], [0, 0], [0, 0], 0, 0, FinishReason.STOP)


def test_tool_tokens_must_not_carry_log_probs():
    with pytest.raises(ValueError, match="tool tokens"):
        Trajectory([1], [2, 3], [True, False], [-1, -1], [0, -1], [0, -1], 0, 0, FinishReason.STOP)


def test_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="empty prompt"):
        Trajectory([], [2], [True], [-1], [0], [0], 0, 0, FinishReason.STOP)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=6), st.data())
def test_select_is_the_batch_of_the_selected(lengths, data):
    trajectories = [make_trajectory(p, r, i, seed=i) for i, (p, r) in enumerate(lengths)]
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8))
    batch = TrajectoryBatch.from_trajectories(trajectories)
    batch = batch.with_columns(old_log_probs=np.arange(batch.num_response_tokens))
    selected = batch.select(rows)
    expected = TrajectoryBatch.from_trajectories([trajectories[row] for row in rows])
    for name in TrajectoryBatch.__dataclass_fields__:
        if name != "columns":
            np.testing.assert_array_equal(getattr(selected, name), getattr(expected, name))
    column = np.split(batch.columns["old_log_probs"], np.cumsum(batch.response_lengths)[:-1])
    wanted = np.concatenate([column[row] for row in rows]) if rows else np.zeros(0)
    np.testing.assert_array_equal(selected.columns["old_log_probs"], wanted)
    np.testing.assert_array_equal(np.bincount(selected.sequence_ids, minlength=len(rows)), selected.response_lengths)


def test_column_of_wrong_length_is_refused():
    batch = TrajectoryBatch.from_trajectories([make_trajectory(2, 3)])
    with pytest.raises(ValueError, match="advantages"):
        batch.with_columns(advantages=np.zeros(4))


def test_parquet_round_trip(tmp_path):
    trajectories = [make_trajectory(3, 5, i, seed=i) for i in range(3)]
    path = tmp_path / "deep" / "step.parquet"
    write_trajectories(trajectories, path, texts=[("p", "r")] * 3)
    again = read_trajectories(path)
    for a, b in zip(trajectories, again, strict=True):
        for name in Trajectory.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert [p.name for p in path.parent.iterdir()] == ["step.parquet"]


def test_a_timing_begins_with_its_first_seconds_and_has_the_last_engine():
    first = RolloutTiming().plus(generation=1.0, waiting=2.0, engine=1)
    assert first.started == pytest.approx(first.ended - 3.0, abs=1e-6) and first.engine == 1
    second = first.plus(tools=0.5)
    assert (second.generation, second.tools, second.waiting) == (1.0, 0.5, 2.0)
    assert second.started == first.started and second.ended >= first.ended and second.engine == 1
    assert second.plus(engine=0).engine == 0
