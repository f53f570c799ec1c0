"""Exact enumeration on small vocabularies."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_retool.algorithms.sampling import is_unfiltered, kept_in_order, kept_of_probabilities, kept_tokens
from megatron_retool.algorithms.settings import MAX_SUPPORT
from megatron_retool.config import SamplingConfig
from tests.algorithms.sampled_distribution import sampling_log_probs

# p = .5, .2, .2, .06, .04 in token order 1, 0, 3, 4, 2.
PROBABILITIES = torch.tensor([0.2, 0.5, 0.04, 0.2, 0.06], dtype=torch.float64)


def kept(**settings):
    return torch.nonzero(kept_tokens(PROBABILITIES.log(), SamplingConfig(**settings))).squeeze(1).tolist()


def test_each_filter_by_hand():
    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_k=2) == [0, 1]
    assert kept(top_k=1) == [1]
    assert kept(top_p=0.6) == [0, 1]
    assert kept(top_p=0.8) == [0, 1, 3]
    assert kept(top_p=0.0) == [1]
    assert kept(min_p=0.3) == [0, 1, 3]
    assert kept(top_k=4, top_p=0.95, min_p=0.1) == [0, 1, 3, 4]
    assert kept(temperature=0.25, min_p=0.03) == [1]


@given(
    st.lists(st.floats(-4, 4), min_size=2, max_size=9),
    st.floats(0.2, 3.0),
    st.floats(0.05, 1.0),
    st.integers(-1, 6),
    st.sampled_from([0.0, 0.05, 0.4]),
)
def test_distribution_by_enumeration(logits, temperature, top_p, top_k, min_p):
    """mu sums to 1, is proportional to the tempered softmax on what is kept, and corrects expectations exactly."""
    z = torch.tensor(logits, dtype=torch.float64)
    config = SamplingConfig(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    mu, p, keep = sampling_log_probs(z, config).exp(), (z / temperature).softmax(0), kept_tokens(z, config)
    assert mu.sum().item() == pytest.approx(1.0)
    assert torch.equal(mu > 0, keep)

    # The engine's filters, one token at a time.
    order = sorted(range(len(logits)), key=lambda i: (-p[i].item(), i))
    for rank, token in enumerate(order):
        before = sum(p[t].item() for t in order[:rank])
        inside = rank == 0 or (
            (top_k < 1 or rank < top_k) and (top_p >= 1 or before <= top_p) and p[token] >= min_p * p[order[0]]
        )
        if abs(before - top_p) > 1e-9:
            assert bool(keep[token]) == bool(inside)

    f = torch.arange(len(logits), dtype=torch.float64)
    log_mu = p.log() - (p * keep).sum().log()
    torch.testing.assert_close(log_mu[keep], sampling_log_probs(z, config)[keep])
    ratio = torch.where(keep, (p.log() - log_mu).exp(), 0.0)
    torch.testing.assert_close((mu * ratio * f).sum(), (p * keep * f).sum())


def test_frequencies_of_an_engines_sampler_match():
    """The reference procedure of serving engines: zero what is filtered in the sorted softmax, then draw."""
    config = SamplingConfig(temperature=0.7, top_p=0.9, top_k=4, min_p=0.05)
    z = PROBABILITIES.log()
    ordered, tokens = (z / 0.7).softmax(0).sort(descending=True)
    weights = ordered.clone()
    weights[4:] = 0
    weights[ordered.cumsum(0) - ordered > 0.9] = 0
    weights[weights < 0.05 * weights[0]] = 0
    draws = torch.multinomial(weights, 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    frequencies = torch.bincount(tokens[draws], minlength=5) / 200_000
    torch.testing.assert_close(frequencies.double(), sampling_log_probs(z, config).exp(), atol=5e-3, rtol=0)


@given(st.integers(0, 1000), st.floats(0.05, 0.99))
def test_mass_is_the_same_in_any_order_of_addition(seed, top_p):
    """float32 and float64 keep the same tokens, and so does a row by itself or with more tokens behind it."""
    z = 3 * torch.randn(4, 300, generator=torch.Generator().manual_seed(seed))
    probabilities, config = z.softmax(-1), SamplingConfig(top_p=top_p)
    kept = kept_of_probabilities(probabilities, config)
    assert torch.equal(kept, kept_of_probabilities(probabilities.double(), config))
    assert torch.equal(kept[2], kept_of_probabilities(probabilities[2], config))
    padded = torch.nn.functional.pad(probabilities, (0, 21))
    assert torch.equal(kept, kept_of_probabilities(padded, config)[:, :300])


def test_rows_with_filters_of_their_own():
    ordered = PROBABILITIES.sort(descending=True).values.expand(4, -1)
    top_k, top_p, min_p = (
        torch.tensor(column)[:, None] for column in ([2, 5, 5, 5], [1.0, 0.6, 1.0, 1.0], [0.0, 0.0, 0.3, 0.0])
    )
    assert kept_in_order(ordered, top_k, top_p, min_p).sum(-1).tolist() == [2, 2, 3, 5]


@pytest.mark.parametrize("filters", [{"top_p": 0.9999}, {"min_p": 1e-6}, {"top_k": 4500}])
def test_filters_leave_no_more_than_engines_list(filters):
    logits = torch.linspace(0, 0.1, 5000)
    kept = kept_tokens(logits, SamplingConfig(**filters))
    assert not kept[: 5000 - MAX_SUPPORT].any() and kept[5000 - MAX_SUPPORT :].all()


def test_without_filters_everything_is_kept():
    z = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    config = SamplingConfig(temperature=0.6)
    assert is_unfiltered(config) and not is_unfiltered(SamplingConfig(top_p=0.99))
    assert bool(kept_tokens(z, config).all())


def test_greedy_decoding_has_no_ratio():
    with pytest.raises(ValueError, match="temperature=0"):
        kept_tokens(torch.zeros(3), SamplingConfig(temperature=0.0))
