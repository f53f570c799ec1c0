"""Batches of random tokens, and what a reference reads of any batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from megatron_retool.routed_experts import RoutedExperts
from megatron_retool.trajectory import TrajectoryBatch


def random_batch(
    rng: np.random.Generator,
    prompts: np.ndarray[Any, Any],
    responses: np.ndarray[Any, Any],
    vocabulary: int,
    mask: np.ndarray[Any, Any] | None = None,
) -> TrajectoryBatch:
    """Responses of random tokens in a group of their own, whose log-probs by the engine are all 0.

    Args:
        prompts, responses: int32 [N], lengths.
        mask: bool [T], tokens that were sampled; None: all.
    """
    count, total = len(responses), int(responses.sum())
    sampled = np.ones(total, np.bool_) if mask is None else mask
    return TrajectoryBatch(
        prompt_ids=rng.integers(0, vocabulary, int(prompts.sum())).astype(np.int32),
        prompt_lengths=prompts,
        response_ids=rng.integers(0, vocabulary, total).astype(np.int32),
        response_lengths=responses,
        loss_mask=sampled,
        rollout_log_probs=np.zeros(total, np.float32),
        turn_ids=np.where(sampled, 0, -1).astype(np.int16),
        weight_versions=np.where(sampled, 0, -1).astype(np.int32),
        group_ids=np.zeros(count, np.int32),
        indices=np.arange(count, dtype=np.int32),
        rewards=np.zeros(count, np.float32),
    )


def sequences(batch: TrajectoryBatch) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Ids of each prompt and of its response."""
    p = r = 0
    for prompt, response in zip(batch.prompt_lengths, batch.response_lengths, strict=True):
        yield batch.prompt_ids[p : p + prompt], batch.response_ids[r : r + response]
        p, r = p + prompt, r + response


def with_experts(batch: TrajectoryBatch, experts: np.ndarray[Any, Any] | None) -> TrajectoryBatch:
    """The batch with these rows of routed experts, [sum (P + R), layers, k]; None: as it is."""
    if experts is None:
        return batch
    lengths = batch.total_lengths.astype(np.int64)
    return dataclasses.replace(batch, routed_experts=RoutedExperts(experts, np.cumsum(lengths) - lengths))
