"""Losses of single tokens, summed: what ``TokenLoss`` names. No mean, no weight of the batch, no mask but the columns.

In the formulas p is a target's log-prob, q its log-prob when it was sampled (column rollout_log_probs), r = exp(p - q),
A the column advantages, sg a stop of the gradient. Names, arguments and defaults are those of Tinker's API.

``policy_loss`` has the losses of a training run: those are weighted over a mini-batch, corrected and rejected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_retool.algorithms.policy_loss import MAX_LOG_RATIO, clipped_losses, sequence_log_ratio
from megatron_retool.algorithms.ragged import contiguous_ids, describe
from megatron_retool.registry import Extension, ExtensionError, Registry
from megatron_retool.target_sequences import RequestRefused, TokenLoss


@dataclass(frozen=True)
class TokenLossInputs:
    """Targets of whole sequences, laid end to end.

    Attributes:
        log_probs: float [t], of the targets, with a gradient.
        columns: float [t] by name, as the caller gave them.
        sequence_ids: any integers that are equal inside a sequence and differ between sequences.
    """

    log_probs: Tensor
    columns: Mapping[str, Tensor]
    sequence_ids: Tensor

    def column(self, name: str) -> Tensor:
        """float [t].

        Raises:
            RequestRefused: the caller gave no such column.
        """
        if name not in self.columns:
            given = ", ".join(sorted(self.columns)) or "none"
            raise RequestRefused(f"{name}: the loss needs this column, and those given are {given}: add it")
        return self.columns[name]

    @property
    def log_ratio(self) -> Tensor:
        """p - q: float [t] with a gradient, bounded so that its exponential is finite."""
        return (self.log_probs - self.column("rollout_log_probs")).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def thresholds(self, low: float, high: float) -> tuple[float | Tensor, float | Tensor]:
        """Where a ratio is clipped: the columns clip_low and clip_high, and these numbers in place of a missing one."""
        if not {"clip_low", "clip_high"} & set(self.columns):
            return low, high
        like = self.log_probs.detach()
        return (
            self.columns.get("clip_low", torch.full_like(like, low)),
            self.columns.get("clip_high", torch.full_like(like, high)),
        )


TokenLossFunction = Callable[..., Tensor]
"""loss(inputs: TokenLossInputs, *, its own arguments): float [t], the loss of every target."""

token_losses: Registry[TokenLossFunction] = Registry("loss", takes=("inputs",), kwargs_key="loss.arguments")


@token_losses.register("cross_entropy")
def cross_entropy(inputs: TokenLossInputs) -> Tensor:
    """-w p, with the column weights as w."""
    return -inputs.column("weights") * inputs.log_probs


@token_losses.register("importance_sampling")
def importance_sampling(inputs: TokenLossInputs) -> Tensor:
    """-r A."""
    return -inputs.log_ratio.exp() * inputs.column("advantages")


@token_losses.register("ppo")
def ppo(inputs: TokenLossInputs, *, clip_low: float = 0.8, clip_high: float = 1.2) -> Tensor:
    """-min(r A, clip(r, clip_low, clip_high) A): arXiv:1707.06347, eq. 7, with thresholds of the ratio."""
    low, high = inputs.thresholds(clip_low, clip_high)
    return clipped_losses(inputs.log_ratio.exp(), inputs.column("advantages"), low, high)[0]


@token_losses.register("cispo")
def cispo(inputs: TokenLossInputs, *, clip_low: float = 0.8, clip_high: float = 1.2) -> Tensor:
    """-sg(clip(r, clip_low, clip_high)) p A: arXiv:2506.13585, eqs. 4-5."""
    low, high = inputs.thresholds(clip_low, clip_high)
    ratio = inputs.log_ratio.detach().exp()
    return -ratio.clamp(low, high) * inputs.log_probs * inputs.column("advantages")  # type: ignore[arg-type]


@token_losses.register("dro")
def dro(inputs: TokenLossInputs, *, beta: float = 0.05) -> Tensor:
    """-(p A - beta / 2 (p - q)^2): direct reward optimisation (after arXiv:2405.19107), as Tinker documents it."""
    distance = inputs.log_probs - inputs.column("rollout_log_probs")
    return -(inputs.log_probs * inputs.column("advantages") - 0.5 * beta * distance.square())


@token_losses.register("gspo")
def gspo(inputs: TokenLossInputs, *, clip_low: float = 0.8, clip_high: float = 1.2) -> Tensor:
    """``ppo`` with sg(s) exp(p - sg(p)) as r, where s = exp(mean of p - q over the sequence's counted targets).

    The column sequence_ratio_mask counts a target where it is not 0. arXiv:2507.18071, eqs. 13-14.
    """
    counted = inputs.column("sequence_ratio_mask") != 0
    own = inputs.log_probs - inputs.column("rollout_log_probs")
    owners, count = contiguous_ids(inputs.sequence_ids)
    # A target that is not counted has the ratio of its sequence too, and its own gradient.
    mean = sequence_log_ratio(torch.where(counted, own, 0.0).detach(), counted, owners, count)
    ratio = (mean + (own - own.detach())).exp()
    low, high = inputs.thresholds(clip_low, clip_high)
    return clipped_losses(ratio, inputs.column("advantages"), low, high)[0]


def bind_token_loss(loss: TokenLoss, columns: Collection[str]) -> Extension[TokenLossFunction]:
    """The loss with its arguments, after one call on a few made-up targets that have these columns.

    What is wrong with a request is then known before any rank computes: an error within a pass of the model would
    leave ranks waiting for one another.

    Raises:
        RequestRefused: the loss is unknown, an argument is unknown or no finite number, a column is missing, or a
            loss of one's own raises, returns something else than float [t], or has no gradient to ``log_probs``.
    """
    for name, value in loss.arguments.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise RequestRefused(f"loss.arguments.{name}={value!r}: give a finite number")
    try:
        bound = token_losses.bind(loss.name, loss.arguments)
        log_probs = torch.full((3,), -1.0, requires_grad=True)
        given = {name: torch.full((3,), 0.5) for name in columns}
        inputs = TokenLossInputs(log_probs, given, torch.tensor([0, 0, 1]))
        # A rank that has fewer micro-batches than others computes one without a sequence.
        token_loss(TokenLossInputs(log_probs[:0], {n: c[:0] for n, c in given.items()}, inputs.sequence_ids[:0]), bound)
        if not token_loss(inputs, bound).requires_grad:
            raise ExtensionError(
                f"{bound.label}: it has no gradient to inputs.log_probs: compute it without detach() or .item()"
            )
    except ExtensionError as error:
        raise RequestRefused(str(error)) from error
    return bound


def token_loss(inputs: TokenLossInputs, loss: Extension[TokenLossFunction]) -> Tensor:
    """The loss of every target, float [t].

    Raises:
        RequestRefused: a column is missing.
        ExtensionError: the function raised, or returned something else.
    """
    try:
        losses = loss(inputs)
    except RequestRefused as error:
        raise RequestRefused(f"{loss.label}: {error}") from error
    except Exception as error:
        raise ExtensionError(f"{loss.label}: {loss.raised(error)}") from error
    tokens = list(inputs.log_probs.shape)
    if not (isinstance(losses, Tensor) and list(losses.shape) == tokens and losses.is_floating_point()):
        raise ExtensionError(
            f"{loss.label}: it returned {describe(losses)}: return the loss of each target, a float tensor of shape "
            f"{tokens} (that of inputs.log_probs), without summing"
        )
    return losses
