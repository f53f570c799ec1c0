"""Which rows of routed experts a trajectory keeps, over random sequences of answers, tools, forks and new weights."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_retool.config import SamplingConfig
from megatron_retool.routed_experts import is_missing
from megatron_retool.trajectory import FinishReason
from sglang_rollout.agent.trajectory_state import TrajectoryState, joined
from sglang_rollout.engine.base import GenerateRequest, GenerateResult
from sglang_rollout.session import RolloutError, first_without_rows, with_trusted_rows
from tests.kit import traced_rows


@dataclass
class World:
    """A trajectory, and for each of its tokens the version of its row, None where nobody may know it."""

    state: TrajectoryState
    rows: list[int | None] = field(default_factory=list)
    version: int = 1
    taken_back: bool = False
    """Tokens were, for which some of the rows that are left were computed."""

    def ask(self, tokens: list[int], changes: list[int], ending: str, after: GenerateResult | None) -> GenerateResult:
        """One request: new weights come before each of the places ``changes`` of what it samples."""
        known = [*self.state.prompt_ids, *self.state.response_ids, *(after.output_ids if after else ())]
        start = first_without_rows(self.state, after)
        request = GenerateRequest(known, len(tokens), SamplingConfig(), routed_experts_start=start)
        versions = []
        for place in range(len(tokens)):
            self.version += changes.count(place)
            versions.append(self.version)
        # Held requests are computed again: all rows are of the last version.
        rows = traced_rows.rows_of([*known, *tokens], self.version, start)
        result = GenerateResult(
            tokens,
            [-1.0] * len(tokens),
            versions,
            "stop" if ending == "stop" else "abort",
            routed_experts=None if ending == "abort without rows" else rows,
        )
        return with_trusted_rows(request, result, self.state, after, "http://engine")

    def expect(self, answered: bool) -> None:
        """Rows are known up to the last token but one, and right where the next sampled token had the last version."""
        if not answered:
            return
        versions = [-1] * len(self.state.prompt_ids) + self.state.weight_versions
        last = versions[-1]
        for position in range(len(self.rows), len(versions) - 1):
            following = next(version for version in versions[position + 1 :] if version >= 0)
            self.rows.append(last if following == last else None)

    def check(self) -> None:
        state = self.state.copy()
        state.finish_reason = FinishReason.STOP
        trajectory = state.to_trajectory()
        expected = [*self.rows, *[None] * (state.length - len(self.rows))]
        if trajectory.routed_experts is None:
            assert not self.rows
            return
        missing = traced_rows.check(trajectory, weights=not self.taken_back)
        assert missing == [place for place, version in enumerate(expected) if version is None]


tokens = st.lists(st.integers(0, 300), min_size=1, max_size=6)
places = st.lists(st.integers(0, 6), max_size=2)
endings = st.sampled_from(["stop", "abort", "abort without rows"])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_row_is_misplaced_and_none_is_of_other_weights(data):
    worlds = [World(TrajectoryState(data.draw(tokens), group_id=0, index=0))]
    for _ in range(data.draw(st.integers(1, 8))):
        world = data.draw(st.sampled_from(worlds))
        state = world.state
        match data.draw(st.sampled_from(["answer", "answer", "two", "tool", "fork", "weights", "file", "back"])):
            case "answer":
                result = world.ask(data.draw(tokens), data.draw(places), data.draw(endings), None)
                state.append_sampled(result)
                world.expect(result.routed_experts is not None)
            case "two":  # as branching does: the head of a turn, then its rest
                head = world.ask(data.draw(tokens), [], "stop", None)
                before, rows = len(state.response_ids), list(state.routed_experts)
                state.append_sampled(head)
                world.expect(True)
                state.response_ids[before:], state.loss_mask[before:] = [], []
                state.log_probs[before:], state.turn_ids[before:], state.weight_versions[before:] = [], [], []
                state.routed_experts = rows
                tail = world.ask(data.draw(tokens), data.draw(places), data.draw(endings), head)
                state.append_sampled(joined(head, tail))
                world.expect(tail.routed_experts is not None)
            case "tool":
                state.append_unsampled(data.draw(tokens))
            case "fork":
                worlds.append(World(state.fork(len(worlds), None), list(world.rows), world.version, world.taken_back))
            case "weights":
                world.version += 1
            case "file":
                state = world.state = state.copy()
                state.routed_ids = None
                state.routed_experts = [np.concatenate(state.routed_experts)] if state.routed_experts else []
                state.routed_tokens()
            case "back":  # an agent takes back the end of the response and writes something else
                keep, before = data.draw(st.integers(0, len(state.response_ids))), list(state.response_ids)
                for column in state._columns:
                    del column[keep:]
                state.append_unsampled(data.draw(tokens))
                same = [old == new for old, new in zip(before, state.response_ids, strict=False)]
                length = same.index(False) if False in same else len(same)
                world.rows, world.taken_back = world.rows[: len(state.prompt_ids) + length], True
        for each in worlds:
            each.check()


def whole(state: TrajectoryState, start: int, rows: np.ndarray | None, reason: str = "stop") -> GenerateResult:
    request = GenerateRequest([1, 2, 3], 2, SamplingConfig(), routed_experts_start=start)
    result = GenerateResult([4, 5], [-1.0, -1.0], [1, 1], reason, routed_experts=rows)
    return with_trusted_rows(request, result, state, None, "http://engine")


@pytest.mark.parametrize("rows", [None, traced_rows.rows_of([1, 2, 3, 4], 1), np.zeros((4, 6), np.uint8)])
def test_an_engine_without_rows_is_refused_at_its_first_answer(rows):
    state = TrajectoryState([1, 2, 3], 0, 0)
    with pytest.raises(RolloutError, match=r"http://engine.*learner\.routing_replay=rollout.*rollout\.engine\.backend"):
        whole(state, 0, rows)
    assert whole(state, 0, rows, "abort").routed_experts is None


def test_an_answer_that_the_state_is_not_ready_for_adds_no_rows():
    state = TrajectoryState([1, 2, 3], 0, 0)
    result = whole(state, 0, traced_rows.rows_of([1, 2, 3, 4, 5], 1))
    other = replace(result, output_ids=[7, 8])
    state.append_sampled(result)
    state.append_sampled(other)
    assert state.routed_tokens() == 4


def test_an_agent_may_keep_the_beginning_of_an_answer():
    state = TrajectoryState([1, 2, 3], 0, 0)
    result = whole(state, 0, traced_rows.rows_of([1, 2, 3, 4, 5], 1))
    state.append_sampled(replace(result, output_ids=[4], log_probs=[-1.0], weight_versions=[1]))
    state.finish_reason = FinishReason.STOP
    assert not is_missing(state.to_trajectory().routed_experts).any()


def test_an_agent_that_fails_leaves_rows_of_the_tokens_that_are_left():
    state = TrajectoryState([1, 2, 3], 0, 0)
    state.append_sampled(whole(state, 0, traced_rows.rows_of([1, 2, 3, 4, 5], 1)))
    state.log_probs.pop()
    state.response_ids.append("no token")
    state.end_abruptly("it failed")
    rows = state.to_trajectory().routed_experts
    assert len(rows) == state.length == 4 and not is_missing(rows).any()
