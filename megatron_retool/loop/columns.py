"""What the update has to know of every token: log-probs, values, correction, advantages, loss weights.

Each function takes the step's batch and gives it back with more columns ([T], see ``TrajectoryBatch``). A response here
is a rollout, whatever its number of rows: what is computed over responses does not change where one is cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from megatron_retool.algorithms.advantages import AdvantageInputs, compute_advantages, share_branch_advantages
from megatron_retool.algorithms.kl import kl_reward
from megatron_retool.algorithms.loss_aggregation import token_weights
from megatron_retool.algorithms.rejection_rules import OVERLONG
from megatron_retool.algorithms.rollout_correction import rollout_correction
from megatron_retool.config import AlgorithmConfig, Config, DataConfig, LearnerConfig, SamplingConfig, TrainerConfig
from megatron_retool.config.old_log_probs import number_of_updates
from megatron_retool.errors import OperationError
from megatron_retool.loop.metrics import reward_metrics
from megatron_retool.loop.state import TrainerState
from megatron_retool.registry import Need
from megatron_retool.routed_experts import RoutedExperts
from megatron_retool.runs.step_timer import StepTimer
from megatron_retool.trajectory import Trajectory, TrajectoryBatch
from run_files.phases import Phase
from sglang_rollout.agent.branching import shared_token_ids

if TYPE_CHECKING:
    from megatron_retool.cluster.deployment import Deployment
    from megatron_retool.cluster.learner_group import LearnerGroup

_WITHOUT_LEARNER = ("rollout_corr/rollout_ppl", "rollout_corr/rollout_log_ppl", "rollout_corr/staleness/")


async def add_log_probs(
    run: Deployment, batch: TrajectoryBatch, trajectories: Sequence[Trajectory], timer: StepTimer
) -> tuple[TrajectoryBatch, dict[str, float]]:
    """old_log_probs and entropy with the training kernels; ref_log_probs where they are needed; critic's values;
    routing_flips where the engine's experts were replayed.

    All log-probs are those of the distribution that is sampled (temperature, top_p, top_k, min_p). In bypass mode
    old_log_probs are the engine's, and nothing is computed. With learner.routing_replay=old_log_probs the batch's
    routed experts are from here on those of old_log_probs.

    Returns:
        The batch, and routing_replay/* metrics where the engine's experts were replayed.
    """
    metrics: dict[str, float] = {}
    if run.config.algorithm.rollout_correction.bypass_old_log_probs:
        with timer.phase(Phase.OLD_LOG_PROB):
            batch = batch.with_columns(old_log_probs=batch.rollout_log_probs)
    else:
        batch, metrics = await add_old_log_probs(run.learner, run.config.rollout.train, batch, timer)
    batch = await add_ref_log_probs(run, batch, trajectories, timer)
    if run.critic is not None:
        with timer.phase(Phase.VALUES):
            batch = batch.with_columns(values=await run.critic.values(batch))
    return batch, metrics


async def add_old_log_probs(
    learner: LearnerGroup, sampling: SamplingConfig, batch: TrajectoryBatch, timer: StepTimer
) -> tuple[TrajectoryBatch, dict[str, float]]:
    """old_log_probs and entropy by a pass of the learner, routing_flips where it replays, and the pass's metrics."""
    with timer.phase(Phase.OLD_LOG_PROB):
        result = await learner.log_probs(batch, sampling=sampling)
        batch = batch.with_columns(old_log_probs=result["log_probs"], entropy=result["entropy"])
        if "routing_flips" in result:
            batch = batch.with_columns(routing_flips=result["routing_flips"])
        if "routed_experts" in result:
            column = RoutedExperts.end_to_end(result["routed_experts"], batch.total_lengths)
            batch = dataclasses.replace(batch, routed_experts=column)
    return batch, result["metrics"]


async def add_ref_log_probs(
    run: Deployment, batch: TrajectoryBatch, trajectories: Sequence[Trajectory], timer: StepTimer
) -> TrajectoryBatch:
    """ref_log_probs, where something asks for them: of the initial policy, or of the rows' teachers; and, where the
    learner computes several teachers, teacher: the number of each row's.

    ``trajectories`` are the batch's rows.
    """
    distillation = run.config.algorithm.distillation
    sources = [str(each.extra_info.get("data_source", "unknown")) for each in trajectories]
    if len(distillation.paths) > 1:
        numbers = [distillation.teacher_of(source) for source in sources]
        batch = batch.with_columns(teacher=np.repeat(numbers, batch.response_lengths))
    if Need.REFERENCE not in run.config.algorithm.needs:
        return batch
    with timer.phase(Phase.REFERENCE):
        if run.teachers is not None:
            return batch.with_columns(ref_log_probs=await run.teachers.log_probs(batch, sources))
        reference = await run.learner.log_probs(batch, reference=True, sampling=run.config.rollout.train)
        return batch.with_columns(ref_log_probs=reference["log_probs"])


def correct_rollout(
    learner: LearnerConfig,
    algorithm: AlgorithmConfig,
    batch: TrajectoryBatch,
    trajectories: Sequence[Trajectory],
    current_version: int,
) -> tuple[TrajectoryBatch, dict[str, float], bool]:
    """Weights and masks against the mismatch of learner and engine: columns importance_weights, keep, rejected_by.

    ``trajectories`` are the batch's rows; the ones that overlong filtering marked give no loss either. In bypass mode
    the learner's log-probs are first known in the update, which applies rules and veto itself: here are no weights, no
    rejection and only the metrics that need no learner.

    Returns:
        The batch, rollout_corr/* metrics, and whether the whole update is to be skipped.

    Raises:
        OperationError: with learner.match_engine=exact, learner and engine differ.
    """
    filtered = _overlong_rows(trajectories)
    if learner.match_engine == "exact" and not algorithm.rollout_correction.bypass_old_log_probs:
        check_exact(batch, current_version)
    correction = algorithm.rollout_correction
    result = rollout_correction(
        torch.from_numpy(batch.columns["old_log_probs"]),
        torch.from_numpy(batch.rollout_log_probs),
        torch.from_numpy(batch.loss_mask),
        torch.from_numpy(batch.token_rollout_ids),
        batch.num_rollouts,
        torch.from_numpy(batch.turn_ids),
        correction,
        weight_versions=torch.from_numpy(batch.weight_versions),
        current_version=current_version,
    )
    metrics = result.metrics
    if correction.bypass_old_log_probs:
        metrics = {name: value for name, value in metrics.items() if name.startswith(_WITHOUT_LEARNER)}
    metrics["rollout_corr/overlong_filtered"] = float(filtered[batch.first_rows].mean()) if len(filtered) else 0.0
    overlong = np.repeat(filtered, batch.response_lengths)
    keep = result.keep_mask.numpy() & ~overlong
    rejected_by = result.rejected_by.numpy()
    batch = batch.with_columns(
        importance_weights=result.importance_weights.numpy(),
        keep=keep,
        rejected_by=np.where(batch.loss_mask & overlong & (rejected_by == 0), OVERLONG, rejected_by),
    )
    return batch, metrics, result.skip_update


def check_exact(batch: TrajectoryBatch, current_version: int) -> None:
    """Raise OperationError where a token that the learner's own weights sampled has another log-prob in the learner."""
    # A token of older weights has one of its own.
    compared = batch.loss_mask & (batch.weight_versions == current_version)
    difference = np.abs(batch.columns["old_log_probs"] - batch.rollout_log_probs)
    wrong = compared & ~(difference == 0)
    if wrong.any():
        worst = int(np.where(wrong, difference, -1).argmax())
        raise OperationError(
            f"learner.match_engine=exact: {int(wrong.sum())} of {int(compared.sum())} sampled tokens have another "
            f"log-prob in the learner than in the engine, by up to {difference[worst]:.3g}. Both compute the same "
            "operators, so they do not have the same weights (set weight_sync.verify=true), or do not run on the same "
            "kind of processor. To continue with what is apart, set it to none"
        )


def keep_before_correction(batch: TrajectoryBatch, trajectories: Sequence[Trajectory]) -> TrajectoryBatch:
    """Column keep as far as it is known without old log-probs: sampled tokens that overlong filtering leaves.

    ``trajectories`` are the batch's rows.
    """
    return batch.with_columns(keep=batch.loss_mask & ~np.repeat(_overlong_rows(trajectories), batch.response_lengths))


def has_loss(batch: TrajectoryBatch) -> bool:
    """Whether correction and filters leave a sampled token."""
    return bool(batch.columns["keep"][batch.loss_mask].any())


def _overlong_rows(trajectories: Sequence[Trajectory]) -> npt.NDArray[np.bool_]:
    return np.array([bool(t.reward_info.get("overlong_filtered")) for t in trajectories], dtype=bool)


def add_advantages(
    batch: TrajectoryBatch, trajectories: Sequence[Trajectory], state: TrainerState
) -> tuple[TrajectoryBatch, dict[str, float]]:
    """advantages and returns, with the KL to the reference taken off the reward where kl_in_reward is set.

    An adaptive KL coefficient moves on in ``state``. With ARPO's hard estimate (rollout.branching.advantage) tokens
    that several of ``trajectories``, the batch's rows, share get the mean of their advantages.

    Returns:
        The batch and critic/rewards; with kl_in_reward also actor/reward_kl_penalty (mean KL per token) and
        actor/reward_kl_penalty_coeff.
    """
    config = state.config
    loss_mask, first = torch.from_numpy(batch.loss_mask), batch.first_rows
    columns = {name: torch.from_numpy(column) for name, column in batch.columns.items()}
    token_rewards, metrics = None, {}
    if config.algorithm.kl_in_reward:
        coefficient = state.kl_in_reward
        token_rewards, measured = kl_reward(
            columns["old_log_probs"],
            columns["ref_log_probs"],
            loss_mask,
            coefficient,
            config.algorithm.kl_penalty,
        )
        metrics = {"actor/reward_kl_penalty": measured, "actor/reward_kl_penalty_coeff": coefficient}
        state.kl = state.kl.updated(measured, batch.num_rollouts)
    if config.algorithm.distillation.teachers and {"old_log_probs", "ref_log_probs"} <= columns.keys():
        ratios = (columns["old_log_probs"] - columns["ref_log_probs"])[loss_mask.bool()].double()
        metrics["distillation/reverse_kl"] = float(ratios.mean()) if len(ratios) else 0.0
    metrics |= reward_metrics(batch, None if token_rewards is None else token_rewards.numpy())
    inputs = AdvantageInputs(
        rewards=torch.from_numpy(batch.rewards[first]),
        group_ids=torch.from_numpy(batch.group_ids[first]),
        loss_mask=loss_mask,
        sequence_ids=torch.from_numpy(batch.token_rollout_ids),
        token_rewards=token_rewards,
        reward_info=[trajectories[row].reward_info for row in first],
        **{name: columns.get(name) for name in ("values", "old_log_probs", "entropy", "ref_log_probs")},
    )
    result = compute_advantages(config.algorithm.estimator, inputs)
    advantages, branching = result.advantages, config.rollout.branching
    if branching.enable and branching.advantage == "hard":
        advantages = share_branch_advantages(advantages, loss_mask, torch.from_numpy(shared_token_ids(trajectories)))
    return batch.with_columns(advantages=advantages.numpy(), returns=result.returns.numpy()), metrics


def mini_batch_rows(
    trainer: TrainerConfig, learner: LearnerConfig, batch: TrajectoryBatch, step: int
) -> list[npt.NDArray[np.int64]]:
    """Shuffle the responses (seeded by run and step) and cut them into mini-batches; the rows of each, ascending.

    learner.mini_batch_size counts rollouts; all rows of one are in the same mini-batch.
    """
    order = np.random.default_rng((trainer.seed, step)).permutation(batch.num_rollouts)
    count = number_of_updates(learner, batch.num_rollouts)
    return [np.flatnonzero(np.isin(batch.rollout_ids, rollouts)) for rollouts in np.array_split(order, count)]


def split_mini_batches(config: Config, batch: TrajectoryBatch, step: int) -> Iterator[TrajectoryBatch]:
    """The step's mini-batches (``mini_batch_rows``), each with its loss_weights."""
    for rows in mini_batch_rows(config.trainer, config.learner, batch, step):
        yield mini_batch_of(config.algorithm, config.data, batch, rows)


def mini_batch_of(
    algorithm: AlgorithmConfig, data: DataConfig, batch: TrajectoryBatch, rows: npt.NDArray[np.int64]
) -> TrajectoryBatch:
    """``rows`` of the batch as a mini-batch, with its loss_weights.

    Every loss aggregation is a weight per token over the mini-batch as a whole, so the loss does not depend on how the
    learner cuts it into micro-batches or over ranks. Rejected tokens get weight 0.
    """
    mini_batch = batch.select(rows)
    weights = token_weights(
        algorithm.aggregation,
        torch.from_numpy(mini_batch.loss_mask),
        torch.from_numpy(mini_batch.token_rollout_ids),
        mini_batch.num_rollouts,
        keep_mask=torch.from_numpy(mini_batch.columns["keep"] > 0),
        denominator=algorithm.rollout_correction.denominator,
        max_response_length=data.max_response_length,
    )
    return mini_batch.with_columns(loss_weights=weights.numpy())


def critic_mini_batch(mini_batch: TrajectoryBatch) -> TrajectoryBatch:
    """The same responses for the critic, which learns from every sampled token alike, rejected ones too."""
    count = max(int(mini_batch.loss_mask.sum()), 1)
    return mini_batch.with_columns(loss_weights=mini_batch.loss_mask / count)
