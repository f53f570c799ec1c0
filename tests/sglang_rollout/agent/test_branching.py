from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
import torch

from megatron_retool.algorithms.advantages import share_branch_advantages
from megatron_retool.config import BranchingConfig
from megatron_retool.trajectory import FinishReason, Trajectory, TrajectoryBatch
from sglang_rollout.agent.branching import BRANCH_KEY, EntropyBranching, entropies, entropy_change, shared_token_ids
from sglang_rollout.agent.trajectory_state import TrajectoryState
from sglang_rollout.engine.base import GenerateResult


def uniform(count: int) -> list[float]:
    return [-math.log(count)] * count


def test_entropy_of_the_most_likely_tokens():
    assert entropies([uniform(4), uniform(2)]) == pytest.approx([math.log(4), math.log(2)])
    assert entropies([[0.0, -math.inf]]) == [0.0]


def test_the_change_of_the_entropy_by_hand():
    """V = 100, so log V = 4.605. Three tokens at the start, two after the tool's result."""
    initial, now = [0.5, 1.0, 0.25], [1.5, 1.25]
    assert entropy_change(now, initial, 100, "paper") == pytest.approx((1.0 + 0.25) / 100)
    assert entropy_change(now, initial, 100, "authors_code") == pytest.approx((2.75 - 1.75) / 4.605170186)
    # A turn that ends early: the text compares what there is, the code counts the missing tokens as certain.
    assert entropy_change([0.6], [0.5, 0.5], 100, "paper") > 0 > entropy_change([0.6], [0.5, 0.5], 100, "authors_code")


@pytest.mark.parametrize(("form", "divisor"), [("paper", 100), ("authors_code", math.log(100))])
def test_the_threshold_is_the_probability_of_the_form(form, divisor):
    """Five tokens of log 2 nats, then five of log 4: the sums differ by 5 log 2."""
    probability = 0.25 + 0.5 * 5 * math.log(2) / divisor
    for margin, forks in ((-1e-6, 2), (1e-6, 0)):
        branching = make(
            branch_probability=0.25, entropy_weight=0.5, threshold=probability + margin, entropy_change=form
        )
        state = TrajectoryState([1], 0, 0)
        turn(branching, state, per_token=math.log(2))
        assert len(turn(branching, state, per_token=math.log(4))[0]) == forks


def test_what_a_fork_is_compared_with():
    """The parent began with log 2 a token, the fork's own first turn has log 4, and its second log 3."""
    for form, forks in (("paper", 2), ("authors_code", 0)):
        branching, state = make(budget=20, entropy_change=form), TrajectoryState([1], 0, 0)
        turn(branching, state, math.log(2))
        fork = turn(branching, state, math.log(4))[0][0]
        turn(branching, fork, math.log(4))
        assert len(turn(branching, fork, math.log(3))[0]) == forks


class Engine:
    """Answers with ``length`` tokens of a given entropy (nats per token); keeps what it was asked."""

    def __init__(self, per_token: float, length: int = 30) -> None:
        self.per_token, self.length = per_token, length
        self.requests: list[tuple[int, int, int]] = []

    async def __call__(self, state, max_new_tokens, deadline, after=None, top_log_probs=0):
        extra_ids = after.output_ids if after else []
        self.requests.append((len(extra_ids), max_new_tokens, top_log_probs))
        count = min(max_new_tokens, self.length - len(extra_ids))
        reason = "stop" if len(extra_ids) + count == self.length else "length"
        top = [uniform(round(math.exp(self.per_token)))] * count if top_log_probs else None
        first = len(extra_ids)
        return GenerateResult(list(range(first, first + count)), [-1.0] * count, [1] * count, reason, top_log_probs=top)


def turn(branching: EntropyBranching, state: TrajectoryState, per_token: float) -> tuple[list[TrajectoryState], Engine]:
    """One turn of ``state``, with a tool result after it; the forks it made."""
    forks: list[TrajectoryState] = []
    engine = Engine(per_token)
    result = asyncio.run(branching.generate(engine, forks.append, state, 100, 10.0))
    assert result.output_ids == list(range(30)) and len(result.log_probs) == 30
    state.append_sampled(result)
    state.append_unsampled([500, 501])
    state.turn += 1
    state.turn_start = len(state.response_ids)
    return forks, engine


def make(timing: str = "after_tool_result", budget: int = 6, **settings) -> EntropyBranching:
    config = BranchingConfig(
        enable=True, initial_rollouts=2, timing=timing, **{"beam_size": 3, "entropy_tokens": 5, **settings}
    )
    return EntropyBranching(config, budget, vocabulary_size=100, seed=0)


