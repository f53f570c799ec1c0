import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_retool.algorithms.sequence_balance import (
    balanced_partition,
    pack_micro_batches,
    sequence_cost,
)

lengths_lists = st.lists(st.integers(1, 1000), min_size=1, max_size=60)


def long_tailed_lengths(n=512, seed=0, longest=16384):
    """Log-normal around 3,000 tokens, cut at the limit, with 4 % of responses that run into it."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(8.0, 0.7, n).astype(np.int64) + 16, longest)
    lengths[rng.random(n) < 0.04] = longest
    return lengths


def test_cost_is_linear_plus_quadratic():
    assert sequence_cost(10, 2.0, 0.5) == 70.0
    np.testing.assert_array_equal(sequence_cost(np.array([1, 2]), 1.0, 1.0), [2.0, 6.0])


@given(lengths_lists, st.integers(1, 9), st.booleans())
def test_partition_covers_every_row_once(lengths, parts, equal_size):
    partition = balanced_partition(lengths, parts, equal_size)
    assert len(partition) == parts
    assert sorted(row for part in partition for row in part) == list(range(len(lengths)))
    if equal_size:
        sizes = [len(part) for part in partition]
        assert max(sizes) - min(sizes) <= 1
    if len(lengths) >= parts:
        assert all(partition)


@given(lengths_lists, st.integers(1, 9))
def test_partition_is_within_the_greedy_bound(lengths, parts):
    heaviest = max(sum(lengths[row] for row in part) for part in balanced_partition(lengths, parts))
    # No list schedule exceeds mean + largest item; differencing must not be worse than the worst greedy.
    assert heaviest <= sum(lengths) / parts + max(lengths) + 1e-9


@pytest.mark.parametrize("ranks", [2, 8, 32])
@pytest.mark.parametrize("equal_size", [False, True])
def test_slowest_rank_is_within_five_percent_of_the_mean(ranks, equal_size):
    for seed in range(5):
        costs = sequence_cost(long_tailed_lengths(seed=seed), linear=1.0, quadratic=1.0 / 8192)
        totals = [costs[part].sum() for part in balanced_partition(costs, ranks, equal_size)]
        assert max(totals) <= 1.05 * np.mean(totals)


def test_partition_beats_round_robin_on_a_long_tail():
    costs = sequence_cost(long_tailed_lengths(), quadratic=1.0 / 8192)
    naive = max(costs[start::8].sum() for start in range(8))
    assert max(costs[part].sum() for part in balanced_partition(costs, 8)) < naive


@pytest.mark.parametrize(("costs", "parts"), [([1.0], 0), ([-1.0], 1), ([float("nan")], 1)])
def test_bad_costs_are_refused(costs, parts):
    with pytest.raises(ValueError, match=r"num_parts|row 0"):
        balanced_partition(costs, parts)


def test_zero_costs_leave_no_rank_empty():
    assert sorted(len(part) for part in balanced_partition([0.0] * 4, 4)) == [1, 1, 1, 1]


@given(lengths_lists, st.integers(1000, 4000))
def test_packing_keeps_the_budget(lengths, budget):
    packed = pack_micro_batches(lengths, budget)
    assert sorted(row for part in packed for row in part) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in part) <= budget for part in packed)
    assert all(packed)
    # Two half-empty bins would have been one under first-fit.
    assert len(packed) <= 2 * sum(lengths) / budget + 1


def test_packing_refuses_a_sequence_above_the_budget():
    with pytest.raises(ValueError, match="sequence 1 has 11 tokens.*learner.max_tokens_per_micro_batch"):
        pack_micro_batches([5, 11], 10)


def test_packing_into_a_given_number():
    packed = pack_micro_batches([4, 4, 4, 4], 16, num_micro_batches=3)
    assert len(packed) == 3 and all(packed)
    assert [len(p) for p in pack_micro_batches([4], 16, num_micro_batches=2)] == [1, 0]
    with pytest.raises(ValueError, match="need 2 micro-batches"):
        pack_micro_batches([4, 4], 4, num_micro_batches=1)
