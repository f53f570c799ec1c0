"""The divergence from a teacher as a term of the loss, beside the policy's.

In an update the head makes the distributions of policy and teacher out of hidden states, chunk by chunk, so that no
tensor of [tokens, vocabulary] exists (``log_probs.token_scores``).  It hands the divergence of each token to the loss
here, which weighs it as the policy's loss weighs the token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_retool.algorithms.policy_loss import LossOutput
from megatron_retool.learner.divergence import Divergence, TeacherHead
from megatron_retool.learner.losses import MicroBatchLoss
from megatron_retool.learner.micro_batch import MicroBatch
from megatron_retool.trajectory import TrajectoryBatch

DIVERGENCE = "distillation/divergence"


class TeacherLoss:
    """What the divergence from the teacher adds to the loss of one mini-batch.

    Args:
        divergence: which one.
        weight: algorithm.distillation.divergence_weight.
        mini_batch: whole, the same on every rank, with the column loss_weights.
        micro_batches: this rank's.
        hidden: the last hidden states that the micro-batch's teacher has of it, [n, h], in the order of
            ``micro_batches``; empty on pipeline stages before the last.
        head_weights: return this rank's rows of the teachers' output layers, [V / TP, h]; a micro-batch's teacher has
            the number ``MicroBatch.part``.
    """

    def __init__(
        self,
        divergence: Divergence,
        weight: float,
        mini_batch: TrajectoryBatch,
        micro_batches: Sequence[MicroBatch],
        hidden: Sequence[Tensor],
        head_weights: Sequence[Callable[[], Tensor]],
    ) -> None:
        self._head_weights = head_weights
        self._divergence = divergence
        self._mini_batch = mini_batch
        self._weight = weight
        self._hidden = {id(each): states for each, states in zip(micro_batches, hidden, strict=False)}
        self._noted: Tensor | None = None

    def head(self, micro_batch: MicroBatch) -> TeacherHead:
        """The teacher's part of the head's work on ``micro_batch``."""
        weight = self._head_weights[micro_batch.part]()
        return TeacherHead(self._hidden[id(micro_batch)], weight, self._divergence)

    def note(self, divergence: Tensor) -> None:
        """Keep the micro-batch's divergence, float32 [n] at this rank's tokens, for the loss that is asked for next."""
        self._noted = divergence

    def beside(self, loss: MicroBatchLoss) -> MicroBatchLoss:
        """``loss`` and this one, with the metrics of both."""

        def both(micro_batch: MicroBatch, output: Tensor) -> LossOutput:
            result = loss(micro_batch, output)
            added, metrics = self._take(micro_batch)
            return LossOutput(result.loss + added, {**result.metrics, **metrics})

        return both

    def _take(self, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        divergence, self._noted = self._noted, None
        assert divergence is not None
        # The weights are sums over the mini-batch, so each context-parallel rank may add up the tokens it has.
        weights = micro_batch.column(self._mini_batch.columns["loss_weights"])[micro_batch.slots]
        mask = micro_batch.column(self._mini_batch.loss_mask)[micro_batch.slots].bool()
        measured = divergence.detach()[mask].double()
        pair = torch.stack([measured.sum(), measured.new_tensor(measured.numel())])
        return self._weight * (weights * divergence).sum(), {DIVERGENCE: pair}
