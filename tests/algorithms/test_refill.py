"""Which groups are started, kept and given up: properties over any informativeness and any order of finishing."""

from __future__ import annotations

import json
import random
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_retool.algorithms.refill import MAX_AHEAD, KeepRate, Refill, groups_for

OUTCOMES = st.lists(st.booleans(), min_size=1, max_size=80)
"""Whether the groups have a signal, one after the other; once more from the first where there are further groups."""


def run(refill: Refill, outcomes: list[bool], finishing: random.Random) -> list[int]:
    """Decide groups in a random order until the batch is certain; the ids of all that were started."""
    ids, started = count(), []
    while not refill.certain:
        new = [next(ids) for _ in range(refill.to_start)]
        refill.start(new)
        started += new
        assert refill.under_way, "nobody works, and the batch is not certain"
        if finishing.random() < 0.3:  # Groups that finish together are decided before anything is started.
            continue
        group_id = finishing.choice(refill.under_way)
        refill.decide(group_id, outcomes[group_id % len(outcomes)])
        refill.give_up()
    assert refill.to_start == 0
    return started


@given(
    OUTCOMES,
    st.integers(1, 12),
    st.integers(1, 5),
    st.builds(KeepRate, st.floats(0, 20), st.floats(20, 60)),
    st.lists(st.integers(), min_size=2, max_size=2),
)
def test_order_and_signal_alone_decide_what_is_kept(outcomes, wanted, batches, keep_rate, seeds):
    limit = batches * wanted
    kept = [group_id for group_id in range(limit) if outcomes[group_id % len(outcomes)]][:wanted]
    examined = list(range(kept[-1] + 1 if len(kept) == wanted else limit))
    estimates = set()
    for seed in seeds:
        refill = Refill(wanted, max_groups=limit, keep_rate=keep_rate)
        started = run(refill, outcomes, random.Random(seed))
        assert refill.batch == kept and refill.examined == examined
        assert len(started) <= limit
        # Each one that was started is kept or dropped within the order, beyond the batch, or without a result: once.
        parts = [*refill.examined, *refill.surplus, *refill.given_up, *refill.under_way]
        assert sorted(parts) == started
        estimates.add(refill.keep_rate_after())
    assert len(estimates) == 1


@given(OUTCOMES, st.integers(1, 12), st.integers(0, 3), st.integers())
def test_groups_without_a_signal_are_replaced_until_the_limit(outcomes, wanted, batches, seed):
    if not any(outcomes):
        batches = max(batches, 1)  # 0 has no limit, and would never end
    refill = Refill(wanted, max_groups=batches * wanted or None, keep_rate=KeepRate())
    run(refill, outcomes, random.Random(seed))
    assert len(refill.batch) == wanted or len(refill.examined) == batches * wanted


@given(OUTCOMES, st.integers(1, 12), st.integers(1, 4), st.floats(1, 3), st.integers(0, 30), st.integers())
def test_with_partial_rollout_the_first_complete_ones_are_the_batch(outcomes, wanted, batches, factor, paused, seed):
    refill = Refill(wanted, max_groups=batches * wanted, keep_rate=KeepRate(), over_sampling=factor, in_order=False)
    refill.start(range(1000, 1000 + paused))
    started = run(refill, outcomes, random.Random(seed))
    assert not refill.given_up and not refill.surplus
    assert len(refill.examined) <= batches * wanted
    assert sorted([*refill.examined, *refill.under_way]) == sorted([*started, *range(1000, 1000 + paused)])
    assert len(refill.under_way) <= max(factor * batches * wanted + 1, paused)


def test_several_that_are_complete_together_are_a_batch_and_no_more():
    """As where nothing stops between steps, and some were complete when the step began."""
    refill = Refill(2, keep_rate=KeepRate(), over_sampling=2.0, in_order=False)
    refill.start(range(4))
    for group_id in (3, 1, 0):
        refill.decide(group_id, True)
    assert refill.certain and refill.batch == [0, 1] and refill.to_start == 0
    assert refill.keep_rate_after() == KeepRate(3, 3).faded()


def test_what_cannot_be_in_the_batch_is_given_up_before_the_batch_is_certain():
    refill = Refill(2, max_groups=9, keep_rate=KeepRate(2, 4))
    refill.start(range(6))
    for group_id in (1, 3):
        refill.decide(group_id, True)
    # Group 0 decides whether 0 and 1 or 1 and 3 are the batch; 2 cannot matter more than it does, 4 and 5 not at all.
    assert refill.give_up() == [4, 5] and refill.give_up() == []
    assert refill.to_start == 0 and not refill.certain
    refill.decide(0, True)
    assert refill.certain and refill.batch == [0, 1] == refill.examined
    assert refill.surplus == [3] and refill.under_way == [2] and refill.given_up == [4, 5]


def test_a_group_without_a_signal_is_replaced_while_the_others_go_on():
    refill = Refill(4, max_groups=40, keep_rate=KeepRate())
    assert refill.to_start == 4
    refill.start(range(4))
    refill.decide(2, False)
    assert refill.to_start > 0


def test_everything_is_kept_where_dynamic_sampling_is_off():
    refill = Refill(4, max_groups=4)
    refill.start(range(refill.to_start))
    for group_id in (3, 1, 0, 2):
        assert not refill.certain and refill.to_start == 0
        refill.decide(group_id, True)
    assert refill.batch == [0, 1, 2, 3]


def test_the_keep_rate_is_a_running_estimate():
    known = KeepRate()
    assert known.share == 1
    for _ in range(40):
        known = known.with_groups(10, 40).faded()
    assert known.share == pytest.approx(0.25, abs=0.02)
    for _ in range(10):
        known = known.with_groups(30, 40).faded()
    assert 0.65 < known.share < 0.75
    assert KeepRate.from_state(json.loads(json.dumps(known.state_dict()))) == known
    assert KeepRate.from_state({}) == KeepRate()


@given(
    st.integers(1, 600), st.integers(1, 100).map(lambda percent: percent / 100), st.sampled_from([0.0, 0.5, 1.0, 2.0])
)
def test_what_is_started_ahead_is_enough_as_often_as_asked(missing, share, certainty):
    found = groups_for(missing, share, certainty)
    for groups, enough in ((found, True), (found - 1, False)):
        expected = groups * share - certainty * (groups * share * (1 - share)) ** 0.5
        assert (expected >= missing - 1e-6) == enough
    assert groups_for(missing, 1.0, certainty) == missing


def test_a_run_that_need_not_be_certain_starts_fewer_groups():
    def started(certainty):
        return Refill(16, keep_rate=KeepRate(400, 1000), certainty=certainty).to_start

    assert started(0.0) == 40 < started(1.0) < started(2.0)


def test_few_kept_groups_do_not_start_everything_at_once():
    refill = Refill(16, keep_rate=KeepRate(0, 10_000))
    assert refill.to_start == 16 * MAX_AHEAD


def test_a_group_is_started_and_decided_once():
    refill = Refill(2, max_groups=4)
    refill.start([0, 1])
    refill.decide(0, True)
    for wrong in (lambda: refill.decide(0, True), lambda: refill.decide(7, True), lambda: refill.start([1])):
        with pytest.raises(ValueError, match="under way|before"):
            wrong()
