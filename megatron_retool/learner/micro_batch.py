"""A packed micro-batch, as a model reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron_retool.learner.attention_pieces import Bucket, ContextBucket, SharedPrefixes

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Prediction:
    """What a layer for multi-token prediction reads of a micro-batch. t, n as in ``MicroBatch``.

    Attributes:
        input_ids: int64 [1, t], the token that each local token's layer gets: the k-th behind it in its text, for
            layer k from 1 on. 0 where the text ends before.
        head_positions: int64 [n], local tokens whose output predicts the token behind that one.
        targets: int64 [n], these tokens; all are of the head's, see ``Packer.micro_batches``.
    """

    input_ids: torch.Tensor
    head_positions: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True)
class MicroBatch:
    """One packed micro-batch, this context-parallel rank's share of it. t = its packed tokens, padding included.

    Attributes:
        rows: row of the batch of each packed sequence; empty for a filler that only keeps ranks in step.
        input_ids, position_ids: int64 [1, t].
        cu_seqlens: int32 [sequences + 1], boundaries in the whole (not the local) stream, padding included.
        head_positions: int64 [n], local tokens whose output the head reads: each predicts a response token.
        targets: int64 [n], the predicted tokens; [n, K] where the caller gave K of each.
        slots: int64 [n], where those stand among the micro-batch's response tokens.
        response_positions: int64 [R], the micro-batch's response tokens as positions in the batch's columns, whole
            sequences on every context-parallel rank.
        sequence_ids: int64 [R], the unit (``Packer.units``) of each response token, from 0 in order of ``rows``.
        token_positions: int64 [t], the local tokens as positions among the batch's, prompt and response of each
            sequence end to end; -1: padding.
        buckets: what attention does with it where Transformer Engine is absent.
        tree: where common prefixes stand once (``shared_packing.py``), what attention does with it instead.
        copies: int64 [n], which of the head's outputs each slot takes, where several take the same: ``head_positions``
            and ``targets`` then name every output once. None: one each.
        duplicates: int64 [2, d], tokens that are not computed, and those in whose place they would be, both as in
            ``token_positions``. None: there are none.
        predictions: one for each layer for multi-token prediction.
        context_size: how many context-parallel ranks share it.
        context_rank: which of them this is. Rank 0 reports what all of them know.
        part: of a plan of parts (``Packer.plan``).
    """

    rows: Int64Array
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    head_positions: torch.Tensor
    targets: torch.Tensor
    slots: torch.Tensor
    response_positions: Int64Array
    sequence_ids: torch.Tensor
    token_positions: Int64Array
    buckets: tuple[Bucket, ...] | tuple[ContextBucket, ...] = ()
    tree: SharedPrefixes | None = None
    copies: torch.Tensor | None = None
    duplicates: Int64Array | None = None
    predictions: tuple[Prediction, ...] = ()
    context_size: int = 1
    context_rank: int = 0
    part: int = 0

    def column(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """The micro-batch's part [R] of a batch column [T]."""
        return torch.from_numpy(values[self.response_positions]).to(self.targets.device)
