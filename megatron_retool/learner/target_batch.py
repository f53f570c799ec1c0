"""Sequences with given targets in the learner's form, their loss, and what the learner says of them.

They become a ``TrajectoryBatch`` of responses without prompts, which the packer plans as any other; the head reads each
token for the targets that the caller gave it (``Packer.micro_batches``).  Sequences of one batch may have different
numbers of targets: the widest counts, and what the others lack is filled up and not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from conversion.model.architecture import Architecture
from megatron_retool.algorithms.policy_loss import LossOutput
from megatron_retool.algorithms.token_losses import TokenLossFunction, TokenLossInputs, token_loss
from megatron_retool.learner.micro_batch import MicroBatch
from megatron_retool.learner.pipeline import whole_sequences
from megatron_retool.registry import Extension
from megatron_retool.target_sequences import FloatArray, Int64Array, RequestRefused, TargetSequence, TokenOutputs
from megatron_retool.trajectory import TrajectoryBatch


@dataclass(frozen=True)
class TargetBatch:
    """N sequences with T tokens, and at most K targets of each.

    Attributes:
        batch: the tokens, as responses without prompts.
        targets: int64 [T, K].
        counted: bool [T, K], which of them the caller gave.
        columns: float32 [T, K] by name, 0 where a target is not counted.
        shapes: of each sequence's targets.
    """

    batch: TrajectoryBatch
    targets: Int64Array
    counted: npt.NDArray[np.bool_]
    columns: dict[str, FloatArray]
    shapes: list[tuple[int, ...]]

    @classmethod
    def of(cls, sequences: Sequence[TargetSequence], architecture: Architecture) -> TargetBatch:
        """Put sequences together.

        Raises:
            RequestRefused: there is none, one is too long for the model, a token id is not of its vocabulary, or they
                have different columns.
        """
        if not sequences:
            raise RequestRefused("sequences: the list is empty: give at least one")
        names = set(sequences[0].columns)
        longest, vocab_size = architecture.longest_text, architecture.vocab_size
        for number, sequence in enumerate(sequences):
            if longest is not None and len(sequence.tokens) > longest:
                raise RequestRefused(
                    f"sequences[{number}].tokens: are {len(sequence.tokens)}, and the learner computes positions of "
                    f"this model up to {longest}"
                )
            for name, ids in (("tokens", sequence.tokens), ("targets", sequence.targets)):
                if ids.max() >= vocab_size:
                    raise RequestRefused(
                        f"sequences[{number}].{name}: holds {ids.max()}, and the model knows {vocab_size} tokens"
                    )
            if set(sequence.columns) != names:
                raise RequestRefused(
                    f"sequences[{number}]: has the columns {sorted(sequence.columns)}, and the first one has "
                    f"{sorted(names)}: give all of them the same"
                )
        width = max(sequence.targets.size // len(sequence.tokens) for sequence in sequences)

        def wide(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
            rows = [array.reshape(len(array), -1) for array in arrays]
            return np.concatenate([np.pad(row, ((0, 0), (0, width - row.shape[1]))) for row in rows])

        return cls(
            batch=_responses([sequence.tokens for sequence in sequences]),
            targets=wide([sequence.targets for sequence in sequences]),
            counted=wide([np.ones(sequence.targets.shape, np.bool_) for sequence in sequences]),
            columns={name: wide([sequence.columns[name] for sequence in sequences]) for name in names},
            shapes=[sequence.targets.shape for sequence in sequences],
        )

    def outputs(self, found: FloatArray) -> TokenOutputs:
        """``TargetLoss.found`` of all ranks as what the caller gets."""
        log_probs, losses = (self._apart(column) for column in found)
        total = sum(float(each.sum(dtype=np.float64)) for each in losses)
        return TokenOutputs(log_probs, losses, {"loss": total})

    def _apart(self, found: FloatArray) -> list[FloatArray]:
        """A column [T, K] as an array of each sequence, in the shape of its targets."""
        ends = np.cumsum([shape[0] for shape in self.shapes])
        counted = np.split(self.counted, ends[:-1])
        rows = zip(np.split(found, ends[:-1]), counted, self.shapes, strict=True)
        return [np.ascontiguousarray(values[given].reshape(shape)) for values, given, shape in rows]


def _responses(tokens: Sequence[Int64Array]) -> TrajectoryBatch:
    lengths = np.array([len(ids) for ids in tokens], np.int32)
    total, rows = int(lengths.sum()), len(tokens)
    return TrajectoryBatch(
        prompt_ids=np.zeros(0, np.int32),
        prompt_lengths=np.zeros(rows, np.int32),
        response_ids=np.concatenate(tokens).astype(np.int32),
        response_lengths=lengths,
        loss_mask=np.ones(total, np.bool_),
        rollout_log_probs=np.zeros(total, np.float32),
        turn_ids=np.zeros(total, np.int16),
        weight_versions=np.zeros(total, np.int32),
        group_ids=np.arange(rows, dtype=np.int32),
        indices=np.zeros(rows, np.int32),
        rewards=np.zeros(rows, np.float32),
    )


class TargetLoss:
    """The sum of a token loss over a micro-batch's targets, as ``losses.MicroBatchLoss``.

    Attributes:
        found: float32 [2, T, K], log-probs and losses of the micro-batches that the loss was taken of and that this
            rank reports; 0 elsewhere.
    """

    def __init__(self, targets: TargetBatch, loss: Extension[TokenLossFunction], device: torch.device) -> None:
        self._targets = targets
        self._loss = loss
        self.found = torch.zeros(2, *targets.targets.shape, dtype=torch.float32, device=device)

    def __call__(self, micro_batch: MicroBatch, output: Tensor) -> LossOutput:
        """The micro-batch's loss, without metrics; its log-probs and losses are kept in ``found``."""
        log_probs = whole_sequences(micro_batch, output)[:-1].t()  # the last column is the entropy
        counted = micro_batch.column(self._targets.counted)
        inputs = TokenLossInputs(
            log_probs=log_probs[counted],
            columns={name: micro_batch.column(column)[counted] for name, column in self._targets.columns.items()},
            sequence_ids=micro_batch.sequence_ids.unsqueeze(1).expand_as(counted)[counted],
        )
        losses = token_loss(inputs, self._loss)
        if micro_batch.context_rank == 0:
            positions = torch.from_numpy(micro_batch.response_positions).to(self.found.device)
            each = torch.zeros_like(log_probs).masked_scatter(counted, losses.detach().to(log_probs.dtype))
            self.found[:, positions] = torch.stack([log_probs.detach(), each])
        return LossOutput(losses.sum(), {})
