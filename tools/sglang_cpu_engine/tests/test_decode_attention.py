"""The CPU engine's attention of new tokens, against torch's on the same keys and values side by side."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_cpu_engine.decode_attention import attend


def drawn(heads: int, kv_heads: int, size: int, value_size: int, lengths: list[int]) -> tuple[torch.Tensor, ...]:
    """query, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens: slots and rows in no order."""
    draw = torch.Generator().manual_seed(0)
    slots, longest = 1 + torch.randperm(600, generator=draw), max(lengths)
    table = torch.zeros(12, longest + 5, dtype=torch.int32)
    rows = torch.randperm(12, generator=draw)[: len(lengths)]
    for row, length, own in zip(rows, lengths, slots[: sum(lengths)].split(lengths), strict=True):
        table[row, :length] = own.int()
    query = torch.randn(len(lengths), heads, size, generator=draw)
    keys, values = (torch.randn(601, kv_heads, each, generator=draw) for each in (size, value_size))
    return query, keys, values, table, rows, torch.tensor(lengths)


@pytest.mark.parametrize(("heads", "kv_heads", "size", "value_size"), [(4, 2, 32, 32), (3, 3, 20, 12), (8, 1, 7, 7)])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_same_as_torch(heads: int, kv_heads: int, size: int, value_size: int, scaling: Any) -> None:
    lengths = [1, 2, 37, 64, 200, 5]
    operands = drawn(heads, kv_heads, size, value_size, lengths)
    query, keys, values, table, rows, _ = operands
    output = attend(*operands, scaling)
    assert output.shape == (len(lengths), heads, value_size)
    for request, length in enumerate(lengths):
        slots = table[rows[request], :length].long()
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[request, :, None], keys[slots].transpose(0, 1), values[slots].transpose(0, 1),
            scale=scaling, enable_gqa=True,
        )  # fmt: skip
        torch.testing.assert_close(output[request], expected[:, 0], rtol=1e-5, atol=1e-6)


def test_large_scores_and_a_query_that_does_not_lie_in_one_piece() -> None:
    query, *others = drawn(4, 2, 32, 32, [50, 9])
    fused = torch.cat([1e4 * query, query], dim=-1)
    output = attend(fused[..., :32], *others, None)
    assert torch.equal(output, attend(1e4 * query, *others, None)) and output.isfinite().all()


def test_a_request_has_the_same_bits_whatever_runs_beside_it() -> None:
    query, keys, values, table, rows, lengths = drawn(4, 2, 32, 32, [30, 170, 4])
    whole = attend(query, keys, values, table, rows, lengths, None)
    alone = attend(query[1:2], keys, values, table, rows[1:2], lengths[1:2], None)
    assert torch.equal(whole[1:2], alone)


def test_numbers_that_are_none_are_not_hidden() -> None:
    query, *others = drawn(4, 2, 32, 32, [50, 9])
    query[1, 2, 3] = torch.nan
    output = attend(query, *others, None)
    assert output[1, 2].isnan().all() and output[0].isfinite().all()
