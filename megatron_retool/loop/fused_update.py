"""A step whose first update computes its old log-probs itself, in place of a pass before it.

What a response's tokens weigh, and whether it is rejected, follows from its own log-probs. The learner therefore
applies the rollout correction in the forward pass of the update (``Learner.update_fused``), and what is stored and
measured of it is made afterwards from the log-probs that come back with the update: by the same function as in a step
with a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_retool.algorithms.sequence_balance import cut_rollouts
from megatron_retool.config import AlgorithmConfig, LearnerConfig
from megatron_retool.config.old_log_probs import OldLogProbsSource, number_of_updates, old_log_probs_source
from megatron_retool.loop.columns import (
    add_advantages,
    add_old_log_probs,
    add_ref_log_probs,
    correct_rollout,
    has_loss,
    keep_before_correction,
    mini_batch_of,
    mini_batch_rows,
)
from megatron_retool.loop.state import TrainerState
from megatron_retool.loop.update import kl_coefficient_of, measured, update_actor
from megatron_retool.runs.step_timer import StepTimer
from megatron_retool.trajectory import Trajectory, TrajectoryBatch
from run_files.phases import Phase

if TYPE_CHECKING:
    from megatron_retool.cluster.deployment import Deployment

Rows = npt.NDArray[np.int64]


class FusedStep(NamedTuple):
    """The batch with every column, metrics, and those of each update: none where every token is rejected."""

    batch: TrajectoryBatch
    metrics: dict[str, float]
    updates: list[dict[str, float]]


def source_of(learner: LearnerConfig, algorithm: AlgorithmConfig, batch: TrajectoryBatch) -> OldLogProbsSource:
    """What learner.fuse_old_log_probs comes to for this batch."""
    lengths = learner.layout().padded(batch.total_lengths.astype(np.int64))
    cut = cut_rollouts(batch.rollout_ids, lengths, learner.max_tokens_per_micro_batch)
    return old_log_probs_source(learner, algorithm, number_of_updates(learner, batch.num_rollouts), int(cut.sum()))


async def learn_fused(
    run: Deployment, state: TrainerState, batch: TrajectoryBatch, kept: Sequence[Trajectory], timer: StepTimer
) -> FusedStep:
    """Reference log-probs, advantages, the first update with old log-probs and correction, and the other updates.

    Where several mini-batches follow, a pass gives the old log-probs of all but the first beforehand.

    Args:
        kept: the batch's rows.
    """
    config, step = run.config, state.step
    first, *others = mini_batch_rows(config.trainer, config.learner, batch, step)
    rest = np.sort(np.concatenate(others)) if others else np.zeros(0, np.int64)
    batch = await add_ref_log_probs(run, batch, kept, timer)
    result: dict[str, npt.NDArray[np.float32]] = {}
    rest_has_loss = False
    if not len(rest):
        with timer.phase(Phase.OLD_LOG_PROB):  # of no length, so that every step has the same metrics
            pass
    else:
        part, _ = await add_old_log_probs(run.learner, config.rollout.train, batch.select(rest), timer)
        _put(result, batch, rest, {name: new for name, new in part.columns.items() if name not in batch.columns})
        with timer.phase(Phase.ADVANTAGE):
            corrected, _, _ = correct_rollout(
                config.learner, config.algorithm, part, [kept[row] for row in rest], step - 1
            )
            rest_has_loss = has_loss(corrected)
    with timer.phase(Phase.ADVANTAGE):
        batch, metrics = add_advantages(keep_before_correction(batch, kept), kept, state)
    with timer.phase(Phase.UPDATE_ACTOR):
        kl_in_loss = kl_coefficient_of(config.algorithm, step)
        mini_batch = mini_batch_of(config.algorithm, config.data, batch, first)
        update = await run.learner.update_fused(
            mini_batch, sampling=config.rollout.train, kl_in_loss=kl_in_loss, step_without_loss=rest_has_loss
        )
    columns = {"old_log_probs": update["log_probs"], "entropy": update["entropy"]}
    if "routing_flips" in update:
        columns["routing_flips"] = update["routing_flips"]
    _put(result, batch, first, columns)
    with timer.phase(Phase.ADVANTAGE):
        batch, correction_metrics, _ = correct_rollout(
            config.learner, config.algorithm, batch.with_columns(**result), kept, step - 1
        )
    fused_tokens = int(mini_batch.loss_mask.sum()) / max(int(batch.loss_mask.sum()), 1)
    metrics |= correction_metrics | {"actor/fused_old_log_probs": fused_tokens}
    if not has_loss(batch):
        return FusedStep(batch, metrics | update["metrics"], [])
    updates = [measured(update["metrics"], config.algorithm, batch.select(first), kl_in_loss)]
    if others:
        updates += await update_actor(
            run, [mini_batch_of(config.algorithm, config.data, batch, rows) for rows in others], step, timer
        )
    return FusedStep(batch, metrics, updates)


def _put(
    found: dict[str, npt.NDArray[np.float32]],
    batch: TrajectoryBatch,
    rows: Rows,
    columns: dict[str, npt.NDArray[np.float32]],
) -> None:
    """Write the columns of the batch's ``rows`` to their places in columns of the batch."""
    places = np.flatnonzero(np.isin(batch.sequence_ids, rows))
    for name, column in columns.items():
        found.setdefault(name, np.zeros(batch.num_response_tokens, np.float32))[places] = column
