"""Advantage estimators over ragged responses.

All of them answer one question, by how much an action was better than expected, and differ in what they expect:

============================  ====================================================================  =================
``advantage``                 expectation                                                           paper
============================  ====================================================================  =================
grpo                          mean reward of the prompt's group, in units of its std                arXiv:2402.03300
dr_grpo                       mean reward of the group, no std (it favours easy and hard prompts)   arXiv:2503.20783
rloo                          mean reward of the *other* members of the group                       arXiv:2402.14740
reinforce_plus_plus           mean reward-to-go over all tokens of the batch                        arXiv:2501.03262
reinforce_plus_plus_baseline  mean reward of the group, then whitened over the batch                arXiv:2501.03262
gae                           a critic's value of the state                                         arXiv:1506.02438
reverse_kl                    what a teacher says of the token                                      arXiv:2306.08543
zero                          none: every advantage is 0
============================  ====================================================================  =================

Statistics are those of the whole batch handed in: call with all groups of a step, never with a rank's share.
A group of one has nothing to be compared with and a group of equal rewards shows no difference: both give exactly 0
under every group-relative estimator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_retool.algorithms.ragged import (
    contiguous_ids,
    describe,
    discounted_sum_to_go,
    last_token,
    require_matching_shapes,
    sequence_max,
    sequence_min,
    sequence_sum,
)
from megatron_retool.algorithms.settings import BUILT_IN
from megatron_retool.registry import Extension, ExtensionError, Need, Registry

_EPSILON = 1e-6


class Advantages(NamedTuple):
    """What an estimator returns; a plain tuple does too, and only ``advantages`` where no critic learns.

    Both float [T], 0 where ``loss_mask`` is false. ``returns`` are what a critic should have predicted.
    """

    advantages: Tensor
    returns: Tensor


@dataclass(frozen=True)
class AdvantageInputs:
    """All responses of a step: N responses, T tokens, those of one response together and in order.

    Attributes:
        rewards: float [N], one per response, after shaping.
        group_ids: int [N]; responses to the same prompt share one. Any integers, in any order.
        loss_mask: bool [T], true at tokens that the policy sampled.
        sequence_ids: int64 [T] in [0, N).
        values: float [T], the critic's value *before* each token; there for estimators that need CRITIC.
        token_rewards: float [T], 0 where ``loss_mask`` is false, added to the rewards where they arise, e.g.
            -beta * KL to the reference (``kl.kl_reward``).
        old_log_probs: float [T], of the policy that sampled, by the learner (in bypass mode by the engine).
        entropy: float [T], of that policy at each token; there for estimators that need ENTROPY.
        ref_log_probs: float [T], of the reference policy; there for estimators that need REFERENCE.
        reward_info: [N], what the reward function returned for each response.
    """

    rewards: Tensor
    group_ids: Tensor
    loss_mask: Tensor
    sequence_ids: Tensor
    values: Tensor | None = None
    token_rewards: Tensor | None = None
    old_log_probs: Tensor | None = None
    entropy: Tensor | None = None
    ref_log_probs: Tensor | None = None
    reward_info: Sequence[Mapping[str, Any]] = ()

    @functools.cached_property
    def scores(self) -> Tensor:
        """float64 [N]: the rewards with the sum of each response's token rewards."""
        scores = self.rewards.to(torch.float64)
        if self.token_rewards is not None:
            scores = scores + sequence_sum(self.token_rewards, self.sequence_ids, len(self.rewards))
        return scores

    def per_token(self, values: Tensor) -> Tensor:
        """A number for each response as one for each of its sampled tokens: [N] -> float32 [T], 0 elsewhere."""
        return torch.where(self.loss_mask, values.float()[self.sequence_ids], 0.0)


AdvantageEstimator = Callable[..., Advantages | tuple[Tensor, Tensor] | Tensor]
"""estimator(batch: AdvantageInputs, *, its own settings), called once a step with all its responses."""

advantage_estimators: Registry[AdvantageEstimator] = Registry(
    "algorithm.advantage", takes=("batch",), declared=BUILT_IN["advantage"]
)


