"""verl's statistics of the importance ratio, by hand-computed values."""

import math

import pytest
import torch

from megatron_retool.algorithms.importance_metrics import importance_metrics
from megatron_retool.algorithms.rollout_correction import rollout_correction
from megatron_retool.algorithms.settings import RolloutCorrectionSettings

# Two responses and an empty one between them: ratios 4 and 1, and 0.25.
LOG_RATIO = torch.tensor([math.log(4.0), 0.0, math.log(0.25)])
OWNERS = torch.tensor([0, 0, 2])


def test_of_tokens():
    metrics = importance_metrics(LOG_RATIO, OWNERS, 3, 2.0, of_responses=False)
    expected = {
        "mean": 5.25 / 3, "max": 4.0, "min": 0.25, "ratio_fraction_high": 1 / 3, "ratio_fraction_low": 1 / 3,
        # Clamped into [1/2, 2]: 2, 1, 1/2.
        "std": math.sqrt(5.25 / 3 - (3.5 / 3) ** 2), "eff_sample_size": (3.5 / 3) ** 2 / (5.25 / 3),
        "seq_mean": (2.5 + 0.25) / 2, "seq_max": 2.5, "seq_min": 0.25, "seq_std": 2.25 / math.sqrt(2),
        "seq_max_deviation": 1.5, "seq_fraction_high": 0.5, "seq_fraction_low": 0.5,
    }  # fmt: skip
    assert metrics == {f"rollout_is_{name}": pytest.approx(value) for name, value in expected.items()}


def test_of_responses():
    log_ratio = torch.tensor([math.log(4.0), math.log(4.0), math.log(0.25)])
    metrics = importance_metrics(log_ratio, OWNERS, 3, 4.5, of_responses=True)
    assert metrics["rollout_is_mean"] == pytest.approx(8.25 / 3)
    assert metrics["rollout_is_ratio_fraction_high"] == 0.0 and metrics["rollout_is_ratio_fraction_low"] == 0.0
    metrics = importance_metrics(log_ratio, OWNERS, 3, 3.0, of_responses=True)
    assert (metrics["rollout_is_ratio_fraction_high"], metrics["rollout_is_ratio_fraction_low"]) == (0.5, 0.5)


def corrected(**settings):
    train = torch.tensor([-1.0, -1.0, -1.0, -30.0])
    rollout = torch.tensor([-1.0 - math.log(3.0), -1.0, -1.0, -1.0])
    return rollout_correction(
        train, rollout, torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 1, 1]), 2, torch.zeros(4,
            dtype=torch.long),
        RolloutCorrectionSettings(**settings),
    ).metrics  # fmt: skip


def test_what_rejection_and_veto_do():
    metrics = corrected(rejection=["token_ratio 0.5 2"], veto_threshold=1e-4)
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(3.0)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.5
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 1.0
    assert metrics["rollout_corr/rollout_is_veto_fraction"] == 0.5
    assert metrics["rollout_corr/rollout_is_catastrophic_token_fraction"] == 0.25


def test_what_is_off_is_not_logged():
    metrics = corrected(mode="none", rejection=[], veto_threshold=None)
    assert not [name for name in metrics if "rollout_is" in name or "rollout_rs" in name]


def test_the_factor_of_batch_normalisation():
    metrics = corrected(rejection=[], veto_threshold=None, batch_normalize=True)
    weights = [2.0, 1.0, 1.0, math.exp(-20.0)]
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(sum(weights) / 4)
