"""Policy and value losses over ragged responses.

Every aggregation is written as one weight per token over the whole mini-batch (``token_weights``), computed once before
the mini-batch is cut into micro-batches.  The loss is then ``sum_t loss_weights[t] * token_loss[t]``: the same number,
and the same gradient, however whole sequences are spread over micro-batches and ranks.

Metrics leave a micro-batch as (sum, count) pairs.  Pairs add up over micro-batches and ranks, and ``reduce_metrics``
divides once at the end; a count of zero marks a sum that is already normalised by the loss weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_retool.algorithms.kl import kl_penalty
from megatron_retool.algorithms.ragged import contiguous_ids, require_matching_shapes, sequence_sum
from megatron_retool.algorithms.rollout_correction import RolloutCorrectionSettings, rejection_mask

_MAX_LOG_RATIO = 20.0
# GSPO's ratio is a geometric mean: e^10 is far outside any clip range, and the product with an advantage stays finite.
_MAX_SEQUENCE_LOG_RATIO = 10.0


class PolicyLossSettings(Protocol):
    """What is read from the configuration's ``algorithm`` section."""

    @property
    def policy_loss(self) -> str: ...
    @property
    def clip_ratio_low(self) -> float: ...
    @property
    def clip_ratio_high(self) -> float: ...
    @property
    def dual_clip(self) -> float | None: ...
    @property
    def entropy_coefficient(self) -> float: ...
    @property
    def kl_in_loss(self) -> float: ...
    @property
    def kl_estimator(self) -> str: ...


def token_weights(
    loss_mask: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    aggregation: str,
    keep_mask: Tensor | None = None,
    denominator: str = "pre",
    max_response_length: int | None = None,
) -> Tensor:
    """Weight of every token in the loss of one mini-batch (one optimizer step, all ranks together).

    With n_i sampled tokens in response i and S responses that have any:

    =======================  ===================================  =========================================
    aggregation              weight of a token of response i      paper
    =======================  ===================================  =========================================
    token-mean               1 / sum_j n_j                        DAPO, arXiv:2503.14476, eq. 12
    seq-mean-token-sum       1 / S                                REINFORCE
    seq-mean-token-mean      1 / (S n_i)                          GRPO, arXiv:2402.03300, eq. 3
    seq-mean-token-sum-norm  1 / (S max_response_length)          Dr. GRPO, arXiv:2503.20783, section 3.2
    =======================  ===================================  =========================================

    Args:
        loss_mask: bool [T], true at sampled tokens.
        sequence_ids: int64 [T] in [0, num_sequences).
        aggregation: one of the above.
        keep_mask: bool [T]; false where rollout correction or another filter rejects a token: it weighs 0.
        denominator: "pre" counts n_i and S before rejection, so that a rejected token contributes zero and the others
            keep their weight; "post" counts what is left.
        max_response_length: the constant of seq-mean-token-sum-norm, needed there alone.

    Returns:
        float32 [T], 0 at tokens that give no loss.

    Raises:
        ValueError: unknown aggregation or denominator, or a missing ``max_response_length``.
    """
    require_matching_shapes(loss_mask=loss_mask, sequence_ids=sequence_ids, keep_mask=keep_mask)
    loss_mask = loss_mask.bool()
    active = loss_mask if keep_mask is None else loss_mask & keep_mask.bool()
    if denominator not in ("pre", "post"):
        raise ValueError(f"denominator={denominator!r} is neither pre nor post")
    counts = sequence_sum(loss_mask if denominator == "pre" else active, sequence_ids, num_sequences)
    sequences = (counts > 0).sum().clamp(min=1)
    if aggregation == "token-mean":
        per_sequence = torch.ones_like(counts) / counts.sum().clamp(min=1)
    elif aggregation == "seq-mean-token-sum":
        per_sequence = torch.ones_like(counts) / sequences
    elif aggregation == "seq-mean-token-mean":
        per_sequence = 1.0 / (counts.clamp(min=1) * sequences)
    elif aggregation == "seq-mean-token-sum-norm":
        if max_response_length is None or max_response_length < 1:
            raise ValueError("seq-mean-token-sum-norm divides by data.max_response_length: pass it")
        per_sequence = torch.ones_like(counts) / (sequences * max_response_length)
    else:
        raise ValueError(f"algorithm.loss_aggregation={aggregation!r} is not an aggregation")
    return torch.where(active, per_sequence.float()[sequence_ids], 0.0)