def compute_advantages(estimator: Extension[AdvantageEstimator], batch: AdvantageInputs) -> Advantages:
    """Advantages of one step, float32 [T] both.

    Raises:
        ValueError: shapes do not match, a reward is not finite, or a critic's values are missing.
        ExtensionError: the estimator raised, or what it returned are no advantages.
    """
    rewards = batch.rewards
    require_matching_shapes(rewards=rewards, group_ids=batch.group_ids)
    names = ("loss_mask", "sequence_ids", "values", "token_rewards", "old_log_probs", "entropy", "ref_log_probs")
    require_matching_shapes(**{name: getattr(batch, name) for name in names})
    if not bool(torch.isfinite(rewards).all()):
        row = int(torch.nonzero(~torch.isfinite(rewards))[0])
        raise ValueError(f"reward of response {row} is {float(rewards[row])}: score it, or drop it from the batch")
    if Need.CRITIC in estimator.needs and batch.values is None:
        raise ValueError(f"{estimator.label} needs the critic's values")
    loss_mask, token_rewards = batch.loss_mask.bool(), batch.token_rewards
    if token_rewards is not None:
        token_rewards = torch.where(loss_mask, token_rewards, 0.0)
    batch = replace(batch, loss_mask=loss_mask, token_rewards=token_rewards)
    result = estimator.attempt(batch)
    if isinstance(result, Tensor) and Need.CRITIC not in estimator.needs:
        result = (result, batch.per_token(batch.scores))
    if not (isinstance(result, tuple) and len(result) == 2):
        raise ExtensionError(
            f"{estimator.label}: it returned {describe(result)}: return (advantages, returns), two float tensors of "
            f"shape {[len(loss_mask)]} (that of batch.loss_mask); returns are what the critic should have predicted"
        )
    advantages, returns = (
        _checked(estimator, batch, name, column) for name, column in zip(Advantages._fields, result, strict=True)
    )
    return Advantages(advantages, returns)


def _checked(estimator: Extension[AdvantageEstimator], batch: AdvantageInputs, name: str, column: object) -> Tensor:
    if not (isinstance(column, Tensor) and column.shape == batch.loss_mask.shape and column.is_floating_point()):
        raise ExtensionError(
            f"{estimator.label}: the {name} are {describe(column)}: return a float tensor of shape "
            f"{list(batch.loss_mask.shape)}, one number for each token (batch.per_token makes it of one for each "
            "response)"
        )
    column = column.detach().float()  # Before they are looked at: what is finite in float64 may be infinite here.
    if estimator.target in advantage_estimators.names:
        return column
    if bool((column[~batch.loss_mask] != 0).any()):
        raise ExtensionError(
            f"{estimator.label}: the {name} are not 0 at tokens that the policy did not sample: "
            "torch.where(batch.loss_mask, …, 0.0)"
        )
    # Values of a critic that has diverged are not the estimator's fault; the update leaves such a step out.
    sound = batch.values is None or bool(torch.isfinite(batch.values).all())
    if sound and not bool(torch.isfinite(column).all()):
        token = int(torch.nonzero(~torch.isfinite(column))[0])
        raise ExtensionError(
            f"{estimator.label}: the {name} of response {int(batch.sequence_ids[token])} are {float(column[token])}: "
            "guard divisions by a standard deviation or a count of 0"
        )
    return column.float()


@advantage_estimators.register("grpo")
def grpo(batch: AdvantageInputs, *, normalize_by_std: bool = True) -> Advantages:
    """``group_relative`` to the prompt's group."""
    return _of_responses(batch, group_relative(batch.scores, batch.group_ids, normalize_by_std))


@advantage_estimators.register("dr_grpo")
def dr_grpo(batch: AdvantageInputs) -> Advantages:
    """``group_relative`` without the standard deviation."""
    return _of_responses(batch, group_relative(batch.scores, batch.group_ids, normalize_by_std=False))


@advantage_estimators.register("rloo")
def rloo(batch: AdvantageInputs) -> Advantages:
    """``leave_one_out`` of the prompt's group."""
    return _of_responses(batch, leave_one_out(batch.scores, batch.group_ids))


