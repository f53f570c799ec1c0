"""Two sides' log-probs of a text: what counts as another model, and where it is said to lie."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_retool.algorithms.log_prob_comparison import LogProbComparison

TOKENS, VOCABULARY, BOUND = 512, 1000, 0.1
rng = np.random.default_rng(5)
IDS = rng.permutation(np.linspace(0, VOCABULARY - 1, TOKENS).astype(int))
LEARNER = -rng.gamma(4.0, 1.0, TOKENS - 1)
"""Spread 1.6 nats."""
NOISE = rng.normal(0.0, 0.02, TOKENS - 1)


def compared(difference: np.ndarray) -> LogProbComparison:
    return LogProbComparison(IDS, LEARNER + difference, LEARNER)


def test_the_figures() -> None:
    found = LogProbComparison([5, 6, 7], [-1.0, -2.5], [-1.0, -3.0])
    assert (found.mean, found.max, found.spread, found.relative) == (0.25, 0.5, 1.0, 0.25)
    assert found.k3 == pytest.approx((np.exp(-0.5) - 1 + 0.5) / 2)
    with pytest.raises(ValueError, match="do not line up"):
        LogProbComparison([5, 6], [-1.0, -2.0], [-1.0, -2.0])


def test_rounding_and_experts_chosen_otherwise_are_the_same_model() -> None:
    assert not compared(NOISE * 0).differs(BOUND)
    assert not compared(NOISE).differs(BOUND)
    flips = NOISE + np.where(rng.random(TOKENS - 1) < 0.1, rng.normal(0, 0.6, TOKENS - 1), 0)
    assert compared(flips).max > 1 and not compared(flips).differs(BOUND)


def test_the_scale_of_the_log_probs_does_not_matter() -> None:
    """An untrained model's log-probs lie close together, and a wrong tensor moves them little."""
    other = rng.permutation(LEARNER)
    for scale in (0.05, 1.0, 4.0):
        found = LogProbComparison(IDS, scale * other, scale * LEARNER)
        assert found.differs(0.4) and 1.2 < found.relative < 1.6
        assert "All of the text" in found.diagnosis(BOUND) and "tie_word_embeddings" in found.diagnosis(BOUND)


@pytest.mark.parametrize("kind", ["output id", "input id"])
def test_a_range_of_the_vocabulary_is_found_though_the_mean_is_small(kind: str) -> None:
    values = IDS[1:] if kind == "output id" else IDS[:-1]
    found = compared(NOISE + np.where(values >= 880, -0.5, 0))
    assert found.relative < BOUND and found.differs(BOUND)
    place = found.place()
    assert place is not None and place.kind == kind and 870 <= place.first <= 885 and place.last >= 995
    words = "output layer" if kind == "output id" else "embedding"
    assert f"rows of the {words}" in found.diagnosis(BOUND) and "vocab_size" in found.diagnosis(BOUND)


def test_a_difference_that_grows_with_the_position_names_rope() -> None:
    positions = np.arange(1, TOKENS)
    wave = rng.normal(0, 1, TOKENS - 1)
    found = compared(NOISE + wave * np.minimum(positions / 200, 1.0))
    assert found.differs(BOUND)
    place = found.place()
    assert place is not None and place.kind == "position" and 20 < place.first < 200
    assert f"from about {place.first} on" in found.diagnosis(BOUND) and "rope_theta" in found.diagnosis(BOUND)


def test_the_end_of_the_text_alone_counts() -> None:
    found = compared(NOISE + np.where(np.arange(1, TOKENS) > 448, 0.4, 0))
    assert found.relative < BOUND and found.differs(BOUND)
    place = found.place()
    assert place is None or place.kind == "position"


@pytest.mark.parametrize("side", ["engine", "learner"])
def test_no_numbers_differ_from_everything(side: str) -> None:
    broken = LEARNER.copy()
    broken[100] = np.nan
    found = LogProbComparison(IDS, *((broken, LEARNER) if side == "engine" else (LEARNER, broken)))
    assert found.differs(np.inf)
    assert f"1 of 511 log-probs of the {side} are no numbers, the first at position 101" in found.diagnosis(BOUND)


def test_a_short_text_is_compared_too() -> None:
    assert LogProbComparison([1, 2], [-3.0], [-1.0]).differs(BOUND)
    assert not LogProbComparison([1, 2], [-1.0], [-1.0]).differs(BOUND)
