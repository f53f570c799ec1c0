"""What an update minimises: losses of a micro-batch and the head's output, made of the mini-batch's columns."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_retool.algorithms.policy_loss import (
    LossOutput,
    PolicyLossInputs,
    PolicyObjective,
    policy_loss,
    value_loss,
    with_own_old_log_probs,
)
from megatron_retool.algorithms.settings import RolloutCorrectionSettings
from megatron_retool.algorithms.top_tokens import top_tokens_divergence
from megatron_retool.learner.micro_batch import MicroBatch
from megatron_retool.learner.pipeline import reported_once, whole_sequences
from megatron_retool.registry import Need
from megatron_retool.target_sequences import TopTokens
from megatron_retool.trajectory import TrajectoryBatch

FloatArray = npt.NDArray[np.float32]
MicroBatchLoss = Callable[[MicroBatch, Tensor], LossOutput]
"""loss(micro_batch, output of the head)."""


KEPT_TOKENS = "kept_tokens"
"""Of ``FusedPolicyLoss``: how many sampled tokens of the mini-batch give loss."""


def policy_update_loss(mini_batch: TrajectoryBatch, objective: PolicyObjective) -> MicroBatchLoss:
    """The policy loss against the old log-probs of the mini-batch's columns.

    Raises:
        ValueError: a column is missing.
    """
    columns = _policy_columns(mini_batch, objective, "old_log_probs")

    def loss(micro_batch: MicroBatch, output: Tensor) -> LossOutput:
        log_probs, entropy = whole_sequences(micro_batch, output)
        own = {name: micro_batch.column(column) for name, column in columns.items()}
        result = policy_loss(_inputs(mini_batch, micro_batch, log_probs, entropy, own), objective)
        return LossOutput(result.loss, reported_once(micro_batch, result.metrics))

    return loss


class FusedPolicyLoss:
    """The policy loss where old log-probs are those of the update's own forward pass, corrected within it.

    Columns as for ``policy_update_loss``, without old_log_probs and importance_weights, and with keep: what may give
    loss before the rollout correction, which loss_weights say too.

    Attributes:
        found: float32 [2, T], log-probs and entropy of the micro-batches that the loss was taken of and that this rank
            reports; 0 elsewhere, and at tokens outside the loss mask.

    Raises:
        ValueError: a column is missing.
    """

    def __init__(
        self,
        mini_batch: TrajectoryBatch,
        objective: PolicyObjective,
        correction: RolloutCorrectionSettings,
        device: torch.device,
    ) -> None:
        self._mini_batch = mini_batch
        self._columns = _policy_columns(mini_batch, objective, "keep")
        self._columns.pop("importance_weights", None)
        self._objective = objective
        self._correction = correction
        self.found = torch.zeros(2, mini_batch.num_response_tokens, dtype=torch.float32, device=device)

    def __call__(self, micro_batch: MicroBatch, output: Tensor) -> LossOutput:
        """The micro-batch's loss and metrics; its log-probs and entropy are kept in ``found``."""
        log_probs, entropy = whole_sequences(micro_batch, output)
        positions = torch.from_numpy(micro_batch.response_positions).to(self.found.device)
        if micro_batch.context_rank == 0:
            self.found[:, positions] = torch.stack([log_probs.detach(), entropy.detach()])
        own = {name: micro_batch.column(column) for name, column in self._columns.items()}
        may_give_loss = own.pop("keep") > 0
        inputs = _inputs(
            self._mini_batch, micro_batch, log_probs, entropy, {**own, "old_log_probs": log_probs.detach()}
        )
        rollout_log_probs = micro_batch.column(self._mini_batch.rollout_log_probs)
        inputs, kept = with_own_old_log_probs(inputs, rollout_log_probs, self._correction)
        loss, metrics = policy_loss(inputs, self._objective)
        count = (kept & may_give_loss).sum().double()
        metrics = {**metrics, KEPT_TOKENS: torch.stack([count, torch.zeros_like(count)])}
        return LossOutput(loss, reported_once(micro_batch, metrics))