@advantage_estimators.register("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(batch: AdvantageInputs) -> Advantages:
    """``dr_grpo``, whitened over the batch's tokens. arXiv:2501.03262."""
    advantages, returns = dr_grpo(batch)
    return Advantages(whiten(advantages, batch.loss_mask), returns)


@advantage_estimators.register("reinforce_plus_plus")
def reinforce_plus_plus(batch: AdvantageInputs, *, gamma: float = 1.0) -> Advantages:
    """Reward-to-go of each token with discount ``gamma``, whitened over the batch's tokens. arXiv:2501.03262."""
    per_token = place_rewards(batch.rewards, batch.loss_mask, batch.sequence_ids, "last_token", batch.token_rewards)
    to_go = _scan_sampled_tokens(per_token, batch.loss_mask, batch.sequence_ids, gamma)
    return Advantages(whiten(to_go, batch.loss_mask), to_go)


@advantage_estimators.register("gae")
def gae(
    batch: AdvantageInputs,
    *,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    gae_reward: str = "last_token",
    gae_reward_last_share: float = 0.0,
    gae_level: str = "token",
    gae_whiten: bool = True,
) -> Advantages:
    """``generalized_advantages`` on a critic's values.

    Args:
        gae_reward, gae_reward_last_share: where a response's reward goes: see ``place_rewards``.
        gae_level: "token", or "sequence" for the mean over each response.
        gae_whiten: whiten over the batch's tokens.
    """
    loss_mask, sequence_ids, responses = batch.loss_mask, batch.sequence_ids, len(batch.rewards)
    assert batch.values is not None
    per_token = place_rewards(
        batch.rewards, loss_mask, sequence_ids, gae_reward, batch.token_rewards, last_share=gae_reward_last_share
    )
    advantages, returns = generalized_advantages(per_token, batch.values, loss_mask, sequence_ids, gamma, gae_lambda)
    if gae_level == "sequence":
        counts = sequence_sum(loss_mask, sequence_ids, responses).clamp(min=1)
        mean = sequence_sum(advantages, sequence_ids, responses) / counts
        advantages = torch.where(loss_mask, mean[sequence_ids], 0.0)
    if gae_whiten:
        advantages = whiten(advantages, loss_mask)
    return Advantages(advantages, returns)


@advantage_estimators.register("reverse_kl")
def reverse_kl(batch: AdvantageInputs, *, reward_weight: float = 0.0, normalize_by_std: bool = True) -> Advantages:
    """On-policy distillation: log of the reference policy, the teacher, minus log of the policy, at each sampled token.

    Its expectation under the policy is minus the KL from policy to teacher at that place, so a step on it is one of
    policy gradient on the reverse KL, token by token without what comes later (Gu et al. 2024, MiniLLM, without its
    long-term part; Agarwal et al. 2024, GKD, from the policy's own samples only).

    Args:
        reward_weight: how much of ``grpo``'s advantage is added.
    """
    assert batch.old_log_probs is not None
    assert batch.ref_log_probs is not None
    advantages = torch.where(batch.loss_mask, batch.ref_log_probs - batch.old_log_probs, 0.0)
    of_rewards, returns = grpo(batch, normalize_by_std=normalize_by_std)
    return Advantages(advantages + reward_weight * of_rewards, returns)


@advantage_estimators.register("zero")
def zero(batch: AdvantageInputs) -> Advantages:
    """No advantage: only terms beside the policy gradient teach, such as the divergence from a teacher."""
    return Advantages(torch.zeros(len(batch.loss_mask)), batch.per_token(batch.scores))


def _of_responses(batch: AdvantageInputs, relative: Tensor) -> Advantages:
    return Advantages(batch.per_token(relative), batch.per_token(batch.scores))


def group_relative(rewards: Tensor, group_ids: Tensor, normalize_by_std: bool, epsilon: float = _EPSILON) -> Tensor:
    """A_i = (r_i - mean(group)) / (std(group) + epsilon), or without the division.

    GRPO, arXiv:2402.03300, section 4.1.2; without std it is Dr. GRPO, arXiv:2503.20783, section 3.2. The standard
    deviation is the unbiased one (n - 1).

    Args:
        rewards: [N]. group_ids: int [N].

    Returns:
        float64 [N]; exactly 0 in groups of one and in groups of equal rewards.
    """
    groups, num_groups = contiguous_ids(group_ids)
    rewards = rewards.to(torch.float64)
    counts = sequence_sum(torch.ones_like(rewards), groups, num_groups)
    mean = sequence_sum(rewards, groups, num_groups) / counts
    centred = rewards - mean[groups]
    if normalize_by_std:
        variance = sequence_sum(centred.square(), groups, num_groups) / (counts - 1).clamp(min=1)
        centred = centred / (variance.sqrt()[groups] + epsilon)
    return torch.where(_all_equal(rewards, groups, num_groups)[groups], 0.0, centred)


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """A_i = r_i - mean of the others' rewards = n / (n - 1) * (r_i - mean(group)). RLOO, arXiv:2402.14740, eq. 7.

    Args:
        rewards: [N]. group_ids: int [N].

    Returns:
        float64 [N]; exactly 0 in groups of one and in groups of equal rewards.
    """
    groups, num_groups = contiguous_ids(group_ids)
    rewards = rewards.to(torch.float64)
    counts = sequence_sum(torch.ones_like(rewards), groups, num_groups)
    mean = sequence_sum(rewards, groups, num_groups) / counts
    scale = counts / (counts - 1).clamp(min=1)
    centred = (rewards - mean[groups]) * scale[groups]
    return torch.where(_all_equal(rewards, groups, num_groups)[groups], 0.0, centred)


def _all_equal(rewards: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    # Rounding in the mean would otherwise leave 1e-17 / epsilon where there is no difference at all.
    return sequence_max(rewards, groups, num_groups) == sequence_min(rewards, groups, num_groups)


def place_rewards(
    rewards: Tensor,
    loss_mask: Tensor,
    sequence_ids: Tensor,
    placement: str,
    token_rewards: Tensor | None = None,
    *,
    last_share: float = 0.0,
) -> Tensor:
    """Give each response's reward to its tokens.

    "last_token" puts it on the last sampled token. "spread" gives every sampled token an equal share, "linear_decay"
    shares that fall linearly from the first sampled token to the last (see ``linear_decay_shares``). All shares of a
    response add up to 1, so that its undiscounted return does not grow with its length. A response without a sampled
    token has nowhere to put a reward and loses it.

    Args:
        rewards: [N]. loss_mask: bool [T]. sequence_ids: int64 [T], each sequence's tokens together and in order.
        token_rewards: [T], added on sampled tokens.
        last_share: of "linear_decay".

    Returns:
        float64 [T], 0 where ``loss_mask`` is false.

    Raises:
        ValueError: an unknown placement.
    """
    placed = torch.zeros(len(loss_mask), dtype=torch.float64, device=rewards.device)
    sampled = torch.nonzero(loss_mask).squeeze(1)
    owners = sequence_ids[sampled]
    if placement == "last_token":
        ends = last_token(owners)
        placed[sampled[ends]] = rewards.to(torch.float64)[owners[ends]]
    elif placement == "spread":
        counts = sequence_sum(loss_mask, sequence_ids, len(rewards))
        placed[sampled] = (rewards.to(torch.float64) / counts.clamp(min=1))[owners]
    elif placement == "linear_decay":
        placed[sampled] = rewards.to(torch.float64)[owners] * linear_decay_shares(owners, len(rewards), last_share)
    else:
        raise ValueError(f"algorithm.gae_reward={placement!r} is none of last_token, spread and linear_decay")
    if token_rewards is not None:
        placed[sampled] += token_rewards.to(torch.float64)[sampled]
    return placed


def linear_decay_shares(owners: Tensor, responses: int, last_share: float) -> Tensor:
    """Shares of a response's reward that change linearly along its n sampled tokens and add up to 1.

    The j-th token's weight is w_j = 1 - (1 - last_share) (j - 1) / (n - 1), its share w_j / sum(w), where the sum is
    n (1 + last_share) / 2. With ``last_share`` 0 the last token gets nothing, with 1 all get the same, above 1 shares
    grow. A single token gets everything.

    Args:
        owners: int64 [t], the response of each sampled token; those of one response together and in order.
        responses: N.
        last_share: weight of the last token in units of the first's, at least 0.

    Returns:
        float64 [t].
    """
    counts = sequence_sum(torch.ones_like(owners), owners, responses)
    starts = counts.cumsum(0) - counts
    place = torch.arange(len(owners), device=owners.device) - starts[owners]
    progress = place.to(torch.float64) / (counts[owners] - 1).clamp(min=1)
    weights = 1.0 - (1.0 - last_share) * progress
    return weights / sequence_sum(weights, owners, responses)[owners]


def generalized_advantages(
    token_rewards: Tensor, values: Tensor, loss_mask: Tensor, sequence_ids: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """GAE(gamma, lambda), arXiv:1506.02438, eqs. 11-16, over the sampled tokens of each response.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lambda A_{t+1}, where t + 1 is the next token that the
    *policy* sampled: a tool result is the environment's move inside one transition, its tokens are no states to
    bootstrap from. The value after the last sampled token is 0.

    Args:
        token_rewards, values: float [T]. loss_mask: bool [T]. sequence_ids: int64 [T], tokens together and in order.

    Returns:
        (advantages, returns = advantages + values), float64 [T], 0 where ``loss_mask`` is false.
    """
    sampled = torch.nonzero(loss_mask).squeeze(1)
    owners = sequence_ids[sampled]
    state_values = values.to(torch.float64)[sampled]
    next_values = torch.zeros_like(state_values)
    next_values[:-1] = torch.where(owners[:-1] == owners[1:], state_values[1:], 0.0)
    deltas = token_rewards.to(torch.float64)[sampled] + gamma * next_values - state_values
    estimates = discounted_sum_to_go(deltas, owners, gamma * gae_lambda)
    advantages = torch.zeros(len(loss_mask), dtype=torch.float64, device=values.device)
    returns = torch.zeros_like(advantages)
    advantages[sampled] = estimates
    returns[sampled] = estimates + state_values
    return advantages, returns


def _scan_sampled_tokens(values: Tensor, loss_mask: Tensor, sequence_ids: Tensor, discount: float) -> Tensor:
    sampled = torch.nonzero(loss_mask).squeeze(1)
    result = torch.zeros(len(loss_mask), dtype=torch.float64, device=values.device)
    result[sampled] = discounted_sum_to_go(values[sampled], sequence_ids[sampled], discount)
    return result


def whiten(values: Tensor, loss_mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Zero mean and unit variance over the sampled tokens of the whole batch; unbiased variance, as verl's.

    Args:
        values: float [T]. loss_mask: bool [T].

    Returns:
        float64 [T], 0 where ``loss_mask`` is false, and everywhere if all sampled values are equal.
    """
    result = torch.zeros(len(values), dtype=torch.float64, device=values.device)
    chosen = values.to(torch.float64)[loss_mask]
    if len(chosen) == 0 or bool(chosen.max() == chosen.min()):
        return result
    result[loss_mask] = (chosen - chosen.mean()) / (chosen.var(unbiased=True) + epsilon).sqrt()
    return result


def share_branch_advantages(advantages: Tensor, loss_mask: Tensor, shared_ids: Tensor) -> Tensor:
    """ARPO's hard advantage estimate: a token that several branches share gets the mean of their advantages.

    arXiv:2507.19849, section 3.2: tokens sampled once and then copied into k branches are one action with k outcomes.
    (The soft estimate needs nothing: equal prefixes have equal ratios, so the branches' gradients average themselves.)

    Args:
        advantages: float [T]. loss_mask: bool [T].
        shared_ids: int64 [T]; copies of the same sampled token carry the same id, every other token an id of its own.

    Returns:
        float32 [T], 0 where ``loss_mask`` is false.
    """
    sampled = torch.nonzero(loss_mask).squeeze(1)
    owners, count = contiguous_ids(shared_ids[sampled])
    totals = sequence_sum(advantages[sampled], owners, count)
    copies = sequence_sum(torch.ones_like(owners), owners, count)
    result = torch.zeros(len(advantages), dtype=torch.float32, device=advantages.device)
    result[sampled] = (totals / copies)[owners].float()
    return result
