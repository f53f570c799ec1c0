"""Where a step's old log-probs come from: a pass of their own, or the forward pass of the update that needs them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megatron_retool.algorithms.settings import BUILT_IN
from megatron_retool.config.algorithm import AlgorithmConfig
from megatron_retool.config.data import DataConfig
from megatron_retool.config.learner import LearnerConfig
from megatron_retool.config.rollout import RolloutConfig
from megatron_retool.registry import Need


class OldLogProbs(StrEnum):
    """Whose they are."""

    PASS = "pass"
    """Of the learner, in a pass over the whole batch before the first update."""
    UPDATE = "update"
    """Of the learner, in the one update that follows the batch (fused)."""
    FIRST_UPDATE = "first_update"
    """Of the learner: those of the first mini-batch in its update, the others' in a pass before it."""
    ENGINE = "engine"
    """The engine's (bypass mode)."""


@dataclass(frozen=True)
class OldLogProbsSource:
    """``reason``: what decides it, for people."""

    source: OldLogProbs
    reason: str

    @property
    def fused(self) -> bool:
        """Whether an update's own forward pass gives them."""
        return self.source in (OldLogProbs.UPDATE, OldLogProbs.FIRST_UPDATE)

    @property
    def sentence(self) -> str:
        """For the run's console."""
        where = {
            OldLogProbs.PASS: "a pass of their own",
            OldLogProbs.UPDATE: "of the update's own forward pass",
            OldLogProbs.FIRST_UPDATE: "of the first update's own forward pass, and a pass for the other mini-batches",
            OldLogProbs.ENGINE: "the engine's",
        }[self.source]
        return f"old log-probs: {where} ({self.reason})"


def expected_updates(learner: LearnerConfig, data: DataConfig, rollout: RolloutConfig) -> int:
    """Mini-batches of a step that has all its responses."""
    return number_of_updates(learner, data.train_batch_size * rollout.train.n)


def number_of_updates(learner: LearnerConfig, rollouts: int) -> int:
    """Mini-batches that a step's rollouts are cut into."""
    return max(1, round(rollouts / learner.mini_batch_size))


def old_log_probs_source(
    learner: LearnerConfig, algorithm: AlgorithmConfig, updates: int, cut_rollouts: int = 0
) -> OldLogProbsSource:
    """What learner.fuse_old_log_probs comes to in a step.

    Args:
        updates: mini-batches of the step.
        cut_rollouts: rollouts whose rows do not share a micro-batch (``algorithms.sequence_balance.cut_rollouts``).
    """
    setting = learner.fuse_old_log_probs
    if algorithm.rollout_correction.bypass_old_log_probs:
        return OldLogProbsSource(OldLogProbs.ENGINE, "algorithm.rollout_correction.bypass_old_log_probs=true")
    needed = None if setting == "never" else _needs_the_pass(algorithm, learner, updates, cut_rollouts)
    if needed is not None:
        return OldLogProbsSource(OldLogProbs.PASS, needed)
    asked = f"learner.fuse_old_log_probs={setting}"
    if setting == "never":
        return OldLogProbsSource(OldLogProbs.PASS, asked)
    if updates == 1:
        return OldLogProbsSource(OldLogProbs.UPDATE, f"{asked}, and one update follows a batch")
    if setting == "auto":
        return OldLogProbsSource(OldLogProbs.PASS, f"{updates} updates follow a batch")
    return OldLogProbsSource(OldLogProbs.FIRST_UPDATE, f"{asked}, and {updates} updates follow a batch")


def _needs_the_pass(algorithm: AlgorithmConfig, learner: LearnerConfig, updates: int, cut_rollouts: int) -> str | None:
    """What asks for the old log-probs of the whole batch before the first update; None: nothing does."""
    correction = algorithm.rollout_correction
    key = "algorithm.rollout_correction"
    if correction.batch_k3_limit is not None:
        return f"{key}.batch_k3_limit={correction.batch_k3_limit} judges the whole batch before the update"
    if correction.batch_normalize and correction.mode != "none":
        return f"{key}.batch_normalize=true divides weights by their mean over the whole batch"
    if correction.denominator == "post":
        return f"{key}.denominator=post counts what rejection leaves of the whole mini-batch"
    if algorithm.kl_in_reward:
        return f"algorithm.kl_in_reward={algorithm.kl_in_reward} is part of the rewards that advantages are made of"
    if Need.CRITIC in algorithm.needs:
        return f"{algorithm.needs[Need.CRITIC]} has a critic, which may learn while the policy does not"
    if algorithm.distillation.divergence != "none":
        return (
            f"algorithm.distillation.divergence={algorithm.distillation.divergence} gives no loss where the rollout "
            "correction rejects a token"
        )
    if algorithm.advantage == "reverse_kl":
        return "algorithm.advantage=reverse_kl is made of old log-probs"
    if algorithm.advantage not in BUILT_IN["advantage"]:
        return f"algorithm.advantage={algorithm.advantage} is given old log-probs and entropy"
    replay = learner.routing_replay
    if replay == "old_log_probs":
        return f"learner.routing_replay={replay} records the experts of that pass"
    if replay != "none" and updates > 1:
        return f"learner.routing_replay={replay} is measured in one pass over the whole batch"
    if cut_rollouts:
        return (
            f"{cut_rollouts} rollouts of several rows exceed learner.max_tokens_per_micro_batch="
            f"{learner.max_tokens_per_micro_batch}: the rollout correction judges them as a whole"
        )
    return None
