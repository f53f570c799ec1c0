"""Losses, advantage estimators and aggregations of one's own, called on a small made-up batch before anything starts.

Six responses of three prompts, with tool results between sampled tokens, one response without a loss, ratios on both
sides of 1, advantages and rewards of both signs. A column that is not there without a declared need is not there here.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from megatron_retool.algorithms.advantages import (
    AdvantageEstimator,
    AdvantageInputs,
    advantage_estimators,
    compute_advantages,
)
from megatron_retool.algorithms.kl import KLEstimator, kl_estimators, kl_penalty
from megatron_retool.algorithms.loss_aggregation import LossAggregation, loss_aggregations, token_weights
from megatron_retool.algorithms.policy_loss import PolicyLoss, PolicyLossInputs, policy_losses, token_losses
from megatron_retool.algorithms.rollout_correction import correct_responses
from megatron_retool.algorithms.settings import RolloutCorrectionSettings
from megatron_retool.registry import Extension, ExtensionError, Need

_LENGTHS = (4, 7, 3, 5, 1, 6)


def check_policy_loss(loss: Extension[PolicyLoss]) -> None:
    """Call a loss that is not built in with the old policy equal to the current one, with another, and with no token.

    Raises:
        ExtensionError: it raises, returns something else than the loss of each token, the loss of a token is not
            finite, it has no gradient to ``log_probs``, or its metrics' names differ from call to call.
    """
    if loss.target in policy_losses.names:
        return
    names = []
    for spread in (0.0, 0.5):
        inputs = _loss_inputs(loss, spread)
        try:
            losses, metrics = token_losses(inputs, loss)
        except ExtensionError as error:
            raise _with_hint(error, loss.needs, (Need.REFERENCE, Need.CRITIC)) from error
        names.append(sorted(metrics))
        if not bool(torch.isfinite(losses[inputs.active]).all()):
            raise ExtensionError(
                f"{loss.label}: the loss of a token with log-prob near -1 and a ratio near 1 is not finite: clamp what "
                "goes into exp, and guard divisions"
            )
        total = losses[inputs.active].sum()
        gradient = torch.autograd.grad(total, inputs.log_probs, allow_unused=True)[0] if total.requires_grad else None
        if gradient is None or not bool(gradient.any()):
            raise ExtensionError(
                f"{loss.label}: its losses have no gradient to inputs.log_probs, the policy would not learn: compute "
                "them from inputs.log_probs or inputs.log_ratio, without detach() or .item()"
            )
        if not bool(torch.isfinite(gradient[inputs.active]).all()):
            raise ExtensionError(f"{loss.label}: its gradient to inputs.log_probs is not finite: guard divisions, "
                                 "roots and exponents")  # fmt: skip
    try:
        token_losses(_without_tokens(inputs), loss)
    except ExtensionError as error:
        raise ExtensionError(f"{error} (called with tensors of no element, as where a rank has no response)") from error
    if names[0] != names[1]:
        raise ExtensionError(
            f"{loss.label}: its metrics are {names[0]} in one call and {names[1]} in another: return the same names "
            "always, they are summed over micro-batches"
        )


def check_advantage(estimator: Extension[AdvantageEstimator]) -> None:
    """Call an estimator that is not built in; ExtensionError as ``compute_advantages``."""
    if estimator.target in advantage_estimators.names:
        return
    sequence_ids, loss_mask, normal = _batch()
    rewards = torch.tensor([1.0, -1.0, 1.0, 1.0, 0.0, -1.0])
    batch = AdvantageInputs(
        rewards=rewards,
        group_ids=torch.tensor([0, 0, 1, 1, 2, 2]),
        loss_mask=loss_mask,
        sequence_ids=sequence_ids,
        values=normal() if Need.CRITIC in estimator.needs else None,
        old_log_probs=torch.where(loss_mask, -normal().abs(), 0.0),
        entropy=normal().abs() if Need.ENTROPY in estimator.needs else None,
        ref_log_probs=torch.where(loss_mask, -normal().abs(), 0.0) if Need.REFERENCE in estimator.needs else None,
        # What else the reward function returns is not known here.
        reward_info=[defaultdict(float, score=float(reward), acc=float(reward > 0)) for reward in rewards],
    )
    try:
        compute_advantages(estimator, batch)
    except ExtensionError as error:
        raise _with_hint(error, estimator.needs, (Need.CRITIC, Need.REFERENCE, Need.ENTROPY)) from error


def check_aggregation(aggregation: Extension[LossAggregation]) -> None:
    """Call an aggregation that is not built in, on responses of which one has no token, and then on empty ones.

    Raises:
        ExtensionError: as ``token_weights``.
    """
    if aggregation.target in loss_aggregations.names:
        return
    sequence_ids, loss_mask, _ = _batch()
    for mask in (loss_mask & (sequence_ids != 2), torch.zeros_like(loss_mask)):
        token_weights(aggregation, mask, sequence_ids, len(_LENGTHS), max_response_length=max(_LENGTHS))


def check_kl_estimator(estimator: Extension[KLEstimator]) -> None:
    """Call an estimator that is not built in, on policies that agree and that differ, and on no token.

    Raises:
        ExtensionError: as ``kl_penalty``; or the penalty of a token is not finite, or has no gradient to ``log_probs``.
    """
    if estimator.target in kl_estimators.names:
        return
    _, _, normal = _batch()
    log_probs = (-1.0 - 0.3 * normal().abs()).requires_grad_()
    penalty = kl_penalty(log_probs, log_probs.detach() + 0.1 * normal(), estimator)
    if not bool(torch.isfinite(penalty).all()):
        raise ExtensionError(f"{estimator.label}: the penalty of a token with log-prob near -1 is not finite")
    gradient = torch.autograd.grad(penalty.sum(), log_probs)[0] if penalty.requires_grad else None
    if gradient is None or not bool(gradient.any()):
        raise ExtensionError(
            f"{estimator.label}: its penalty has no gradient to log_probs: compute it without detach() or .item()"
        )
    kl_penalty(log_probs[:0], log_probs[:0].detach(), estimator)


def check_correction(correction: RolloutCorrectionSettings) -> None:
    """Correct a batch, and one without tokens, where the mode or a rule is not built in.

    Raises:
        ExtensionError: as ``rollout_correction``; or a weight is negative or not finite.
    """
    if not correction.has_own:
        return
    sequence_ids, loss_mask, normal = _batch()
    train = -1.0 - 0.3 * normal().abs()
    rollout = train + 0.1 * normal()
    result = correct_responses(train, rollout, loss_mask, sequence_ids, len(_LENGTHS), correction)
    if not bool((torch.isfinite(result.importance_weights) & (result.importance_weights >= 0)).all()):
        raise ExtensionError(
            f"algorithm.rollout_correction.mode={correction.mode}: a weight of a ratio near 1 is negative or not finite"
        )
    correct_responses(train[:0], rollout[:0], loss_mask[:0], sequence_ids[:0], 0, correction)


_COLUMNS = {Need.CRITIC: "values", Need.REFERENCE: "ref_log_probs", Need.ENTROPY: "entropy"}


def _with_hint(error: ExtensionError, needs: frozenset[Need], possible: tuple[Need, ...]) -> ExtensionError:
    """An undeclared need shows as None where a column is meant."""
    missing = [need for need in possible if need not in needs]
    if " raised " not in str(error) or "None" not in str(error) or not missing:
        return error
    hints = ", ".join(f"{_COLUMNS[need]} (@needs({need.value!r}))" for need in missing)
    return ExtensionError(f"{error}. None without a declared need: {hints}, with needs of megatron_retool.registry")


def _loss_inputs(loss: Extension[PolicyLoss], spread: float) -> PolicyLossInputs:
    sequence_ids, loss_mask, normal = _batch()
    log_probs = torch.where(loss_mask, -1.0 - 0.3 * normal().abs(), 0.0)
    critic = Need.CRITIC in loss.needs
    weights = torch.where(loss_mask & (sequence_ids != 2), 1.0 / float(loss_mask.sum()), 0.0)
    return PolicyLossInputs(
        log_probs=log_probs.clone().requires_grad_(),
        old_log_probs=torch.where(loss_mask, log_probs + spread * normal(), 0.0),
        advantages=torch.where(loss_mask, normal(), 0.0),
        loss_mask=loss_mask,
        loss_weights=weights,
        sequence_ids=sequence_ids,
        importance_weights=torch.ones(len(loss_mask)),
        entropy=normal().abs().requires_grad_(),
        ref_log_probs=torch.where(loss_mask, log_probs + 0.1 * normal(), 0.0) if Need.REFERENCE in loss.needs else None,
        values=normal() if critic else None,
        returns=normal() if critic else None,
    )


def _without_tokens(inputs: PolicyLossInputs) -> PolicyLossInputs:
    columns = {name: getattr(inputs, name) for name in PolicyLossInputs.__dataclass_fields__}
    empty: dict[str, Any] = {name: None if column is None else column[:0] for name, column in columns.items()}
    return PolicyLossInputs(**empty)


def _batch() -> tuple[Tensor, Tensor, _Normal]:
    """(sequence_ids, loss_mask, normal): every other response has a tool result at its second and third token."""
    lengths = torch.tensor(_LENGTHS)
    sequence_ids = torch.arange(len(lengths)).repeat_interleave(lengths)
    place = torch.cat([torch.arange(length) for length in _LENGTHS])
    tool = (sequence_ids % 2 == 1) & (place >= 1) & (place <= 2)
    return sequence_ids, ~tool, _Normal(len(sequence_ids))


class _Normal:
    """Columns of normal numbers, the same in every run, from a random stream of their own."""

    def __init__(self, length: int) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._length = length

    def __call__(self) -> Tensor:
        return torch.randn(self._length, generator=self._generator)
