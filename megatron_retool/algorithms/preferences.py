"""Direct preference optimization: what a pair of responses says about the weight of each of their log-probs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PreferenceLoss:
    """The loss of a batch of pairs, and its gradient by the responses' log-probs.

    Attributes:
        loss: mean over the pairs.
        log_prob_weights: float64 [pairs, 2], of the chosen and the rejected response: -d loss / d log pi. A loss of
            -sum(weight * log pi) has the same gradient.
        metrics: accuracy (pairs whose chosen response has the larger reward), margin and the rewards
            beta * log(pi / reference), means over the pairs.
    """

    loss: float
    log_prob_weights: Float64Array
    metrics: dict[str, float]


def dpo_loss(
    log_probs: Float64Array, ref_log_probs: Float64Array, *, beta: float, label_smoothing: float = 0.0
) -> PreferenceLoss:
    """Direct preference optimization (Rafailov et al. 2023, equation 7), with label smoothing (Mitchell 2023).

    -(1 - e) log sigmoid(m) - e log sigmoid(-m) with m = beta * (log-ratio of the chosen - log-ratio of the rejected),
    where a log-ratio is log pi - log of the reference of a whole response.

    Args:
        log_probs, ref_log_probs: float64 [pairs, 2]: sums over the chosen and over the rejected response's tokens.
        beta: how far the policy may move from the reference: smaller is farther.
        label_smoothing: share e of pairs that are taken to be labelled the wrong way round, below 0.5.
    """
    rewards = beta * (log_probs - ref_log_probs)
    margin = rewards[:, 0] - rewards[:, 1]
    losses = (1 - label_smoothing) * np.logaddexp(0.0, -margin) + label_smoothing * np.logaddexp(0.0, margin)
    # sigmoid(x) = exp(-log(1 + exp(-x))), without overflow.
    wrong, right = np.exp(-np.logaddexp(0.0, margin)), np.exp(-np.logaddexp(0.0, -margin))
    slope = beta * ((1 - label_smoothing) * wrong - label_smoothing * right) / len(margin)
    return PreferenceLoss(
        float(losses.mean()),
        np.stack([slope, -slope], axis=1),
        {
            "dpo_accuracy": float((margin > 0).mean()),
            "dpo_margin": float(margin.mean()),
            "dpo_chosen_reward": float(rewards[:, 0].mean()),
            "dpo_rejected_reward": float(rewards[:, 1].mean()),
        },
    )
