import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_retool.algorithms.ragged import (
    contiguous_ids,
    discounted_sum_to_go,
    last_token,
    require_matching_shapes,
    sequence_max,
    sequence_sum,
)

lengths_lists = st.lists(st.integers(0, 40), min_size=1, max_size=8)


@given(lengths_lists, st.sampled_from([0.0, 0.3, 0.95, 1.0]))
def test_sum_to_go_equals_the_loop(lengths, discount):
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    values = torch.randn(len(ids), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.zeros_like(values)
    for t in reversed(range(len(ids))):
        following = expected[t + 1] if t + 1 < len(ids) and ids[t + 1] == ids[t] else 0.0
        expected[t] = values[t] + discount * following
    torch.testing.assert_close(discounted_sum_to_go(values, ids, discount), expected)


def test_sum_to_go_leaves_its_input_alone():
    values = torch.ones(3, dtype=torch.float64)
    discounted_sum_to_go(values, torch.zeros(3, dtype=torch.int64), 1.0)
    assert values.tolist() == [1.0, 1.0, 1.0]


def test_sum_does_not_lose_small_terms():
    # 2**24 + 1 is the first integer that float32 cannot hold.
    values = torch.cat([torch.tensor([2.0**24]), torch.ones(100)])
    assert sequence_sum(values, torch.zeros(101, dtype=torch.int64), 1).item() == 2**24 + 100


def test_reductions_accept_tokens_in_any_order_and_empty_sequences():
    ids, values = torch.tensor([3, 1, 3]), torch.tensor([1.0, 2.0, 4.0])
    assert sequence_sum(values, ids, 4).tolist() == [0.0, 2.0, 0.0, 5.0]
    assert sequence_max(values, ids, 4).tolist() == [float("-inf"), 2.0, float("-inf"), 4.0]


def test_last_token_and_renumbering():
    assert last_token(torch.tensor([5, 5, 2, 7, 7])).tolist() == [False, True, True, False, True]
    ids, count = contiguous_ids(torch.tensor([40, -3, 40, 7]))
    assert (ids.tolist(), count) == ([2, 0, 2, 1], 3)


def test_unequal_columns_are_named():
    with pytest.raises(ValueError, match=r"first \(2,\), second \(3,\)"):
        require_matching_shapes(first=torch.zeros(2), second=torch.zeros(3), third=None)
