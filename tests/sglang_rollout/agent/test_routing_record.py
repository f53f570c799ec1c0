"""Rows of routed experts stay with their tokens, whatever becomes of a trajectory."""

from __future__ import annotations

import numpy as np

from megatron_retool.routed_experts import is_missing
from megatron_retool.trajectory import FinishReason
from sglang_rollout.agent.trajectory_state import TrajectoryState
from sglang_rollout.engine.base import GenerateResult


def rows_of(*tokens: int) -> np.ndarray:
    """Rows that tell of which token they are."""
    return np.array(tokens, np.uint8)[:, None, None] + np.zeros((1, 2, 3), np.uint8)


def test_a_trajectory_has_the_rows_of_all_turns_and_none_of_its_last_tokens():
    state = TrajectoryState([1, 2, 3], group_id=0, index=0)
    state.append_sampled(GenerateResult([4, 5], [-1.0, -1.0], [1, 1], "stop", routed_experts=rows_of(1, 2, 3, 4)))
    fork = state.fork(1, None)
    state.append_unsampled([6, 7])
    state.append_sampled(GenerateResult([8, 9], [-1.0, -1.0], [1, 1], "stop", routed_experts=rows_of(5, 6, 7, 8)))
    state.append_unsampled([10])
    for each in (state, fork):
        each.finish_reason = FinishReason.STOP
    rows = state.to_trajectory().routed_experts
    assert rows.dtype == np.uint8 and rows[:8, 0, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert is_missing(rows).tolist() == [False] * 8 + [True] * 2
    shared = fork.to_trajectory().routed_experts
    assert shared[:4, 0, 0].tolist() == [1, 2, 3, 4] and is_missing(shared).tolist() == [False] * 4 + [True]
