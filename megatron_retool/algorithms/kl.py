"""KL penalties against a reference policy, in the loss or in the reward, and their coefficient.

With r = pi_ref / pi and actions sampled from pi (http://joschu.net/blog/kl-approx.html):

====  ===================  ==============================================================================
k1    -log r               unbiased, high variance; as a *loss* its expected gradient is zero
k2    (log r)^2 / 2        biased, low variance; its gradient is the unbiased gradient of the KL
k3    r - 1 - log r        unbiased, never negative, low variance; the usual loss (arXiv:2402.03300, eq. 4)
abs   |log r|              total-variation-like penalty
mse   (log r)^2 / 2        another name of k2
====  ===================  ==============================================================================

k3's gradient in log pi is 1 - r: where pi is likelier than the reference it lowers log pi, where it is less likely it
raises it, exponentially hard (at log r = 20 one token's k3 is 4.9e8). Hence a limit, verl's by default: a token's k3 is
at most 10, and has no gradient beyond that, nor beyond |log r| = 20.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_retool.algorithms.settings import BUILT_IN
from megatron_retool.errors import InputError
from megatron_retool.registry import Extension, ExtensionError, Registry

K3_LIMIT = 10.0
_MAX_EXPONENT = 20.0
KLEstimator = Callable[..., Tensor]
"""estimator(log_probs, ref_log_probs, *, settings) -> the penalty of each token, [T]."""

kl_estimators: Registry[KLEstimator] = Registry(
    "algorithm.kl_estimator", takes=("log_probs", "ref_log_probs"), declared=BUILT_IN["kl_estimator"]
)


@kl_estimators.register("k1")
def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """log pi - log pi_ref."""
    return log_probs - ref_log_probs


@kl_estimators.register("mse")
@kl_estimators.register("k2")
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """(log pi - log pi_ref)^2 / 2."""
    return 0.5 * (log_probs - ref_log_probs).square()


@kl_estimators.register("abs")
def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """|log pi - log pi_ref|."""
    return (log_probs - ref_log_probs).abs()


@kl_estimators.register("k3")
def k3(log_probs: Tensor, ref_log_probs: Tensor, *, kl_k3_limit: float | None = K3_LIMIT) -> Tensor:
    """r - 1 - log r; ``kl_k3_limit`` is the largest of a token, None: no limit."""
    # expm1 keeps the digits that exp(x) - 1 - x loses where the policies nearly agree.
    bounded = (log_probs - ref_log_probs).clamp(-_MAX_EXPONENT, _MAX_EXPONENT)
    penalty = torch.expm1(-bounded) + bounded
    return penalty if kl_k3_limit is None else penalty.clamp(max=kl_k3_limit)


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, estimator: Extension[KLEstimator]) -> Tensor:
    """Per-token estimate of KL(pi || pi_ref) at the sampled tokens; differentiable in ``log_probs``.

    Args:
        log_probs, ref_log_probs: float [T], of the sampled tokens.

    Returns:
        [T] of ``log_probs``'s dtype.

    Raises:
        ExtensionError: the estimator raised, or did not return one number for each token.
    """
    penalty = estimator.attempt(log_probs, ref_log_probs)
    if not isinstance(penalty, Tensor) or penalty.shape != log_probs.shape:
        result = list(penalty.shape) if isinstance(penalty, Tensor) else type(penalty).__name__
        raise ExtensionError(
            f"{estimator.label}: it returned {result} for {len(log_probs)} tokens: return a tensor [T]"
        )
    return penalty


def kl_reward(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    loss_mask: Tensor,
    coefficient: float,
    estimator: Extension[KLEstimator],
) -> tuple[Tensor, float]:
    """Per-token rewards -coefficient * KL for ``compute_advantages``'s ``token_rewards``, and the mean KL per token.

    Args:
        log_probs: float [T], of the policy that the advantages are for (old_log_probs).
        ref_log_probs: float [T]. loss_mask: bool [T].

    Returns:
        (float32 [T], 0 where ``loss_mask`` is false or a log-prob is not finite; mean KL over the other tokens, 0.0 if
        there are none). Rollout correction drops and counts responses with such log-probs; their group and an adaptive
        coefficient must outlive them.
    """
    with torch.no_grad():
        penalty = kl_penalty(log_probs, ref_log_probs, estimator)
        known = loss_mask & torch.isfinite(log_probs - ref_log_probs)
        penalty = torch.where(known, penalty, 0.0)
        count = int(known.sum())
        mean = float(penalty.to(torch.float64).sum()) / count if count else 0.0
        return (-coefficient * penalty).float(), mean


@dataclass(frozen=True)
class KLController:
    """Coefficient of the KL penalty: constant without a ``target``, else proportional control towards it.

    Ziegler et al., arXiv:1909.08593, section 2.2: e = clip(KL / target - 1, -0.2, 0.2);
    coefficient <- coefficient * (1 + e * samples / horizon).
    """

    coefficient: float
    target: float | None = None
    horizon: int = 10000
    """Samples over which a KL 20 % off its target changes the coefficient by 20 %."""

    def __post_init__(self) -> None:
        if self.target is not None and (self.target <= 0 or self.horizon < 1):
            raise InputError(f"an adaptive KL needs target > 0 and horizon >= 1, not {self.target} and {self.horizon}")

    def updated(self, measured_kl: float, samples: int) -> KLController:
        """The controller after a step that saw ``samples`` responses at ``measured_kl``."""
        if self.target is None:
            return self
        error = min(max(measured_kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, coefficient=self.coefficient * (1.0 + error * samples / self.horizon))