@dataclass
class PolicyLossInputs:
    """One micro-batch of whole responses; every column is [t], the response tokens laid end to end.

    ``log_probs`` and ``entropy`` carry gradients. ``loss_weights`` (from ``token_weights`` of the whole mini-batch) are
    0 at tokens without loss. ``importance_weights`` (from rollout correction) multiply the policy term alone.
    ``sequence_ids`` may be any integers that are equal inside a response and differ between responses.
    ``ref_log_probs`` are needed for a KL in the loss.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor
    sequence_ids: Tensor
    importance_weights: Tensor | None = None
    entropy: Tensor | None = None
    ref_log_probs: Tensor | None = None


class LossOutput(NamedTuple):
    """``loss``: scalar, to be summed over micro-batches and ranks. ``metrics``: name -> float64 [2], (sum, count)."""

    loss: Tensor
    metrics: dict[str, Tensor]


def policy_loss(
    inputs: PolicyLossInputs, config: PolicyLossSettings, bypass_rejection: RolloutCorrectionSettings | None = None
) -> LossOutput:
    """Policy loss of one micro-batch by ``config.policy_loss``, with entropy bonus and KL term.

    With rho = exp(log_probs - old_log_probs), A the advantage, w the importance weight (no gradient):

    * clip: PPO, arXiv:1707.06347, eq. 7, with DAPO's decoupled range (arXiv:2503.14476, eq. 10):
      -w min(rho A, clip(rho, 1 - low, 1 + high) A); with ``dual_clip`` c, where A < 0, at most -w c A
      (arXiv:1912.09729, eq. 5).
    * gspo: arXiv:2507.18071, eqs. 5-7 in the token form of eqs. 13-14: the same with
      s = exp(mean over the response's sampled tokens of log rho).
    * cispo: arXiv:2506.13585, eqs. 4-5: -w stop_gradient(clip(rho, 1 - low, 1 + high)) A log_probs. No token loses its
      gradient.
    * policy_gradient: -w A log_probs (REINFORCE; the old policy plays no part in it).

    ``bypass_rejection`` is for bypass mode, where ``old_log_probs`` are the engine's: its rules and veto are applied to
    the current log-probs against them, and rejected tokens weigh 0.

    ``loss = sum_t loss_weights (policy term - entropy_coefficient * entropy + kl_in_loss * KL(pi || ref))``.

    Metrics: actor/pg_loss, actor/pg_clipfrac (tokens whose clipped term was the larger loss), actor/pg_clipfrac_lower
    (tokens that dual clip bounded), actor/ppo_kl (mean of -log rho), actor/entropy (token mean over all sampled
    tokens, rejected ones too), actor/kl_loss.  Clip fractions and ppo_kl are means over tokens that give loss.

    Raises:
        ValueError: shapes do not match, an unknown loss, or a column that the settings need is missing.
    """
    require_matching_shapes(**{name: getattr(inputs, name) for name in PolicyLossInputs.__dataclass_fields__})
    loss_mask = inputs.loss_mask.bool()
    weights = torch.where(loss_mask, inputs.loss_weights, 0.0)
    if bypass_rejection is not None:
        owners, count = contiguous_ids(inputs.sequence_ids)
        kept = rejection_mask(
            inputs.log_probs.detach(), inputs.old_log_probs, loss_mask, owners, count, bypass_rejection
        )
        weights = torch.where(kept, weights, 0.0)
    active = weights != 0
    # Tool tokens may carry any log-prob: they are cut out before anything can overflow.
    log_ratio = torch.where(loss_mask, inputs.log_probs - inputs.old_log_probs, 0.0)
    advantages = inputs.advantages
    low, high = 1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high

    clipped = torch.zeros_like(active)
    bounded = torch.zeros_like(active)
    if config.policy_loss in ("clip", "gspo"):
        if config.policy_loss == "gspo":
            log_ratio_used = _gspo_log_ratio(log_ratio, loss_mask, inputs)
        else:
            log_ratio_used = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        # A rejected token may have any old log-prob, which 0 x nan would carry into the gradient.
        ratio = torch.where(active, log_ratio_used, 0.0).exp()
        free_loss = -advantages * ratio
        clip_loss = -advantages * ratio.clamp(low, high)
        clipped = clip_loss > free_loss
        losses = torch.maximum(free_loss, clip_loss)
        if config.dual_clip is not None:
            bound = -advantages * config.dual_clip
            bounded = (advantages < 0) & (losses > bound)
            losses = torch.where(advantages < 0, torch.minimum(losses, bound), losses)
    elif config.policy_loss == "cispo":
        ratio = torch.where(active, log_ratio.detach(), 0.0).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
        clipped = (ratio < low) | (ratio > high)
        losses = -advantages * ratio.clamp(low, high) * inputs.log_probs
    elif config.policy_loss == "policy_gradient":
        losses = -advantages * inputs.log_probs
    else:
        raise ValueError(f"algorithm.policy_loss={config.policy_loss!r} is not a policy loss")
    if inputs.importance_weights is not None:
        losses = losses * inputs.importance_weights.detach()

    pg_loss = _weighted_sum(losses, weights)
    loss = pg_loss
    num_active = active.sum()
    metrics = {
        "actor/pg_loss": _metric(pg_loss, torch.zeros_like(num_active)),
        "actor/pg_clipfrac": _metric((clipped & active).sum(), num_active),
        "actor/pg_clipfrac_lower": _metric((bounded & active).sum(), num_active),
        "actor/ppo_kl": _metric(_masked_sum(-log_ratio, active), num_active),
    }
    if inputs.entropy is not None:
        metrics["actor/entropy"] = _metric(_masked_sum(inputs.entropy, loss_mask), loss_mask.sum())
    if config.entropy_coefficient:
        if inputs.entropy is None:
            raise ValueError("algorithm.entropy_coefficient needs the policy's entropy")
        loss = loss - config.entropy_coefficient * _weighted_sum(inputs.entropy, weights)
    if config.kl_in_loss:
        if inputs.ref_log_probs is None:
            raise ValueError("algorithm.kl_in_loss needs the reference policy's log-probs")
        kl_loss = _weighted_sum(kl_penalty(inputs.log_probs, inputs.ref_log_probs, config.kl_estimator), weights)
        loss = loss + config.kl_in_loss * kl_loss
        metrics["actor/kl_loss"] = _metric(kl_loss, torch.zeros_like(num_active))
    return LossOutput(loss, metrics)


def _gspo_log_ratio(log_ratio: Tensor, loss_mask: Tensor, inputs: PolicyLossInputs) -> Tensor:
    owners, count = contiguous_ids(inputs.sequence_ids)
    detached = log_ratio.detach()
    tokens = sequence_sum(loss_mask, owners, count).clamp(min=1)
    mean = (sequence_sum(detached, owners, count) / tokens).clamp(max=_MAX_SEQUENCE_LOG_RATIO)
    # Value: the sequence's mean. Gradient: that of the token's own log-prob (eq. 14).
    return torch.where(loss_mask, mean.to(log_ratio.dtype)[owners] + (log_ratio - detached), 0.0)


def _weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    # A token of weight zero contributes zero even where its loss is inf or nan.
    return torch.where(weights != 0, values * weights, 0.0).sum()


def _masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values.detach(), 0.0).to(torch.float64).sum()


def _metric(total: Tensor, count: Tensor) -> Tensor:
    return torch.stack([total.detach().to(torch.float64), count.to(torch.float64)])


def reduce_metrics(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
    """Add (sum, count) pairs of micro-batches and ranks and divide once.

    A pair whose summed count is 0 keeps its sum: it is normalised already (actor/pg_loss), or nothing was counted and
    the sum is 0.
    """
    totals: dict[str, Tensor] = {}
    for part in parts:
        for name, pair in part.items():
            totals[name] = totals[name] + pair if name in totals else pair
    result = {}
    for name, pair in totals.items():
        total, count = pair.tolist()
        result[name] = total / count if count else total
    return result


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    loss_weights: Tensor,
    value_clip: float | None,
) -> LossOutput:
    """Half the squared error of the critic, with PPO's clipping (arXiv:1707.06347 as in OpenAI's baselines).

    ``0.5 max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2)``, weighted like the policy loss.

    Args:
        values: float [t] with gradient. old_values, returns: float [t]. loss_mask: bool [t].
        loss_weights: float [t] from ``token_weights``.
        value_clip: None turns clipping off.

    Metrics: critic/vf_loss, critic/vf_clipfrac, critic/vpred_mean, critic/returns_mean, critic/vf_squared_error (for
    the explained variance).
    """
    require_matching_shapes(
        values=values, old_values=old_values, returns=returns, loss_mask=loss_mask, loss_weights=loss_weights
    )
    weights = torch.where(loss_mask.bool(), loss_weights, 0.0)
    active = weights != 0
    errors = (values - returns).square()
    clipped = torch.zeros_like(active)
    losses = errors
    if value_clip is not None:
        near = torch.maximum(torch.minimum(values, old_values + value_clip), old_values - value_clip)
        clip_errors = (near - returns).square()
        clipped = clip_errors > errors
        losses = torch.maximum(errors, clip_errors)
    loss = 0.5 * _weighted_sum(losses, weights)
    count = active.sum()
    return LossOutput(
        loss,
        {
            "critic/vf_loss": _metric(loss, torch.zeros_like(count)),
            "critic/vf_clipfrac": _metric((clipped & active).sum(), count),
            "critic/vpred_mean": _metric(_masked_sum(values, active), count),
            "critic/returns_mean": _metric(_masked_sum(returns, active), count),
            "critic/vf_squared_error": _metric(_masked_sum(errors, active), count),
        },
    )
