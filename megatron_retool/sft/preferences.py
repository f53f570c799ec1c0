"""Direct preference optimization with the learner's own log-probs and update, so in every layout that these have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megatron_retool.algorithms.preferences import Float64Array, PreferenceLoss, dpo_loss
from megatron_retool.config import SFTStage
from megatron_retool.trajectory import TrajectoryBatch

if TYPE_CHECKING:
    from megatron_retool.learner.learner import Learner
    from megatron_retool.learner.reading import LogProbs


def preference_loss(learner: Learner, pairs: TrajectoryBatch, stage: SFTStage) -> PreferenceLoss:
    """The loss of a batch whose rows are chosen, rejected, chosen, ...

    Args:
        learner: with a reference policy.
    """

    def of_pairs(found: LogProbs) -> Float64Array:
        weights = found["log_probs"] * pairs.loss_mask
        return np.bincount(pairs.sequence_ids, weights, len(pairs)).astype(np.float64).reshape(-1, 2)

    policy, reference = of_pairs(learner.log_probs(pairs)), of_pairs(learner.log_probs(pairs, reference=True))
    return dpo_loss(policy, reference, beta=stage.beta, label_smoothing=stage.label_smoothing)


def preference_update(learner: Learner, pairs: TrajectoryBatch, stage: SFTStage) -> dict[str, float]:
    """One optimizer step on ``preference_loss``.

    The gradient of the loss by each response's log-prob is a number. ``sft_update`` with these numbers as the weights
    of its tokens has the same gradient by the parameters, at the cost of one more pass forward.

    Returns:
        loss, dpo_accuracy, dpo_margin, dpo_chosen_reward, dpo_rejected_reward, grad_norm, lr.
    """
    result = preference_loss(learner, pairs, stage)
    weights = result.log_prob_weights.reshape(-1)[pairs.sequence_ids]
    metrics = learner.sft_update(pairs.with_columns(loss_weights=weights * pairs.loss_mask))
    return {**metrics, "loss": result.loss, **result.metrics}