def test_the_paper_forks_where_the_tool_result_raises_entropy():
    branching, state = make(), TrajectoryState([1], 0, 0, seed=7)
    forks, engine = turn(branching, state, per_token=math.log(2))
    assert forks == []
    assert engine.requests == [(0, 5, 10), (5, 95, 0)]
    node = list(state.response_ids)
    forks, _ = turn(branching, state, per_token=math.log(4))
    assert [(fork.index, fork.turn, fork.response_ids) for fork in forks] == [(2, 1, node), (3, 1, node)]
    assert forks[0].reward_info[BRANCH_KEY] == {"parent": 0, "shared_tokens": 32}
    assert len({fork.seed for fork in forks} | {state.seed}) == 3
    # Where entropy fell, nothing is forked.
    assert turn(branching, state, per_token=0.0)[0] == []


def test_a_fork_does_not_fork_again_at_its_own_node_but_does_later():
    branching, state = make(budget=20), TrajectoryState([1], 0, 0)
    turn(branching, state, math.log(2))
    fork = turn(branching, state, math.log(4))[0][0]
    assert turn(branching, fork, math.log(4))[0] == []
    assert len(turn(branching, fork, math.log(8))[0]) == 2


def test_the_authors_timing_looks_at_the_turn_before_the_result():
    branching = make("before_tool_result", branch_probability=0.0, entropy_weight=1000.0)
    state = TrajectoryState([1], 0, 0)
    turn(branching, state, math.log(2))
    # No change yet: the latest entropy is the initial one.
    assert turn(branching, state, math.log(4))[0] == []
    forks, _ = turn(branching, state, 0.0)
    assert len(forks) == 2 and len(forks[0].response_ids) == 64
    assert turn(branching, state, 0.0)[0] == []


def test_the_budget_holds_and_is_topped_up():
    branching, state = make(budget=3), TrajectoryState([1], 0, 0)
    turn(branching, state, math.log(2))
    assert len(turn(branching, state, math.log(4))[0]) == 1
    assert turn(branching, state, math.log(8))[1].requests == [(0, 100, 0)]
    assert branching.top_up() == 0
    unused = make(budget=6)
    assert unused.top_up() == 4 and unused.top_up() == 0


def test_a_turn_that_goes_on_after_a_pause_is_not_measured():
    branching, state = make(), TrajectoryState([1], 0, 0)
    state.append_sampled(GenerateResult([1, 2], [-1.0, -1.0], [1, 1], "abort"))
    engine = Engine(1.0)
    asyncio.run(branching.generate(engine, lambda fork: None, state, 50, 10.0))
    assert engine.requests == [(0, 50, 0)]


def trajectory(index: int, ids: list[int], sampled: list[bool], parent: int | None = None, shared: int = 0):
    mask = np.array(sampled)
    return Trajectory(
        prompt_ids=[1], response_ids=ids, loss_mask=mask, rollout_log_probs=np.where(mask, -1.0, 0.0),
        turn_ids=np.where(mask, 0, -1), weight_versions=np.where(mask, 0, -1), group_id=4, index=index,
        finish_reason=FinishReason.STOP,
        reward_info={} if parent is None else {BRANCH_KEY: {"parent": parent, "shared_tokens": shared}},
    )  # fmt: skip


def test_hard_advantages_average_over_the_branches_that_share_a_token():
    t, f = True, False
    group = [
        trajectory(0, [10, 11, 99, 12], [t, t, f, t]),
        trajectory(1, [20, 21], [t, t]),
        trajectory(2, [10, 11, 99, 13], [t, t, f, t], parent=0, shared=3),
        trajectory(3, [10, 11, 99, 13, 14], [t, t, f, t, t], parent=2, shared=4),
    ]
    ids = shared_token_ids(group)
    batch = TrajectoryBatch.from_trajectories(group)
    per_trajectory = torch.tensor([1.0, 5.0, 2.0, 6.0])
    advantages = per_trajectory[torch.from_numpy(batch.sequence_ids)] * torch.from_numpy(batch.loss_mask)
    shared = share_branch_advantages(advantages, torch.from_numpy(batch.loss_mask), torch.from_numpy(ids))
    assert shared.tolist() == pytest.approx([3.0, 3.0, 0.0, 1.0, 5.0, 5.0, 3.0, 3.0, 0.0, 4.0, 3.0, 3.0, 0.0, 4.0, 6.0])


def test_shared_ids_do_not_depend_on_the_order_of_rows():
    t = True
    group = [trajectory(1, [10, 12], [t, t], parent=0, shared=1), trajectory(0, [10, 11], [t, t])]
    ids = shared_token_ids(group)
    assert ids[0] == ids[2] and len(set(ids.tolist())) == 3
    alone = shared_token_ids(group[:1])
    assert len(set(alone.tolist())) == 2
