"""Policy and value losses over ragged responses.

Every loss is ``sum_t loss_weights[t] * token_loss[t]``, with weights over the whole mini-batch (``loss_aggregation``):
the same number, and the same gradient, however whole sequences are spread over micro-batches and ranks.

Metrics leave a micro-batch as (sum, count) pairs.  Pairs add up over micro-batches and ranks, and ``reduce_metrics``
divides once at the end; a count of zero marks a sum that is already normalised by the loss weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_retool.algorithms.kl import KLEstimator, kl_penalty
from megatron_retool.algorithms.means import Mean
from megatron_retool.algorithms.ragged import contiguous_ids, describe, require_matching_shapes, sequence_sum
from megatron_retool.algorithms.rollout_correction import correct_responses
from megatron_retool.algorithms.settings import BUILT_IN, RolloutCorrectionSettings
from megatron_retool.registry import Extension, ExtensionError, Registry

MAX_LOG_RATIO = 20.0
"""Largest log ratio of a token, up or down: e^20 is far outside any clip range, and products with it stay finite."""
# GSPO's ratio is a geometric mean: e^10 is far outside any clip range, and the product with an advantage stays finite.
_MAX_SEQUENCE_LOG_RATIO = 10.0
_COMMON_METRICS = ("actor/pg_loss", "actor/ppo_kl", "actor/entropy", "actor/kl_loss", "actor/grad_norm", "actor/lr")


@dataclass(frozen=True)
class PolicyLossInputs:
    """One micro-batch of whole responses; every column is [t], the response tokens laid end to end.

    Attributes:
        log_probs: float, of the policy that learns, with a gradient.
        old_log_probs: float, of the policy before the update (in bypass mode the engine's).
        advantages: float.
        loss_mask: bool, true at tokens that the policy sampled.
        loss_weights: float, ``token_weights`` of the whole mini-batch; 0 at tokens without loss.
        sequence_ids: any integers that are equal inside a response and differ between responses.
        importance_weights: float, from rollout correction; they multiply only the policy term.
        entropy: float, with a gradient.
        ref_log_probs: float, of the reference policy; there for losses that need REFERENCE, and for a KL in the loss.
        values, returns: float, the critic's values before the update and what they should have been; there for losses
            that need CRITIC.
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
    values: Tensor | None = None
    returns: Tensor | None = None

    @functools.cached_property
    def active(self) -> Tensor:
        """bool [t], true at tokens that give loss. The others may have any old or reference log-prob, nan too."""
        return self.loss_weights != 0

    @functools.cached_property
    def log_ratio(self) -> Tensor:
        """log rho = log_probs - old_log_probs: float [t] with a gradient, 0 at tokens that give no loss."""
        # They are cut out before anything can overflow: 0 x nan would carry them into the gradient.
        return torch.where(self.active, self.log_probs - self.old_log_probs, 0.0)


class LossOutput(NamedTuple):
    """``loss``: scalar, to be summed over micro-batches and ranks. ``metrics``: name -> float64 [2], (sum, count)."""

    loss: Tensor
    metrics: dict[str, Tensor]


class TokenLosses(NamedTuple):
    """What a policy loss returns; a plain tuple, or only ``losses``, does too.

    Attributes:
        losses: float [t] with a gradient. Tokens that are not ``active`` are ignored, in loss and metrics.
        metrics: name -> float or bool [t], logged as the mean over active tokens: under actor/<name>, or under the name
            as it is where it has a slash. Every call returns the same names.
    """

    losses: Tensor
    metrics: Mapping[str, Tensor] = MappingProxyType({})


PolicyLoss = Callable[..., TokenLosses | tuple[Tensor, Mapping[str, Tensor]] | Tensor]
"""loss(inputs: PolicyLossInputs, *, its own settings): the policy term of every token, before any weight.

What is common to all losses is done with the result: importance weights, loss weights and rejection, entropy bonus, KL.
"""

policy_losses: Registry[PolicyLoss] = Registry(
    "algorithm.policy_loss", takes=("inputs",), declared=BUILT_IN["policy_loss"]
)


@policy_losses.register("clip")
def clip(
    inputs: PolicyLossInputs,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.28,
    dual_clip: float | None = None,
) -> TokenLosses:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A): PPO, arXiv:1707.06347, eq. 7.

    The decoupled range is DAPO's (arXiv:2503.14476, eq. 10). With ``dual_clip`` c the loss is at most -c A where A < 0
    (arXiv:1912.09729, eq. 5).

    Metrics: pg_clipfrac (tokens whose clipped term was the larger loss), pg_clipfrac_lower (those that dual clip
    bounded).
    """
    log_ratio = inputs.log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return _clipped(inputs, log_ratio, clip_ratio_low, clip_ratio_high, dual_clip)


@policy_losses.register("gspo")
def gspo(
    inputs: PolicyLossInputs,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.28,
    dual_clip: float | None = None,
) -> TokenLosses:
    """``clip`` with s = exp(mean over the response's sampled tokens of log rho) in place of rho.

    arXiv:2507.18071, eqs. 5-7 in the token form of eqs. 13-14. Metrics as ``clip``.
    """
    # Of all sampled tokens, those that give no loss too.
    log_ratio = torch.where(inputs.loss_mask, inputs.log_probs - inputs.old_log_probs, 0.0)
    owners, count = contiguous_ids(inputs.sequence_ids)
    used = torch.where(inputs.active, sequence_log_ratio(log_ratio, inputs.loss_mask, owners, count), 0.0)
    return _clipped(inputs, used, clip_ratio_low, clip_ratio_high, dual_clip)


def sequence_log_ratio(log_ratio: Tensor, counted: Tensor, owners: Tensor, count: int) -> Tensor:
    """GSPO's log ratio of every token: its sequence's mean, with the gradient of the token's own (eq. 14).

    Args:
        log_ratio: float [t] with a gradient, 0 where it is not counted.
        counted: bool [t], the tokens that the mean is over.
        owners: int64 [t] in [0, count), whose token it is.
    """
    detached = log_ratio.detach()
    tokens = sequence_sum(counted, owners, count).clamp(min=1)
    mean = (sequence_sum(detached, owners, count) / tokens).clamp(max=_MAX_SEQUENCE_LOG_RATIO)
    return mean.to(log_ratio.dtype)[owners] + (log_ratio - detached)


def clipped_losses(
    ratio: Tensor, advantages: Tensor, low: float | Tensor, high: float | Tensor
) -> tuple[Tensor, Tensor]:
    """-min(ratio A, clip(ratio, low, high) A) of every token (PPO, eq. 7), and whether the clipped term was taken.

    Args:
        ratio: float [t] with a gradient. advantages: float [t].
        low, high: of the ratio; two numbers, or float [t] each.
    """
    free_loss = -advantages * ratio
    clip_loss = -advantages * ratio.clamp(low, high)  # type: ignore[arg-type]
    return torch.maximum(free_loss, clip_loss), clip_loss > free_loss


def _clipped(
    inputs: PolicyLossInputs, log_ratio: Tensor, clip_ratio_low: float, clip_ratio_high: float, dual_clip: float | None
) -> TokenLosses:
    advantages = inputs.advantages
    losses, clipped = clipped_losses(log_ratio.exp(), advantages, 1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    bounded = torch.zeros_like(inputs.active)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        bounded = (advantages < 0) & (losses > bound)
        losses = torch.where(advantages < 0, torch.minimum(losses, bound), losses)
    return TokenLosses(losses, _clip_metrics(clipped, bounded))


@policy_losses.register("cispo")
def cispo(inputs: PolicyLossInputs, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.28) -> TokenLosses:
    """-stop_gradient(clip(rho, 1 - low, 1 + high)) A log_probs: arXiv:2506.13585, eqs. 4-5.

    No token loses its gradient. Metrics: pg_clipfrac, tokens outside the range.
    """
    low, high = 1.0 - clip_ratio_low, 1.0 + clip_ratio_high
    ratio = inputs.log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    losses = -inputs.advantages * ratio.clamp(low, high) * inputs.log_probs
    return TokenLosses(losses, _clip_metrics((ratio < low) | (ratio > high), torch.zeros_like(inputs.active)))


@policy_losses.register("policy_gradient")
def policy_gradient(inputs: PolicyLossInputs) -> TokenLosses:
    """-A log_probs: REINFORCE. The old policy plays no part in it."""
    nothing = torch.zeros_like(inputs.active)
    return TokenLosses(-inputs.advantages * inputs.log_probs, _clip_metrics(nothing, nothing))


def _clip_metrics(clipped: Tensor, bounded: Tensor) -> dict[str, Tensor]:
    return {"pg_clipfrac": clipped, "pg_clipfrac_lower": bounded}


@dataclass(frozen=True)
class PolicyObjective:
    """What the policy is taught by: the policy term, what is added to it, and what is rejected while it learns.

    Attributes:
        loss: the policy term.
        entropy_coefficient, kl_in_loss: coefficients of the other two terms.
        kl_estimator: of the KL to the reference policy; needed with ``kl_in_loss``.
        rejection: in bypass mode, where ``old_log_probs`` are the engine's: its rules and veto are applied to the
            current log-probs against them, and rejected tokens weigh 0.
    """

    loss: Extension[PolicyLoss]
    entropy_coefficient: float = 0.0
    kl_in_loss: float = 0.0
    kl_estimator: Extension[KLEstimator] | None = None
    rejection: RolloutCorrectionSettings | None = None


def policy_loss(inputs: PolicyLossInputs, objective: PolicyObjective) -> LossOutput:
    """The loss of one micro-batch.

    ``sum_t loss_weights (w * policy term - entropy_coefficient * entropy + kl_in_loss * KL(pi || ref))``, with the
    policy term of ``objective.loss`` and w the importance weights, which have no gradient.

    Metrics: actor/pg_loss, actor/ppo_kl (mean of -log rho), actor/entropy (token mean over all sampled tokens, rejected
    ones too), actor/kl_loss, and the policy term's own. But for entropy, means are over tokens that give loss.

    Raises:
        ValueError: shapes do not match, or a column that the settings need is missing.
        ExtensionError: the policy term raised, or did not return the loss of each token.
    """
    require_matching_shapes(**{name: getattr(inputs, name) for name in PolicyLossInputs.__dataclass_fields__})
    loss_mask = inputs.loss_mask.bool()
    weights = torch.where(loss_mask, inputs.loss_weights, 0.0)
    if objective.rejection is not None:
        owners, count = contiguous_ids(inputs.sequence_ids)
        corrected = correct_responses(
            inputs.log_probs.detach(), inputs.old_log_probs, loss_mask, owners, count, objective.rejection
        )
        weights = torch.where(corrected.keep_mask, weights, 0.0)
    inputs = replace(inputs, loss_mask=loss_mask, loss_weights=weights)
    active = inputs.active
    inputs = replace(inputs, advantages=_selected(inputs.advantages, active))

    losses, own_metrics = token_losses(inputs, objective.loss)
    if inputs.importance_weights is not None:
        losses = losses * _selected(inputs.importance_weights.detach(), active)
    pg_loss = _weighted_sum(losses, weights)
    loss = pg_loss
    num_active = active.sum()
    metrics = {
        "actor/pg_loss": _metric(pg_loss, torch.zeros_like(num_active)),
        "actor/ppo_kl": _metric(_masked_sum(-inputs.log_ratio, active), num_active),
        **{name: _metric(_masked_sum(column, active), num_active) for name, column in own_metrics.items()},
    }
    if inputs.entropy is not None:
        metrics["actor/entropy"] = _metric(_masked_sum(inputs.entropy, loss_mask), loss_mask.sum())
    if objective.entropy_coefficient:
        if inputs.entropy is None:
            raise ValueError("algorithm.entropy_coefficient needs the policy's entropy")
        loss = loss - objective.entropy_coefficient * _weighted_sum(inputs.entropy, weights)
    if objective.kl_in_loss:
        if inputs.ref_log_probs is None or objective.kl_estimator is None:
            raise ValueError("algorithm.kl_in_loss needs the reference policy's log-probs and an estimator")
        penalty = kl_penalty(
            _selected(inputs.log_probs, active), _selected(inputs.ref_log_probs, active), objective.kl_estimator
        )
        kl_loss = _weighted_sum(penalty, weights)
        loss = loss + objective.kl_in_loss * kl_loss
        metrics["actor/kl_loss"] = _metric(kl_loss, torch.zeros_like(num_active))
    return LossOutput(loss, metrics)


def with_own_old_log_probs(
    inputs: PolicyLossInputs, rollout_log_probs: Tensor, correction: RolloutCorrectionSettings
) -> tuple[PolicyLossInputs, Tensor]:
    """The inputs of an update whose own log-probs are the old ones: the ratio is 1, and its gradient is that of log pi.

    The rollout correction, which a pass before the update would have made of the same numbers, is made here, response
    by response: importance weights take their place, and what it rejects weighs 0.

    Args:
        inputs: one micro-batch of whole responses. Their old log-probs and importance weights are not read; the loss
            weights are those without the correction.
        rollout_log_probs: float [t], the engine's.

    Returns:
        The inputs; bool [t], true at the sampled tokens that the correction keeps.
    """
    old_log_probs = inputs.log_probs.detach()
    owners, count = contiguous_ids(inputs.sequence_ids)
    weights, kept = correct_responses(old_log_probs, rollout_log_probs, inputs.loss_mask, owners, count, correction)
    corrected = replace(
        inputs,
        old_log_probs=old_log_probs,
        importance_weights=weights,
        loss_weights=torch.where(kept, inputs.loss_weights, 0.0),
    )
    return corrected, kept


def token_losses(inputs: PolicyLossInputs, loss: Extension[PolicyLoss]) -> TokenLosses:
    """The policy term of every token, [t], and its metrics by their full names.

    Raises:
        ExtensionError: the loss raised, or returned something else.
    """
    result = loss.attempt(inputs)
    if isinstance(result, Tensor):
        result = (result, {})
    tokens = tuple(inputs.log_probs.shape)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        raise ExtensionError(
            f"{loss.label}: it returned {describe(result)}: return the loss of each token, a tensor of shape "
            f"{list(tokens)} (that of inputs.log_probs), alone or with a dict of metrics: losses, {{name: tensor}}"
        )
    losses, own = result
    if not (isinstance(losses, Tensor) and tuple(losses.shape) == tokens and losses.is_floating_point()):
        raise ExtensionError(
            f"{loss.label}: the losses are {describe(losses)}: return one number for each token, a float tensor of "
            f"shape {list(tokens)} (that of inputs.log_probs), without summing; weights and sums follow after it"
        )
    metrics = {}
    for name, column in own.items():
        full_name = name if "/" in str(name) else f"actor/{name}"
        if not (isinstance(column, Tensor) and tuple(column.shape) == tokens):
            raise ExtensionError(
                f"{loss.label}: its metric {name!r} is {describe(column)}: give a value for each token, a tensor of "
                f"shape {list(tokens)}; the mean over tokens that give loss is logged"
            )
        if full_name in _COMMON_METRICS:
            raise ExtensionError(f"{loss.label}: {full_name} is a metric of every loss: give {name!r} another name")
        metrics[full_name] = column
    return TokenLosses(losses, metrics)


def _selected(values: Tensor, active: Tensor) -> Tensor:
    """``values`` where a token gives loss, else 0: before any product, whose gradient would carry a nan along."""
    return torch.where(active, values, 0.0)


def _weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    # A token of weight zero contributes zero even where its loss is inf or nan.
    return torch.where(weights != 0, values * weights, 0.0).sum()


def _masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values.detach(), 0.0).to(torch.float64).sum()


def _metric(total: Tensor, count: Tensor) -> Tensor:
    return torch.stack([total.detach().to(torch.float64), count.to(torch.float64)])


def reduce_metrics(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
    """Add (sum, count) pairs of micro-batches and ranks and divide once: a ``Mean`` over the count.

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
        result[name] = Mean(total / count, count) if count else total
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
        loss_weights: float [t], ``token_weights``.
        value_clip: None turns clipping off.

    Metrics: critic/vf_loss, critic/vf_clipfrac, critic/vpred_mean, critic/returns_mean, critic/vf_squared_error (for
    the explained variance).
    """
    require_matching_shapes(
        values=values, old_values=old_values, returns=returns, loss_mask=loss_mask, loss_weights=loss_weights
    )
    weights = torch.where(loss_mask.bool(), loss_weights, 0.0)
    active = weights != 0
    values, old_values, returns = (_selected(column, active) for column in (values, old_values, returns))
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
