"""Direct preference optimization against its formula in torch, gradients too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_retool.algorithms.preferences import dpo_loss

LOG_PROBS = st.lists(st.tuples(*[st.floats(-400, 0)] * 4), min_size=1, max_size=6)


@given(LOG_PROBS, st.floats(0.01, 2.0), st.floats(0.0, 0.49))
def test_loss_and_gradient_are_those_of_the_formula(rows: list[tuple[float, ...]], beta: float, smoothing: float):
    values = np.array(rows)
    found = dpo_loss(values[:, :2], values[:, 2:], beta=beta, label_smoothing=smoothing)
    log_probs = torch.tensor(values[:, :2], requires_grad=True)
    ratios = log_probs - torch.tensor(values[:, 2:])
    margin = beta * (ratios[:, 0] - ratios[:, 1])
    log_sigmoid = torch.nn.functional.logsigmoid
    loss = (-(1 - smoothing) * log_sigmoid(margin) - smoothing * log_sigmoid(-margin)).mean()
    loss.backward()
    assert found.loss == pytest.approx(loss.item(), rel=1e-12, abs=1e-12)
    np.testing.assert_allclose(-found.log_prob_weights, log_probs.grad.numpy(), rtol=1e-10, atol=1e-14)


def test_metrics_of_pairs():
    found = dpo_loss(np.array([[-1.0, -3.0], [-4.0, -2.0]]), np.full((2, 2), -2.0), beta=0.5)
    assert found.metrics == {
        "dpo_accuracy": 0.5,
        "dpo_margin": 0.0,
        "dpo_chosen_reward": pytest.approx(-0.25),
        "dpo_rejected_reward": pytest.approx(-0.25),
    }
