"""Each row's numbers are the same bits whatever rows stand beside it, and near those of torch in float64."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from numba import njit

from megatron_retool.exact import kernels, operators
from megatron_retool.learner.delta_rule import gated_delta_rule
from megatron_retool.learner.state_space import state_space

ROWS = st.integers(1, 40)
SIZES = st.integers(1, 70)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


@njit
def exponentials(x):
    return np.array([kernels.exponential(each) for each in x])


def normal(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(operator: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, expected: torch.Tensor, cut: int) -> None:
    """All rows at once, in two parts and one by one are the same bits, and near ``expected``."""
    whole = operator(x)
    assert torch.equal(whole, torch.cat([operator(x[:cut]), operator(x[cut:])]))
    assert torch.equal(whole[-1:], operator(x[-1:]))
    scale = expected.abs().max().clamp(min=1.0)
    assert (whole.double() - expected).abs().max() / scale < BOUNDS[x.dtype]


@settings(max_examples=60, deadline=None)
@given(ROWS, SIZES, SIZES, DTYPES, st.integers(0, 1000), st.booleans())
def test_linear(rows: int, size: int, columns: int, dtype: torch.dtype, seed: int, biased: bool) -> None:
    x, weight = normal((rows, size), dtype, seed), normal((columns, size), dtype, seed + 1)
    bias = normal((columns,), dtype, seed + 2) if biased else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    check(lambda x: operators.linear(x, weight, bias), x, expected, rows // 2)


@settings(max_examples=30, deadline=None)
@given(ROWS, SIZES, DTYPES, st.integers(0, 1000))
def test_norm_and_activation(rows: int, size: int, dtype: torch.dtype, seed: int) -> None:
    x, weight = normal((rows, 2 * size), dtype, seed), normal((2 * size,), dtype, seed + 1)
    wide = x.double()
    expected = torch.nn.functional.rms_norm(wide, weight.shape, weight.double(), 1e-5)
    check(lambda x: operators.rms_norm(x, weight, 1e-5), x, expected, rows // 3)
    expected = torch.nn.functional.silu(wide[:, :size]) * wide[:, size:]
    check(operators.silu_and_multiply, x, expected, rows // 2)
    expected = torch.nn.functional.gelu(wide[:, :size], approximate="tanh") * wide[:, size:]
    check(operators.gelu_and_multiply, x, expected, rows // 2)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 30), st.integers(1, 9), st.sampled_from([(4, 2), (4, 4), (6, 1)]), DTYPES, st.integers(0, 1000))
def test_attention(length: int, prefix: int, heads: tuple[int, int], dtype: torch.dtype, seed: int) -> None:
    """A text in one piece, behind other texts; token by token; and from slots of a cache in another order."""
    size, scale = 12, 0.3
    query = normal((length, heads[0], size), dtype, seed)
    key, value = (normal((length, heads[1], size), dtype, seed + each) for each in (1, 2))
    places = torch.arange(length)
    whole = operators.attention(query, key, value, places, torch.zeros(length), places + 1, scale)
    one_by_one = [
        operators.attention(query[i : i + 1], key, value, places, torch.zeros(1), torch.tensor([i + 1]), scale)
        for i in range(length)
    ]
    assert torch.equal(whole, torch.cat(one_by_one))
    order = torch.from_numpy(np.random.default_rng(seed).permutation(length + prefix))
    cache_key, cache_value = (torch.zeros(length + prefix, heads[1], size, dtype=dtype) for _ in range(2))
    slots = order[prefix:]
    cache_key[slots], cache_value[slots] = key, value
    starts = torch.full((length,), prefix)
    cached = operators.attention(query, cache_key, cache_value, order.int(), starts, places + 1, scale)
    assert torch.equal(whole, cached)
    wide = [x.double().transpose(0, 1)[None] for x in (query, key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True, scale=scale, enable_gqa=True)
    assert (whole.double() - expected[0].transpose(0, 1)).abs().max() < 4 * BOUNDS[dtype]


@settings(max_examples=30, deadline=None)
@given(ROWS, SIZES, st.integers(0, 1000))
def test_log_softmax_and_experts(rows: int, size: int, seed: int) -> None:
    logits = 5 * normal((rows, size + 1), torch.float32, seed)
    expected = logits.double().log_softmax(-1)
    check(operators.log_softmax, logits, expected, rows // 2)
    padded = torch.cat([logits, torch.full((rows, 7), -torch.inf)], 1)
    assert torch.equal(operators.log_softmax(padded)[:, : size + 1], operators.log_softmax(logits))
    check(operators.probabilities, logits, expected.exp(), rows // 2)
    assert not operators.probabilities(padded)[:, size + 1 :].any()
    count = min(4, size + 1)
    experts = operators.top_experts(logits, count)
    assert torch.equal(experts, logits.topk(count, dim=1).indices)
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, experts, True)
    for normalized in (False, True):
        among = chosen if normalized else torch.ones_like(chosen)
        expected = logits.double().masked_fill(~among, -torch.inf).softmax(-1)
        gates = operators.expert_gates(logits, experts, normalized)
        assert (gates.double() - expected * chosen).abs().max() < 1e-6


@settings(max_examples=30, deadline=None)
@given(ROWS, st.integers(0, 1000), st.sampled_from([(1, 1), (4, 2), (2, 1)]), st.sampled_from([1, 2]))
def test_experts_of_the_best_groups(rows: int, seed: int, groups: tuple[int, int], of_a_group: int) -> None:
    number, kept = groups
    logits = 4 * normal((rows, 16), torch.float32, seed)
    scores = operators.sigmoid(logits)
    assert (scores.double() - logits.double().sigmoid()).abs().max() < 1e-6
    assert torch.equal(scores[-1:], operators.sigmoid(logits[-1:]))
    experts = operators.top_experts(scores, 3, groups, of_a_group)
    worth = scores.unflatten(1, (number, -1)).topk(of_a_group, dim=-1).values.sum(-1)
    open_groups = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, worth.topk(kept, dim=1).indices, True)
    allowed = scores.masked_fill(~open_groups.repeat_interleave(16 // number, 1), -torch.inf)
    assert torch.equal(experts, allowed.topk(3, dim=1).indices)
    chosen = scores.gather(1, experts).double()
    for normalized in (False, True):
        gates = operators.expert_gates(scores, experts, normalized, "sigmoid").gather(1, experts)
        expected = chosen / chosen.sum(-1, keepdim=True) if normalized else chosen
        assert (gates.double() - expected).abs().max() < 1e-6


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 30), DTYPES, st.integers(0, 1000))
def test_attention_over_latents_is_that_over_each_heads_keys(length: int, dtype: torch.dtype, seed: int) -> None:
    heads, rank, turned, plain, width, scale = 3, 20, 8, 12, 10, 0.2
    query, own = (normal((length, heads, size), dtype, seed + i) for i, size in enumerate((plain, turned)))
    latent, shared = (normal((length, 1, size), dtype, seed + 2 + i) for i, size in enumerate((rank, turned)))
    of_keys, of_values = (normal((heads, size, rank), dtype, seed + 4 + i) / 4 for i, size in enumerate((plain, width)))

    def attended(rows: slice) -> torch.Tensor:
        read = torch.cat([operators.linear_of_heads(query[rows], of_keys.transpose(1, 2)), own[rows]], -1)
        kept, places = torch.cat([latent, shared], -1), torch.arange(length)
        counts = places[rows] + 1
        summed = operators.attention(read, kept, kept, places, torch.zeros_like(counts), counts, scale, width=rank)
        return operators.linear_of_heads(summed, of_values)

    whole = attended(slice(None))
    assert torch.equal(whole[-1:], attended(slice(length - 1, length)))
    key = torch.einsum("tgr,hkr->thk", latent.double(), of_keys.double())
    value = torch.einsum("tgr,hvr->thv", latent.double(), of_values.double())
    keys = torch.cat([key, shared.double().expand(-1, heads, -1)], -1)
    wide = [x.transpose(0, 1)[None] for x in (torch.cat([query, own], -1).double(), keys, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True, scale=scale)
    bound = 20 * BOUNDS[dtype] * expected.abs().max().clamp(min=1.0)
    assert (whole.double() - expected[0].transpose(0, 1)).abs().max() < bound


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.integers(1, 5), st.integers(1, 9), DTYPES, st.integers(0, 1000))
def test_convolution(tokens: int, width: int, features: int, dtype: torch.dtype, seed: int) -> None:
    x, weight = normal((features, tokens), dtype, seed), normal((features, width), dtype, seed + 1)
    bias = normal((features,), dtype, seed + 2) if seed % 2 else None
    known = torch.nn.functional.pad(x, (width - 1, 0))
    whole = operators.convolve(known, weight, bias)
    one_by_one = [operators.convolve(known[None, :, at : at + width], weight, bias)[0] for at in range(tokens)]
    assert torch.equal(whole, torch.cat(one_by_one, 1))
    wide_bias = None if bias is None else bias.double()
    summed = torch.nn.functional.conv1d(known.double(), weight.double()[:, None], wide_bias, groups=features)
    expected = torch.nn.functional.silu(summed)
    assert (whole.double() - expected).abs().max() / expected.abs().max().clamp(min=1.0) < BOUNDS[dtype]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.sampled_from([(1, 1), (2, 4), (3, 3)]),
    st.sampled_from([(5, 7), (16, 8), (20, 3)]),
    DTYPES,
    st.integers(0, 1000),
)
def test_delta_rule(
    lengths: list[int], heads: tuple[int, int], sizes: tuple[int, int], dtype: torch.dtype, seed: int
) -> None:
    """Texts side by side, token by token, and in slots of another order."""
    tokens, texts = sum(lengths), len(lengths)
    query, key = (normal((tokens, heads[0], sizes[0]), dtype, seed + each) for each in (0, 1))
    value = normal((tokens, heads[1], sizes[1]), dtype, seed + 2)
    steps, logits = (3 * normal((tokens, heads[1]), dtype, seed + each) for each in (3, 4))
    factors, bias = (normal((heads[1],), dtype, seed + each) for each in (5, 6))
    log_decays, betas = operators.delta_net_rates(steps, logits, factors, bias)
    softplus = torch.nn.functional.softplus((steps.float() + bias.float()).double(), threshold=100.0)
    torch.testing.assert_close(log_decays.double(), -factors.double().exp() * softplus, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(betas.double(), logits.double().sigmoid(), rtol=1e-6, atol=1e-8)
    rows = (query, key, value, log_decays, betas)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    kept = torch.zeros(texts, heads[1], sizes[1], sizes[0])
    whole = operators.delta_rule(*rows, kept, torch.arange(texts), starts)

    slots, cached = torch.arange(texts).flip(0), torch.zeros(texts + 1, *kept.shape[1:])
    for text, slot in enumerate(slots):
        for token in range(starts[text], starts[text + 1]):
            query, key, value, log_decays, betas = (each[token : token + 1] for each in rows)
            one = operators.delta_rule(query, key, value, log_decays, betas, cached, slot.view(1), torch.tensor([0, 1]))
            assert torch.equal(one, whole[token : token + 1])
    assert torch.equal(cached[slots], kept)

    wide = [each[None].double() for each in rows]
    for text in range(texts):
        own = [each[:, starts[text] : starts[text + 1]] for each in wide]
        expected = gated_delta_rule(own[0], own[1], own[2], own[3], own[4])[0]
        far = (whole[starts[text] : starts[text + 1]].double() - expected).abs().max()
        assert far / expected.abs().max().clamp(min=1.0) < BOUNDS[dtype]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.sampled_from([(1, 1), (2, 4), (1, 3)]),
    st.sampled_from([(5, 7), (16, 8), (20, 3)]),
    DTYPES,
    st.integers(0, 1000),
)
def test_state_space(
    lengths: list[int], heads: tuple[int, int], sizes: tuple[int, int], dtype: torch.dtype, seed: int
) -> None:
    """Texts side by side, token by token, and in slots of another order."""
    tokens, texts = sum(lengths), len(lengths)
    value = normal((tokens, heads[1], sizes[1]), dtype, seed)
    steps = 3 * normal((tokens, heads[1]), dtype, seed + 1)
    write, read = (normal((tokens, heads[0], sizes[0]), dtype, seed + each) for each in (2, 3))
    rates = -normal((heads[1],), torch.float32, seed + 4).exp()
    skip, bias = (normal((heads[1],), dtype, seed + each) for each in (5, 6))
    of_heads, starts = (rates, skip, bias), torch.tensor([0, *lengths]).cumsum(0)
    kept = torch.zeros(texts, heads[1], sizes[1], sizes[0])
    whole = operators.state_space(value, steps, *of_heads, write, read, kept, torch.arange(texts), starts)

    slots, cached = torch.arange(texts).flip(0), torch.zeros(texts + 1, *kept.shape[1:])
    for text, slot in enumerate(slots):
        for token in range(starts[text], starts[text + 1]):
            own, its_step, writes, reads = (each[token : token + 1] for each in (value, steps, write, read))
            memory = (cached, slot.view(1), torch.tensor([0, 1]))
            one = operators.state_space(own, its_step, *of_heads, writes, reads, *memory)
            assert torch.equal(one, whole[token : token + 1])
    assert torch.equal(cached[slots], kept)

    step = torch.nn.functional.softplus((steps.float() + bias.float()).double(), threshold=100.0)
    for text in range(texts):
        here = slice(starts[text], starts[text + 1])
        values, writes, reads = (each[None, here].double() for each in (value, write, read))
        expected = state_space(values, writes, reads, step[None, here] * rates.double(), step[None, here])[0]
        expected = expected + skip.double().unsqueeze(-1) * values[0]
        far = (whole[here].double() - expected).abs().max()
        assert far / expected.abs().max().clamp(min=1.0) < BOUNDS[dtype]


@settings(max_examples=20, deadline=None)
@given(ROWS, SIZES, DTYPES, st.integers(0, 1000))
def test_norm_of_gated(rows: int, size: int, dtype: torch.dtype, seed: int) -> None:
    x, gate = (normal((rows, size), dtype, seed + each) for each in (0, 1))
    weight, both = normal((size,), dtype, seed + 2), torch.cat([x, gate], -1)
    gated = x.double() * torch.nn.functional.silu(gate.double())
    expected = gated * (gated.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()

    def normed(pair: torch.Tensor) -> torch.Tensor:
        return operators.norm_of_gated(pair[:, :size], weight, 1e-6, pair[:, size:])

    check(normed, both, expected, rows // 2)


@settings(max_examples=20, deadline=None)
@given(ROWS, SIZES, DTYPES, st.integers(0, 1000))
def test_gates(rows: int, size: int, dtype: torch.dtype, seed: int) -> None:
    x, gate = (normal((rows, size), dtype, seed + each) for each in (0, 1))
    weight, wide = normal((size,), dtype, seed + 2), gate.double()
    both = torch.stack([x, gate], 1)
    expected = torch.nn.functional.rms_norm(x.double(), weight.shape, weight.double(), 1e-5) * wide * wide.sigmoid()
    check(lambda x: operators.gated_rms_norm(x[:, 0], weight, 1e-5, x[:, 1]), both, expected, rows // 2)
    check(lambda x: operators.multiply_by_sigmoid(x[:, 0], x[:, 1]), both, x.double() * wide.sigmoid(), rows // 2)


def test_equal_logits_take_the_first_experts() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    assert operators.top_experts(logits, 2).tolist() == [[1, 2]]


def test_the_rotation_is_torchs() -> None:
    x = normal((9, 4, 16), torch.float32, 0)
    cos, sin = (table[3:12] for table in operators.rotary_table([1e4 ** -(i / 6) for i in range(6)], 40))
    found = operators.rotate(x, cos, sin)
    first, second = x[..., :6], x[..., 6:12]
    wide_cos, wide_sin = cos[:, None], sin[:, None]
    expected = torch.cat([first * wide_cos - second * wide_sin, second * wide_cos + first * wide_sin, x[..., 12:]], -1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("start", [-87.5, -30.0, -1.0])
def test_the_exponential_is_right_to_a_unit_in_the_last_place(start: float) -> None:
    x = np.linspace(start, min(0.0, start + 30), 100_001).astype(np.float32)
    found = exponentials(x)
    expected = np.exp(x.astype(np.float64))
    assert np.abs(found / expected - 1)[x >= -87.0].max() < 2**-23
    assert not found[x < -87.0].any()