def _inputs(
    mini_batch: TrajectoryBatch,
    micro_batch: MicroBatch,
    log_probs: Tensor,
    entropy: Tensor,
    columns: dict[str, Tensor],
) -> PolicyLossInputs:
    return PolicyLossInputs(
        log_probs=log_probs,
        entropy=entropy,
        sequence_ids=micro_batch.sequence_ids,
        loss_mask=micro_batch.column(mini_batch.loss_mask),
        **columns,
    )


def critic_update_loss(mini_batch: TrajectoryBatch, value_clip: float) -> MicroBatchLoss:
    """The value loss; ValueError where a column is missing."""
    columns = _columns(mini_batch, ("values", "returns", "loss_weights"))

    def loss(micro_batch: MicroBatch, output: Tensor) -> LossOutput:
        (values,) = whole_sequences(micro_batch, output[None])
        column = {name: micro_batch.column(array) for name, array in columns.items()}
        result = value_loss(
            values,
            column["values"],
            column["returns"],
            micro_batch.column(mini_batch.loss_mask),
            column["loss_weights"],
            value_clip,
        )
        return LossOutput(result.loss, reported_once(micro_batch, result.metrics))

    return loss


def sft_update_loss(batch: TrajectoryBatch) -> MicroBatchLoss:
    """-sum(sft_weights * log_probs) of the tokens that a context-parallel rank has, as metric sft/loss too."""
    weights = sft_weights(batch)

    def loss(micro_batch: MicroBatch, output: Tensor) -> LossOutput:
        # The weights are sums over the batch, so each context-parallel rank may add up the tokens it has.
        share = micro_batch.column(weights)[micro_batch.slots]
        value = -(share * output[0]).sum()
        pair = torch.stack([value.detach().double(), torch.zeros((), dtype=torch.float64, device=value.device)])
        return LossOutput(value, {"sft/loss": pair})

    return loss


def top_tokens_loss(batch: TrajectoryBatch, top: TopTokens) -> MicroBatchLoss:
    """sum(sft_weights * KL) over the tokens that a context-parallel rank has, as metric sft/loss too.

    The head has read ``top.ids`` in place of each response token.
    """
    weights = sft_weights(batch)

    def loss(micro_batch: MicroBatch, output: Tensor) -> LossOutput:
        share = micro_batch.column(weights)[micro_batch.slots]
        teacher = micro_batch.column(top.log_probs)[micro_batch.slots]
        value = (share * top_tokens_divergence(output[:-1].t(), teacher)).sum()  # the last column is the entropy
        pair = torch.stack([value.detach(), torch.zeros_like(value)])
        return LossOutput(value.float(), {"sft/loss": pair})

    return loss


def sft_weights(batch: TrajectoryBatch) -> FloatArray:
    """float32 [T]: the column loss_weights; without it, that of a mean over the tokens of the loss mask."""
    if "loss_weights" in batch.columns:
        return np.where(batch.loss_mask, batch.columns["loss_weights"], 0).astype(np.float32)
    count = max(int(batch.loss_mask.sum()), 1)
    return (batch.loss_mask / count).astype(np.float32)


def _policy_columns(mini_batch: TrajectoryBatch, objective: PolicyObjective, *own: str) -> dict[str, FloatArray]:
    values = ("values", "returns") if Need.CRITIC in objective.loss.needs else ()
    return _columns(mini_batch, (*own, "advantages", "loss_weights", *values), ("importance_weights", "ref_log_probs"))


def _columns(batch: TrajectoryBatch, needed: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, FloatArray]:
    missing = [name for name in needed if name not in batch.columns]
    if missing:
        raise ValueError(f"the mini-batch lacks the column(s) {', '.join(missing)}")
    return {name: batch.columns[name] for name in (*needed, *optional) if name in batch.columns}
