"""Rollout correction: the engine that sampled and the learner that trains compute different probabilities.

Notation, for a sampled token t of a response with n sampled tokens: d_t = log pi_train - log pi_rollout.

==================  ==========================  ===========================================================
level               ratio                       property
==================  ==========================  ===========================================================
token               exp(d_t)                    low variance; biased, ignores how the prefix was reached
sequence            exp(sum d)                  unbiased; variance grows with the length
geometric           exp(sum d / n)              comparable between lengths; a trust-region test, not a weight
==================  ==========================  ===========================================================

Two independent instruments work on these ratios:

* **weights** multiply the policy loss: ``mode`` truncate min(rho, upper), clip clamp(rho, lower, upper), mask
  rho * 1[lower <= rho <= upper] (a unit outside gives no loss at all), none 1.
* **rejection** removes tokens or whole responses from the loss: the rules of ``rejection_rules`` ANDed, the veto (any
  token with d_t < log(veto_threshold), taken on the unclamped value), and ``mode: mask``.  It works without weights.

The defaults for Megatron-Core with SGLang are a geometric mask [0.999, 1.001] over a veto of 1e-4 with token weights
truncated at 2.  The geometric ratio averages n differences, so its spread shrinks with 1 / sqrt(n): bounds that keep
nearly all responses of thousands of tokens drop many of a hundred tokens.  Runs with short responses need wider ones.
A row whose differences cancel passes any test on their mean, which is why the veto stays on.

Responses without a sampled token count in no mean.  A response with a non-finite d_t is always dropped and counted.

References: truncated importance sampling, Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
RL training"; masked and geometric variants, Liu, Li et al. 2025, "When speed kills stability"; the estimators k1, k2
and k3, http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_retool.algorithms.importance_metrics import importance_metrics
from megatron_retool.algorithms.probability_bins import PROBABILITY_BIN_EDGES
from megatron_retool.algorithms.ragged import CHUNK, require_matching_shapes, sequence_max, sequence_sum
from megatron_retool.algorithms.rejection_rules import (
    FIRST_RULE,
    NOT_FINITE,
    VETO,
    WEIGHT_MASK,
    RejectionRule,
    parse_rejection_rules,
)
from megatron_retool.algorithms.settings import CORRECTION_LEVELS, RolloutCorrectionSettings
from megatron_retool.errors import InputError
from megatron_retool.registry import Extension, ExtensionError, Registry

_MAX_EXPONENT = 20.0
_PREFIX = "rollout_corr/"


weight_modes: Registry[Callable[..., Any]] = Registry("algorithm.rollout_correction.mode", takes=("ratio",))
"""mode(ratio, *, lower, upper) -> the weight of each unit, [units], or that and bool [units], false where a unit gives
no loss at all. ``ratio`` is float [units] of sampled tokens or responses, as the level says."""
rejection_statistics: Registry[Callable[..., Any]] = Registry(
    "algorithm.rollout_correction.rejection",
    takes=("log_ratio", "sequence_ids", "num_sequences"),
    kwargs_key="the rule's key=value words",
)


@weight_modes.register("truncate")
def truncate(ratio: Tensor, *, upper: float) -> Tensor:
    """min(rho, upper)."""
    return ratio.clamp(max=upper)


@weight_modes.register("clip")
def clip(ratio: Tensor, *, lower: float, upper: float) -> Tensor:
    """clamp(rho, lower, upper)."""
    return ratio.clamp(lower, upper)


@weight_modes.register("mask")
def mask(ratio: Tensor, *, lower: float, upper: float) -> tuple[Tensor, Tensor]:
    """rho inside the bounds; a unit outside gives no loss."""
    inside = (ratio >= lower) & (ratio <= upper)
    return torch.where(inside, ratio, 0.0), inside


@dataclass(frozen=True)
class CorrectionResult:
    """What the correction decided for one global batch.

    importance_weights: float32 [T], 0 outside the loss mask, no gradient.
    keep_mask: bool [T], true at sampled tokens that may give loss; hand it to ``policy_loss.token_weights`` with the
        configured denominator.
    rejected_by: int8 [T], why a sampled token may give none: 0 where it may and outside the loss mask, else the first
        that holds of NOT_FINITE, VETO, WEIGHT_MASK and FIRST_RULE + the place of a rule in ``config.rejection``.
    skip_update: the batch filter fired; make no optimizer step on this batch.
    metrics: rollout_corr/*.
    """

    importance_weights: Tensor
    keep_mask: Tensor
    rejected_by: Tensor
    skip_update: bool
    metrics: dict[str, float]


@torch.no_grad()
def rollout_correction(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    turn_ids: Tensor,
    config: RolloutCorrectionSettings,
    weight_versions: Tensor | None = None,
    current_version: int | None = None,
) -> CorrectionResult:
    """Weights, mask and metrics for one global batch.

    Call it once, with every response of the step: batch normalisation and the batch filter are statistics of the whole
    batch.  Everything else is decided response by response, so the result for a response does not depend on which
    others are there.

    In decoupled mode ``train_log_probs`` are those of the learner's weights before the update (pi_old); PPO's ratio is
    pi / pi_old and the weights here stand for pi_old / pi_rollout (three policies, arXiv:2110.00641).  In bypass mode
    (``bypass_old_log_probs``) rollout log-probs take the place of pi_old in PPO's ratio, which then carries the
    mismatch itself: weights are 1, and rules, veto and metrics apply to the log-probs given here.

    Args:
        train_log_probs, rollout_log_probs: float [T], of the sampled tokens under the distribution that was sampled
            (see ``sampling``).
        loss_mask: bool [T]. sequence_ids: int64 [T] in [0, num_sequences). turn_ids: int [T].
        weight_versions: int [T], version of the weights that sampled each token; with ``current_version``, metrics are
            also given by version lag.

    Raises:
        ValueError: shapes do not match, or a setting is not known.
        ExtensionError: a mode or statistic is not known, raised, or did not return a number for each unit.
    """
    require_matching_shapes(
        train_log_probs=train_log_probs,
        rollout_log_probs=rollout_log_probs,
        loss_mask=loss_mask,
        sequence_ids=sequence_ids,
        turn_ids=turn_ids,
        weight_versions=weight_versions,
    )
    sampled = torch.nonzero(loss_mask.bool()).squeeze(1)
    units = _SampledTokens(train_log_probs[sampled], rollout_log_probs[sampled], sequence_ids[sampled], num_sequences)
    weights, reasons, vetoed = _decided(units, config)
    kept = reasons == 0
    if config.batch_normalize:
        weights = _normalized(units, weights, kept, config)

    metrics = _metrics(units, weights, kept, vetoed) | _verl_metrics(units, kept, vetoed, config)
    categories = [
        *_turn_categories(turn_ids[sampled]),
        *_probability_categories(units.rollout_log_probs),
        *(
            _lag_categories(weight_versions[sampled], current_version)
            if weight_versions is not None and current_version is not None
            else []
        ),
    ]
    metrics |= _mismatch_by_category(units, categories)
    if weight_versions is not None and current_version is not None and len(sampled):
        lag = (current_version - weight_versions[sampled]).to(torch.float64)
        metrics[f"{_PREFIX}staleness/mean"] = float(lag.mean())
        metrics[f"{_PREFIX}staleness/max"] = float(lag.max())
    limit = config.batch_k3_limit
    skip = limit is not None and metrics.get(f"{_PREFIX}k3_kl", 0.0) > limit
    metrics[f"{_PREFIX}skipped_updates"] = float(skip)

    return CorrectionResult(
        importance_weights=_spread(weights.float(), sampled, loss_mask),
        keep_mask=_spread(kept, sampled, loss_mask),
        rejected_by=_spread(reasons, sampled, loss_mask),
        skip_update=bool(skip),
        metrics=metrics,
    )


class ResponseCorrection(NamedTuple):
    """``importance_weights`` and ``keep_mask`` of ``CorrectionResult``, for some responses of a batch."""

    importance_weights: Tensor
    keep_mask: Tensor


@torch.no_grad()
def correct_responses(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    config: RolloutCorrectionSettings,
) -> ResponseCorrection:
    """Only weights, rules and veto, for any subset of whole responses: what ``rollout_correction`` gives them.

    The loss needs it where the learner's log-probs are first known in the forward pass of the update: in bypass mode,
    and where old log-probs are the update's own. The batch filter is not applied, and weights are as they are before
    ``batch_normalize``: both ask for the whole batch.

    Args:
        As ``rollout_correction``.
    """
    sampled = torch.nonzero(loss_mask.bool()).squeeze(1)
    units = _SampledTokens(train_log_probs[sampled], rollout_log_probs[sampled], sequence_ids[sampled], num_sequences)
    weights, reasons, _ = _decided(units, config)
    return ResponseCorrection(_spread(weights.float(), sampled, loss_mask), _spread(reasons == 0, sampled, loss_mask))


def _spread(values: Tensor, sampled: Tensor, loss_mask: Tensor) -> Tensor:
    """[sampled] -> [T], 0 outside the loss mask."""
    whole = torch.zeros(len(loss_mask), dtype=values.dtype, device=loss_mask.device)
    whole[sampled] = values
    return whole


class _SampledTokens:
    """The sampled tokens of a batch, in the input's precision, with float64 sums by response."""

    def __init__(self, train: Tensor, rollout: Tensor, sequence_ids: Tensor, num_sequences: int) -> None:
        self.train_log_probs = train
        self.rollout_log_probs = rollout
        self.sequence_ids = sequence_ids
        self.num_sequences = num_sequences
        difference = train - rollout
        self.finite = torch.isfinite(difference)
        # Dropped tokens must not turn every mean of the batch into nan; they are counted on their own.
        self.difference = torch.where(self.finite, difference, 0.0)
        self.counts = self.sum_by_sequence(torch.ones_like(self.finite))
        self.difference_sums = self.sum_by_sequence(self.difference)

    def __len__(self) -> int:
        return len(self.difference)

    @property
    def nonempty(self) -> Tensor:
        return self.counts > 0

    def sum_by_sequence(self, values: Tensor) -> Tensor:
        """float64 [num_sequences]."""
        return sequence_sum(values, self.sequence_ids, self.num_sequences)

    def any_by_sequence(self, flags: Tensor) -> Tensor:
        """bool [num_sequences]: is a flag set on any token of the response?"""
        return self.sum_by_sequence(flags) > 0

    def log_ratio(self, level: str) -> Tensor:
        """log rho of ``level``, unclamped: [sampled] for tokens, float64 [num_sequences] for the other two."""
        if level == "token":
            return self.difference
        if level == "sequence":
            return self.difference_sums
        if level == "geometric":
            return self.difference_sums / self.counts.clamp(min=1)
        raise InputError(f"rollout_correction.level={level!r} is not one of {', '.join(CORRECTION_LEVELS)}")

    def per_token(self, level: str, values: Tensor) -> Tensor:
        """``values`` of ``level`` as one value per sampled token."""
        return values if level == "token" else values[self.sequence_ids]


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_MAX_EXPONENT, _MAX_EXPONENT).exp()


def _divergence(difference: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * difference.square()
    # Not negative in exact arithmetic; rounding must not push it under a lower bound of 0.
    return (torch.expm1(difference.clamp(-_MAX_EXPONENT, _MAX_EXPONENT)) - difference).clamp(min=0.0)


def _rule_statistic(units: _SampledTokens, rule: RejectionRule) -> Tensor:
    """The rule's statistic: [sampled] for rules about tokens, [num_sequences] for rules about responses."""
    if rule.quantity == "own":
        statistic = rejection_statistics.bind(rule.name, rule.kwargs)
        result = statistic.attempt(units.difference, units.sequence_ids, units.num_sequences)
        size = len(units) if rule.unit == "token" else units.num_sequences
        return _checked(statistic, result, size, f"a number for each of {size} {rule.unit}s")
    if rule.quantity == "ratio":
        level = "token" if rule.unit == "token" else ("geometric" if rule.reduction == "mean" else "sequence")
        return _exp(units.log_ratio(level))
    per_token = _divergence(units.difference, rule.quantity)
    if rule.unit == "token":
        return per_token
    if rule.reduction == "max":
        return sequence_max(per_token, units.sequence_ids, units.num_sequences)
    total = units.sum_by_sequence(per_token)
    return total / units.counts.clamp(min=1) if rule.reduction == "mean" else total


def _reasons(units: _SampledTokens, config: RolloutCorrectionSettings) -> tuple[Tensor, Tensor]:
    """(int8 [sampled] why finiteness, veto or rules reject a token, 0 if none does; bool [num_sequences] vetoed)."""
    reasons = torch.zeros(len(units), dtype=torch.int8, device=units.finite.device)
    vetoed = torch.zeros_like(units.nonempty)
    if config.veto_threshold is not None:
        vetoed = units.any_by_sequence(units.difference < math.log(config.veto_threshold))
    rejecting = [
        (NOT_FINITE, "response", units.any_by_sequence(~units.finite)),
        (VETO, "response", vetoed),
    ]
    for place, rule in enumerate(parse_rejection_rules(config.rejection)):
        statistic = _rule_statistic(units, rule)
        outside = ~((statistic >= rule.lower) & (statistic <= rule.upper))
        rejecting.append((FIRST_RULE + place, rule.unit, outside))
    for reason, unit, rejected in reversed(rejecting):  # the first one has the last word
        reasons[rejected if unit == "token" else rejected[units.sequence_ids]] = reason
    return reasons, vetoed


def _decided(units: _SampledTokens, config: RolloutCorrectionSettings) -> tuple[Tensor, Tensor, Tensor]:
    """(weights [sampled]; int8 [sampled] why a token is rejected, 0 if it is not; bool [num_sequences] vetoed)."""
    reasons, vetoed = _reasons(units, config)
    weights, inside = _importance_weights(units, config)
    return weights, torch.where(inside | (reasons > 0), reasons, WEIGHT_MASK), vetoed


def _importance_weights(units: _SampledTokens, config: RolloutCorrectionSettings) -> tuple[Tensor, Tensor]:
    """(weights [sampled]; bool [sampled], false where ``mode: mask`` rejects the unit)."""
    everything = torch.ones_like(units.finite)
    if config.mode == "none" or config.bypass_old_log_probs:
        return torch.ones_like(units.difference), everything
    ratio = _exp(units.log_ratio(config.level))
    mode = weight_modes.bind(config.mode, config.mode_kwargs, settings=config)
    result = mode.attempt(ratio)
    weights, inside = result if isinstance(result, tuple) and len(result) == 2 else (result, torch.ones_like(ratio) > 0)
    what = f"a weight for each of {len(ratio)} ratios"
    weights, inside = (_checked(mode, each, len(ratio), what) for each in (weights, inside))
    return units.per_token(config.level, weights.to(ratio.dtype)), units.per_token(config.level, inside.bool())


def _checked(extension: Extension[Callable[..., Any]], found: Any, size: int, what: str) -> Tensor:
    """``found`` where it is a tensor [size]."""
    if not isinstance(found, Tensor) or found.shape != (size,):
        given = f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ExtensionError(f"{extension.label}: it returned {given}: return {what}, a tensor [{size}]")
    return found


def _normalized(units: _SampledTokens, weights: Tensor, kept: Tensor, config: RolloutCorrectionSettings) -> Tensor:
    """``weights`` over their mean; as they are where there is nothing to take it over, or it is 0."""
    if config.batch_normalize_over == "all" and config.level != "token":
        # A response's weight once, however many tokens it has.
        means = units.sum_by_sequence(weights)[units.nonempty] / units.counts[units.nonempty]
    else:
        means = weights[kept] if config.batch_normalize_over == "kept_tokens" else weights
    mean = _mean(means) if len(means) else torch.zeros(())
    return weights / mean if float(mean) > 0 else weights


def _mean(values: Tensor) -> Tensor:
    return values.mean(dtype=torch.float64)


def _metrics(units: _SampledTokens, weights: Tensor, kept: Tensor, vetoed: Tensor) -> dict[str, float]:
    if len(units) == 0:
        return {}
    nonempty = units.nonempty
    counts = units.counts[nonempty]

    def log_ppl(log_probs: Tensor) -> Tensor:
        return -units.sum_by_sequence(torch.where(units.finite, log_probs, 0.0))[nonempty] / counts

    train_log_ppl, rollout_log_ppl = log_ppl(units.train_log_probs), log_ppl(units.rollout_log_probs)
    log_ppl_diff = train_log_ppl - rollout_log_ppl
    ratio = _exp(units.difference)
    mean_weight = _mean(weights)
    mean_square_weight = _mean(weights.square())
    values = {
        "training_ppl": _mean(_exp(train_log_ppl)),
        "rollout_ppl": _mean(_exp(rollout_log_ppl)),
        "training_log_ppl": _mean(train_log_ppl),
        "rollout_log_ppl": _mean(rollout_log_ppl),
        "log_ppl_diff": _mean(log_ppl_diff),
        "log_ppl_abs_diff": _mean(log_ppl_diff.abs()),
        "log_ppl_diff_max": log_ppl_diff.max(),
        "log_ppl_diff_min": log_ppl_diff.min(),
        "ppl_ratio": _mean(_exp(log_ppl_diff)),
        "chi2_token": _mean(ratio.square()) - 1.0,
        "chi2_seq": _mean(_exp(units.difference_sums[nonempty]).square()) - 1.0,
        "total_variation": 0.5 * _mean((1.0 - ratio).abs()),
        "is_weight_mean": mean_weight,
        "is_weight_std": _mean((weights - mean_weight).square()).sqrt(),
        "is_weight_max": weights.max(),
        "is_weight_min": weights.min(),
        "eff_sample_size": mean_weight.square() / mean_square_weight.clamp(min=1e-300),
        "masked_fraction": _mean(~kept),
        "seq_masked_fraction": _mean(units.any_by_sequence(~kept)[nonempty]),
        "veto_fraction": _mean(vetoed[nonempty]),
        "nonfinite_tokens": (~units.finite).sum(),
    }
    return {f"{_PREFIX}{name}": float(value) for name, value in values.items()}


def _verl_metrics(
    units: _SampledTokens, kept: Tensor, vetoed: Tensor, config: RolloutCorrectionSettings
) -> dict[str, float]:
    """What verl's dashboards show: ratios before truncation, and what rejection and veto do, as far as they are on."""
    if len(units) == 0:
        return {}
    values: dict[str, float] = {}
    if config.mode != "none" and not config.bypass_old_log_probs:
        log_ratio = units.per_token(config.level, units.log_ratio(config.level))
        values = importance_metrics(
            log_ratio, units.sequence_ids, units.num_sequences, config.upper, of_responses=config.level != "token"
        )
        if config.batch_normalize and bool(kept.any()):
            values["rollout_is_batch_norm_factor"] = float(_mean(_importance_weights(units, config)[0][kept]))
    if config.rejection:
        ruled = _reasons(units, replace(config, veto_threshold=None))[0] == 0
        values["rollout_rs_masked_fraction"] = float(_mean(~ruled))
        values["rollout_rs_seq_masked_fraction"] = float(_mean(units.any_by_sequence(~ruled)[units.nonempty]))
    if config.veto_threshold is not None:
        below = units.difference < math.log(config.veto_threshold)
        values["rollout_is_veto_fraction"] = float(_mean(vetoed[units.nonempty]))
        values["rollout_is_catastrophic_token_fraction"] = float(_mean(below))
    return {f"{_PREFIX}{name}": value for name, value in values.items()}


# A way to split the sampled tokens: (int64 [sampled] category of each token, -1 for none; names of the categories).
_Categories = tuple[Tensor, Sequence[str]]


def _turn_categories(turn_ids: Tensor) -> list[_Categories]:
    return [(torch.where(turn_ids < 0, -1, (turn_ids > 0).to(torch.int64)), ("/first_turn", "/later_turns"))]


def _probability_categories(rollout_log_probs: Tensor) -> list[_Categories]:
    edges = (0.0, *PROBABILITY_BIN_EDGES, 1.0)
    names = [f"/prob_{low:g}_{high:g}" for low, high in zip(edges, edges[1:], strict=False)]
    inner = torch.tensor(PROBABILITY_BIN_EDGES, dtype=rollout_log_probs.dtype, device=rollout_log_probs.device)
    return [(torch.bucketize(rollout_log_probs.exp(), inner, right=True), names)]


def _lag_categories(weight_versions: Tensor, current_version: int) -> list[_Categories]:
    lag = (current_version - weight_versions).to(torch.int64).clamp(0, 3)
    return [(lag, ("/lag_0", "/lag_1", "/lag_2", "/lag_3_or_more"))]


def _mismatch_by_category(units: _SampledTokens, splits: Sequence[_Categories]) -> dict[str, float]:
    """kl, k3_kl, log_prob_abs_diff and pearson, over all sampled tokens and in each category that has any."""
    if len(units) == 0:
        return {}
    everything: _Categories = (torch.zeros_like(units.sequence_ids), ("",))
    metrics: dict[str, float] = {}
    for categories, names in (everything, *splits):
        columns = _category_means(units, categories, len(names))
        for name, column in columns.items():
            for suffix, value in zip(names, column.tolist(), strict=True):
                # An empty category has no mean, and a correlation with a constant does not exist.
                if math.isfinite(value):
                    metrics[f"{_PREFIX}{name}{suffix}"] = value
    return metrics


def _category_means(units: _SampledTokens, categories: Tensor, size: int) -> dict[str, Tensor]:
    """The four statistics as float64 [size], nan where undefined; chunked, for batches of millions of tokens."""
    device = units.difference.device
    # Tokens of no category are collected behind the others and forgotten.
    owners = torch.where(units.finite & (categories >= 0), categories, size)
    pieces = [slice(start, start + CHUNK) for start in range(0, len(units), CHUNK)]
    sums = torch.zeros(size + 1, 6, dtype=torch.float64, device=device)
    for piece in pieces:
        difference = units.difference[piece].to(torch.float64)
        train = units.train_log_probs[piece].to(torch.float64).exp()
        rollout = units.rollout_log_probs[piece].to(torch.float64).exp()
        values = (-difference, _divergence(difference, "k3"), difference.abs(), train, rollout)
        rows = torch.stack([torch.ones_like(difference), *values], dim=1)
        # A token whose difference is not finite may have any log-prob: it must not reach the sums, not even as 0 * inf.
        sums.index_add_(0, owners[piece], torch.where(units.finite[piece, None], rows, 0.0))
    counts = sums[:, 0]
    means = sums[:, 1:] / counts[:, None]
    moments = torch.zeros(size + 1, 3, dtype=torch.float64, device=device)
    for piece in pieces:
        # Centred before squaring: probabilities near 1 differ only in their last digits.
        centre = means[owners[piece]]
        train = units.train_log_probs[piece].to(torch.float64).exp() - centre[:, 3]
        rollout = units.rollout_log_probs[piece].to(torch.float64).exp() - centre[:, 4]
        moments.index_add_(0, owners[piece], torch.stack([train * rollout, train.square(), rollout.square()], dim=1))
    covariance, *variances = moments.unbind(1)
    constant = (variances[0] <= 1e-24 * counts) | (variances[1] <= 1e-24 * counts)
    pearson = torch.where(constant, torch.nan, covariance / (variances[0] * variances[1]).sqrt())
    columns = {"kl": means[:, 0], "k3_kl": means[:, 1], "log_prob_abs_diff": means[:, 2], "pearson": pearson}
    return {name: column[:size] for name, column in columns.items()}
