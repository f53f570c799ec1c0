"""How the losses of tokens become one number: as a weight of each token over the whole mini-batch.

The weights are computed once, before the mini-batch is cut into micro-batches.  The loss is then
``sum_t weights[t] * token_loss[t]``: the same number, and the same gradient, however whole sequences are spread over
micro-batches and ranks.

With n_i sampled tokens in response i and S responses that have any:

=======================  ===================================  =========================================
``loss_aggregation``     weight of a token of response i      paper
=======================  ===================================  =========================================
token-mean               1 / sum_j n_j                        DAPO, arXiv:2503.14476, eq. 12
seq-mean-token-sum       1 / S                                REINFORCE
seq-mean-token-mean      1 / (S n_i)                          GRPO, arXiv:2402.03300, eq. 3
seq-mean-token-sum-norm  1 / (S max_response_length)          Dr. GRPO, arXiv:2503.20783, section 3.2
=======================  ===================================  =========================================
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_retool.algorithms.ragged import describe, require_matching_shapes, sequence_sum
from megatron_retool.algorithms.settings import BUILT_IN
from megatron_retool.registry import Extension, ExtensionError, Registry

LossAggregation = Callable[..., Tensor]
"""aggregation(counts, *, its own settings) -> float64 [N], the weight of each token of each response.

``counts`` are float64 [N], the tokens that count in each response of the mini-batch; 0 where there are none. With a
parameter of that name it is also given ``max_response_length``, data.max_response_length.
"""

loss_aggregations: Registry[LossAggregation] = Registry(
    "algorithm.loss_aggregation",
    takes=("counts",),
    optional=("max_response_length",),
    declared=BUILT_IN["loss_aggregation"],
)


def token_weights(
    aggregation: Extension[LossAggregation],
    loss_mask: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    keep_mask: Tensor | None = None,
    denominator: str = "pre",
    max_response_length: int | None = None,
) -> Tensor:
    """Weight of every token in the loss of one mini-batch (one optimizer step, all ranks together).

    Args:
        loss_mask: bool [T], true at sampled tokens.
        sequence_ids: int64 [T] in [0, num_sequences).
        keep_mask: bool [T]; false where rollout correction or another filter rejects a token: it weighs 0.
        denominator: "pre" counts tokens and responses before rejection, so that a rejected token contributes zero and
            the others keep their weight; "post" counts what is left.
        max_response_length: of aggregations that divide by it.

    Returns:
        float32 [T], 0 at tokens that give no loss.

    Raises:
        ValueError: unknown denominator, or shapes do not match.
        ExtensionError: the aggregation raised, or did not return the weights.
    """
    require_matching_shapes(loss_mask=loss_mask, sequence_ids=sequence_ids, keep_mask=keep_mask)
    loss_mask = loss_mask.bool()
    active = loss_mask if keep_mask is None else loss_mask & keep_mask.bool()
    if denominator not in ("pre", "post"):
        raise ValueError(f"denominator={denominator!r} is neither pre nor post")
    counts = sequence_sum(loss_mask if denominator == "pre" else active, sequence_ids, num_sequences)
    keywords = {}
    if loss_aggregations.wants(aggregation, "max_response_length"):
        keywords["max_response_length"] = max_response_length
    per_sequence = aggregation.attempt(counts, **keywords)
    if not (isinstance(per_sequence, Tensor) and per_sequence.shape == counts.shape):
        raise ExtensionError(
            f"{aggregation.label}: it returned {describe(per_sequence)}: return the weight of a token of each "
            f"response, a tensor of shape {list(counts.shape)} (that of counts)"
        )
    if not bool(torch.isfinite(per_sequence[counts > 0]).all()):
        raise ExtensionError(
            f"{aggregation.label}: a weight is not finite: guard divisions where a response, or all, have no token"
        )
    return torch.where(active, per_sequence.float()[sequence_ids], 0.0)


@loss_aggregations.register("token-mean")
def token_mean(counts: Tensor) -> Tensor:
    """1 / sum_j n_j."""
    return torch.ones_like(counts) / counts.sum().clamp(min=1)


@loss_aggregations.register("seq-mean-token-sum")
def seq_mean_token_sum(counts: Tensor) -> Tensor:
    """1 / S."""
    return torch.ones_like(counts) / _responses(counts)


@loss_aggregations.register("seq-mean-token-mean")
def seq_mean_token_mean(counts: Tensor) -> Tensor:
    """1 / (S n_i)."""
    return 1.0 / (counts.clamp(min=1) * _responses(counts))


@loss_aggregations.register("seq-mean-token-sum-norm")
def seq_mean_token_sum_norm(counts: Tensor, *, max_response_length: int | None) -> Tensor:
    """1 / (S max_response_length)."""
    if max_response_length is None or max_response_length < 1:
        raise ValueError("seq-mean-token-sum-norm divides by data.max_response_length: pass it")
    return torch.ones_like(counts) / (_responses(counts) * max_response_length)


def _responses(counts: Tensor) -> Tensor:
    return (counts > 0).sum().clamp(min=1)
