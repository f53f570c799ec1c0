from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_retool.config import ConfigError, load_config
from megatron_retool.planning.workload import LengthDistribution, ToolLatency, workload_of


@given(limit=st.integers(64, 200_000), sigma=st.floats(0.05, 3.0), clip=st.floats(1e-4, 0.2))
@settings(max_examples=40, deadline=None)
def test_a_fit_finds_the_distribution_that_has_the_two_figures(limit: int, sigma: float, clip: float) -> None:
    z = NormalDist().inv_cdf(1 - clip)
    true = LengthDistribution(math.log(limit) - z * sigma, sigma, limit)
    found = LengthDistribution.fit(true.mean, clip, limit)
    assert found.sigma == pytest.approx(sigma, rel=1e-4)
    assert found.mean == pytest.approx(true.mean, rel=1e-6)
    assert found.clip_ratio == pytest.approx(clip, rel=1e-6)
    assert found.mean**2 <= found.mean_square * (1 + 1e-9) <= limit * found.mean * (1 + 1e-6)


def test_quantiles_and_samples_follow_the_distribution() -> None:
    lengths = LengthDistribution.fit(2707, 0.0085, 16384)
    quantiles = lengths.quantiles(8192)
    assert quantiles.mean() == pytest.approx(2707, rel=1e-3)
    assert (quantiles**2).mean() == pytest.approx(lengths.mean_square, rel=1e-3)
    assert (quantiles == 16384).mean() == pytest.approx(0.0085, abs=1 / 8192)
    assert (np.diff(quantiles) >= 0).all()
    sample = lengths.sample(np.random.default_rng(0), 4000, 16)
    assert sample.shape == (4000, 16)
    assert sample.mean() == pytest.approx(2707, rel=0.03)
    assert sample.min() >= 1 and sample.max() == 16384


def test_responses_of_a_group_are_correlated() -> None:
    def within(correlation: float, kind: str) -> float:
        lengths = LengthDistribution.fit(2707, 0.0085, 16384, correlation)
        logs = np.log(getattr(lengths, kind)(np.random.default_rng(0), 4000, 16))
        return float(np.corrcoef(logs[:, 0], logs[:, 1])[0, 1])

    for kind in ("sample", "expected"):
        assert within(0.0, kind) == pytest.approx(0.0, abs=0.05)
        assert within(0.5, kind) == pytest.approx(0.5, abs=0.05)


def test_expected_lengths_are_the_quantiles() -> None:
    lengths = LengthDistribution.fit(2707, 0.0085, 16384)
    dealt = lengths.expected(np.random.default_rng(0), 32, 16)
    assert dealt.shape == (32, 16)
    assert np.sort(dealt, axis=None).tolist() == lengths.quantiles(512).tolist()


@pytest.mark.parametrize(
    ("mean", "clip", "message"),
    [
        (1000, 0.1, "impossible"),
        (20000, 0.01, "impossible"),
        (5000, 0.0, "clip ratio"),
        (5000, 0.7, "clip ratio"),
        (1900, 0.1, "no log-normal tail"),
    ],
)
def test_figures_that_contradict_one_another_are_refused(mean: float, clip: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LengthDistribution.fit(mean, clip, 16384)


def test_tool_latencies_have_their_mean_and_their_limit() -> None:
    sample = ToolLatency(0.3, 0.5, 30.0).sample(np.random.default_rng(0), 100_000)
    assert np.median(sample) == pytest.approx(0.3, rel=0.02)
    assert sample.mean() == pytest.approx(0.5, rel=0.03)
    assert ToolLatency(0.3, 0.5, 1.0).sample(np.random.default_rng(0), 1000).max() == 1.0


def test_a_configuration_without_measurements_gets_the_published_shape() -> None:
    config = load_config("configs/retool_qwen2.5_32b_8xh200.yaml")
    workload = workload_of(config)
    assert (workload.groups, workload.group_size, workload.responses) == (32, 16, 512)
    assert workload.lengths.mean == pytest.approx(2707)
    assert workload.tool_latency.limit == config.tools.code_interpreter.run_timeout_seconds
    # Long responses are in flight for longer.
    assert workload.expected_context > 332 + 2707 / 2
    twice = workload.scaled(2)
    assert (twice.groups, twice.mini_batch_size, twice.lengths) == (64, 128, workload.lengths)
    measured = workload_of(config, response_mean=1000, clip_ratio=0.001, tool_calls=1.5, kept_groups=0.5)
    assert (measured.lengths.mean, measured.tool_calls, measured.kept_groups) == (pytest.approx(1000), 1.5, 0.5)
    with pytest.raises(ConfigError, match="kept groups"):
        workload_of(config, kept_groups=0.0)
