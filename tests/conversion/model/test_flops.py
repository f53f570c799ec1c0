"""FLOP counts against known published sizes; tests/parity holds them against what torch counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from conversion.model import flops
from conversion.model.architecture import Architecture
from conversion.model.attention_config import MambaSizes
from tests.conversion.model.test_layout import EXPERTS, LINEAR, SPARSE

QWEN25_7B = Architecture(
    family="qwen2",
    num_layers=28,
    hidden_size=3584,
    num_attention_heads=28,
    num_query_groups=4,
    head_dim=128,
    ffn_hidden_size=18944,
    vocab_size=152064,
)


def test_a_token_costs_about_six_flops_a_parameter() -> None:
    per_token = flops.training_flops(QWEN25_7B, [1])
    assert per_token == pytest.approx(6 * 7.07e9, rel=0.01)  # 7.6 B parameters less the embedding


def test_attention_grows_quadratically_and_windows_bound_it() -> None:
    short, long = (flops.forward_flops(QWEN25_7B, [n]) / n for n in (1000, 32000))
    assert long > 1.3 * short
    windowed = replace(QWEN25_7B, sliding_window=1000)
    assert flops.forward_flops(windowed, [32000]) / 32000 < 1.02 * short * 1.02
    assert flops.forward_flops(windowed, [1000]) == flops.forward_flops(QWEN25_7B, [1000])
    layers = tuple(number % 4 != 3 for number in range(QWEN25_7B.num_layers))
    mixed = replace(windowed, windowed_layers=layers)
    expected = 0.75 * flops.forward_flops(windowed, [32000]) + 0.25 * flops.forward_flops(QWEN25_7B, [32000])
    assert flops.forward_flops(mixed, [32000]) == pytest.approx(expected)


def test_only_chosen_experts_and_head_tokens_count() -> None:
    everyone = replace(EXPERTS, num_experts_per_tok=8)
    assert flops.token_flops(everyone) - flops.token_flops(EXPERTS) == 6 * (2 * 3 * 64 * 12)
    difference = flops.forward_flops(EXPERTS, [100]) - flops.forward_flops(EXPERTS, [100], head_tokens=40)
    assert difference == 60 * 2 * EXPERTS.hidden_size * EXPERTS.vocab_size


def test_dense_layers_among_experts_count_as_dense() -> None:
    mixed = replace(EXPERTS, dense_layers=(0, 5))
    dense = replace(EXPERTS, num_experts=None)
    expected = (6 * flops.forward_flops(EXPERTS, [100], 0) + 2 * flops.forward_flops(dense, [100], 0)) / 8
    assert flops.forward_flops(mixed, [100], 0) == pytest.approx(expected)


def test_gated_delta_nets_have_a_state_in_place_of_pairs() -> None:
    """Of 6 layers of 8; by hand: projections, a convolution over 4 tokens, and 6 d_k d_v a value head."""
    gated = replace(LINEAR, linear_layers=(), delta_net=None)
    assert flops.pair_flops(LINEAR) == flops.pair_flops(gated) / 4
    projected = 64 * (4 * 8 + 4 * 8 + 8 * 12 + 8 * 12 + 2 * 8) + 8 * 12 * 64
    delta = 2 * projected + 2 * 4 * (4 * 8 + 4 * 8 + 8 * 12) + 6 * 8 * (8 * 12)
    attention = 2 * 64 * (2 * 64 + 2 * 32 + 64)
    assert flops.token_flops(LINEAR) - flops.token_flops(gated) == pytest.approx(0.75 * (delta - attention))
    per_token = [flops.forward_flops(LINEAR, [n], 0) / n for n in (1, 1000)]
    assert per_token[1] - per_token[0] == pytest.approx(8 * flops.pair_flops(LINEAR) * 999 / 2)


def test_mamba_has_a_state_in_place_of_pairs() -> None:
    """By hand: projections, a convolution over 4 tokens, and 4 d_state d_v a head."""
    sizes = MambaSizes(heads=8, head_dim=16, groups=2, state_dim=12, kernel=4)
    mamba = replace(LINEAR, delta_net=None, mamba=sizes)
    gated = replace(LINEAR, linear_layers=(), delta_net=None)
    projected = 64 * (128 + 128 + 2 * 24 + 8) + 128 * 64
    own = 2 * projected + 2 * 4 * (128 + 2 * 24) + 4 * 8 * (16 * 12)
    attention = 2 * 64 * (2 * 64 + 2 * 32 + 64)
    assert flops.token_flops(mamba) - flops.token_flops(gated) == pytest.approx(0.75 * (own - attention))
    assert flops.pair_flops(mamba) == flops.pair_flops(gated) / 4


def test_sparse_attention_has_so_many_pairs_and_its_indexers_all() -> None:
    """Of 8 layers 5 have an indexer, of 4 heads with 8 features; each query sees 16 keys."""
    assert SPARSE.indexer is not None
    dense = replace(SPARSE, indexer=None, shared_choices=())
    scores = 5 * 2 * (4 * 8 + 4)  # FLOPs of a pair
    matrices = 5 * 2 * (0 * 4 * 8 + 64 * (8 + 4))  # of a token; the queries of these have no latent
    assert flops.index_pair_flops(SPARSE) == scores / 8
    few, many = 16, 1000
    below = flops.forward_flops(SPARSE, [few]) - flops.forward_flops(dense, [few])
    assert below == pytest.approx(few * matrices + scores * few * (few + 1) / 2)
    seen = 16 * 17 / 2 + (many - 16) * 16
    pairs = many * (many + 1) / 2
    more = many * matrices + scores * pairs - 8 * flops.pair_flops(dense) * (pairs - seen)
    assert flops.forward_flops(SPARSE, [many]) == pytest.approx(flops.forward_flops(dense, [many]) + more)
    masked = flops.forward_flops(SPARSE, [many], masked=True)
    assert masked == pytest.approx(flops.forward_flops(dense, [many]) + many * matrices + scores * pairs)
    cost = many + flops.quadratic_cost(SPARSE) * many**2
    other = 100 + flops.quadratic_cost(SPARSE) * 100**2
    exact = [flops.forward_flops(SPARSE, [n], 0, masked=True) for n in (many, 100)]
    assert cost / other == pytest.approx(exact[0] / exact[1], rel=0.01)


def test_the_cost_of_a_sequence_is_its_flops() -> None:
    lengths = np.array([100, 5000, 16000])
    cost = lengths + flops.quadratic_cost(QWEN25_7B) * lengths.astype(float) ** 2
    exact = np.array([flops.forward_flops(QWEN25_7B, [n], head_tokens=0) for n in lengths])
    np.testing.assert_allclose(cost / cost[0], exact / exact[0], rtol=1e-3)


def test_peaks() -> None:
    assert flops.peak_flops("NVIDIA H200") == flops.peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert flops.peak_flops("NVIDIA L40S") == 362e12
    assert flops.peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert flops.peak_flops("NVIDIA GeForce RTX 4090") == 165e12
    assert flops.peak_flops("NVIDIA GB200") == 2.5e15
    assert flops.peak_flops(None) is None
    assert flops.peak_flops("Some CPU") is None


@pytest.mark.parametrize(
    "name", ["NVIDIA L400", "NVIDIA GH200 480GB", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H1000"]
)
def test_a_device_whose_name_only_begins_or_ends_like_another_is_not_that_one(name):
    assert flops.device_kind(name) is None
