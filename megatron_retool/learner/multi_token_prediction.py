"""Layers for multi-token prediction behind the model's own (arXiv:2412.19437, section 2.2), trained beside the policy.

At a token t of a text, layer k reads what the one before it says of t (the first: the model's last hidden state) and
the embedding of token t + k, and predicts token t + k + 1 through the model's own head.  Its loss is the cross-entropy
of the tokens of the loss mask at temperature 1, meaned over the mini-batch and the layers, times
learner.mtp.loss_scaling_factor.  The modules are Megatron-Core's.  Which token is behind which is planned with the
micro-batch (``micro_batch.Prediction``), where a text ends and what other context-parallel ranks hold is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from torch import Tensor

from megatron_retool.algorithms.policy_loss import LossOutput
from megatron_retool.learner.losses import MicroBatchLoss
from megatron_retool.learner.micro_batch import MicroBatch
from megatron_retool.learner.stream import ramp
from megatron_retool.trajectory import TrajectoryBatch

LOSS, BEST = "learner/mtp_loss", "learner/mtp_acceptance"


class PackedPredictor(MultiTokenPredictionLayer):
    """Megatron's layer, told the tokens that ``micro_batch.Prediction`` names.

    Args:
        hidden_first: the hidden state is projected before the embedding, as ``enorm`` norms it; False: behind it.
    """

    def __init__(self, *args: Any, hidden_first: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hidden_first = hidden_first

    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        embedding: Callable[..., Tensor],
        hidden_states: Tensor,
        packed_seq_params: Any = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        # Megatron's own rolls tokens, position by position in each text and between context-parallel ranks.
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.config.mtp_detach_heads):
            embedded = embedding(input_ids, position_ids)
        halves = (hidden_states, embedded) if self.hidden_first else (embedded, hidden_states)
        return (input_ids, position_ids, padding_mask, *halves)


class PredictionLoss:
    """What the layers' predictions add to the loss of one mini-batch.

    Args:
        mini_batch: whole, the same on every rank.
        layers: how many there are.
        scaling_factor: learner.mtp.loss_scaling_factor.
    """

    def __init__(self, mini_batch: TrajectoryBatch, layers: int, scaling_factor: float) -> None:
        lengths = mini_batch.response_lengths.astype(np.int64)
        places = np.repeat(mini_batch.prompt_lengths.astype(np.int64), lengths) + ramp(lengths)
        counts = [int((mini_batch.loss_mask & (places > depth)).sum()) for depth in range(1, layers + 1)]
        self._weights = [scaling_factor / (layers * max(count, 1)) for count in counts]
        self._of_micro_batch: Sequence[tuple[Tensor, Tensor]] = ()

    def note(self, predictions: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Keep the micro-batch's predictions, one for each layer, for the loss that is asked for next.

        Args:
            predictions: log-probs, float32 [n], of this rank's tokens; bool [n], whether none was more probable.
        """
        self._of_micro_batch = predictions

    def beside(self, loss: MicroBatchLoss) -> MicroBatchLoss:
        """``loss`` and this one, with the metrics of both."""

        def both(micro_batch: MicroBatch, output: Tensor) -> LossOutput:
            result = loss(micro_batch, output)
            added, metrics = self._take()
            return LossOutput(result.loss + added, {**result.metrics, **metrics})

        return both

    def _take(self) -> tuple[Tensor, dict[str, Tensor]]:
        predictions, self._of_micro_batch = self._of_micro_batch, ()
        parts = [-weight * log_probs.sum() for weight, (log_probs, _) in zip(self._weights, predictions, strict=True)]
        log_probs, best = (torch.cat(column).detach().double() for column in zip(*predictions, strict=True))
        count = log_probs.new_tensor(log_probs.numel())
        sums = torch.stack([-log_probs.sum(), count, best.sum(), count])
        return torch.stack(parts).sum(), {LOSS: sums[:2], BEST: sums[2:]}
