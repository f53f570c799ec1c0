"""Advantages, losses, dynamic sampling and rollout correction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_retool.algorithms.rejection_rules import parse_rejection_rules
from megatron_retool.algorithms.settings import RolloutCorrectionSettings
from megatron_retool.algorithms.stage_schedule import parse_stages
from megatron_retool.config.base import ConfigError, choice
from megatron_retool.registry import Extension, ExtensionError, Need

if TYPE_CHECKING:
    from megatron_retool.algorithms.advantages import AdvantageEstimator
    from megatron_retool.algorithms.loss_aggregation import LossAggregation
    from megatron_retool.algorithms.policy_loss import PolicyObjective


@dataclass(frozen=True)
class DynamicSamplingConfig:
    enable: bool = True
    """Must be off where a critic learns (algorithm.advantage=gae): it learns from groups of equal reward too."""
    max_generation_rounds: int = 10
    metric: str = choice("reward", "acc")
    """Groups whose members all have the same value of it are dropped and replaced."""


@dataclass(frozen=True)
class AdaptiveSamplingConfig:
    """Number of responses by stage of training and by the prompt's own history, in place of rollout.train.n."""

    enable: bool = False
    stages: list[str] = field(default_factory=lambda: ["0 24", "30 16", "80 12"])
    """"<first step> <n>" in ascending order."""
    easy_accuracy: float = 0.9
    easy_batches: int = 3
    """A prompt above easy_accuracy in its last easy_batches groups gets easy_n responses."""
    easy_n: int = 8
    hard_accuracy: float = 0.5
    hard_n: int = 24
    """A prompt whose last group was below hard_accuracy gets at least this many."""


@dataclass(frozen=True)
class RolloutCorrectionConfig(RolloutCorrectionSettings):
    """Training-inference mismatch: docs/algorithms.md has the definitions, docs/mismatch.md figures.

    The defaults are those for Megatron and SGLang (Geo-MIS) with responses of thousands of tokens; short ones need
    wider geometric bounds.
    """

    denominator: str = choice("pre", "post")
    """What the loss's denominator counts: sampled tokens before rejection, or what is left after it."""

    def check(self) -> None:
        """Raise ConfigError where settings of this section contradict each other."""
        key = "algorithm.rollout_correction"
        try:
            parse_rejection_rules(self.rejection)
        except ValueError as error:
            raise ConfigError(f"{key}.rejection: {error}") from error
        if self.mode != "none" and not 0 <= self.lower < self.upper:
            raise ConfigError(f"{key}: the bounds must satisfy 0 <= lower={self.lower} < upper={self.upper}")
        if self.veto_threshold is not None and not 0 < self.veto_threshold < 1:
            raise ConfigError(f"{key}.veto_threshold={self.veto_threshold} must lie between 0 and 1, or be null")
        if self.bypass_old_log_probs and self.mode != "none":
            raise ConfigError(
                f"{key}.bypass_old_log_probs=true puts the mismatch into PPO's own ratio: weights on top would count "
                f"it twice, set {key}.mode=none"
            )
        if self.bypass_old_log_probs and self.batch_k3_limit is not None:
            raise ConfigError(
                f"{key}.batch_k3_limit needs the learner's log-probs before the update, which bypass_old_log_probs "
                "skips"
            )
        rejects = bool(self.rejection) or self.veto_threshold is not None
        if self.bypass_old_log_probs and self.denominator == "post" and rejects:
            raise ConfigError(
                f"{key}.denominator=post counts what rejection leaves before the update, but with "
                f"bypass_old_log_probs=true rejection happens in the update: set {key}.denominator=pre"
            )


@dataclass(frozen=True)
class AlgorithmConfig:
    """Advantages, losses, KL and rollout correction: docs/algorithms.md has the definitions."""

    advantage: str = "grpo"
    """grpo, dr_grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, gae, or one's own:
    path/to/file.py:function or package.module:function."""
    advantage_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the estimator; those that it has in common with this section are filled from here."""
    normalize_by_std: bool = True
    gamma: float = 1.0
    gae_lambda: float = 0.95
    gae_reward: str = choice("last_token", "spread")
    """Where a response's reward goes: its last sampled token, or equal shares on all sampled tokens."""
    gae_level: str = choice("token", "sequence")
    """sequence: every token gets the mean of its response's token advantages."""
    gae_whiten: bool = True
    policy_loss: str = "clip"
    """clip, gspo, cispo, policy_gradient, or one's own: path/to/file.py:function or package.module:function."""
    policy_loss_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the loss; those that it has in common with this section are filled from here."""
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.28
    dual_clip: float | None = None
    """PPO's dual clip constant c (3.0 is usual); None: off."""
    loss_aggregation: str = "token-mean"
    """token-mean, seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm, or one's own:
    path/to/file.py:function or package.module:function."""
    loss_aggregation_kwargs: dict[str, Any] = field(default_factory=dict)
    entropy_coefficient: float = 0.0
    kl_in_loss: float = 0.0
    kl_in_reward: float = 0.0
    kl_estimator: str = choice("k3", "k1", "k2", "abs", "mse")
    kl_k3_limit: float | None = 10.0
    """The largest k3 of a token, beyond which it has no gradient (as in verl); null: no limit."""
    adaptive_kl_target: float | None = None
    adaptive_kl_horizon: int = 10000
    """Responses over which a KL 20 % off its target changes kl_in_reward by 20 %."""
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    adaptive_sampling: AdaptiveSamplingConfig = field(default_factory=AdaptiveSamplingConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)

    @property
    def estimator(self) -> Extension[AdvantageEstimator]:
        """What ``advantage`` names, with its settings; ExtensionError as ``Registry.bind``."""
        # Here and below: a configuration is read, and its types are imported, where nobody needs torch.
        from megatron_retool.algorithms.advantages import advantage_estimators

        return advantage_estimators.bind(self.advantage, self.advantage_kwargs, settings=self)

    @property
    def objective(self) -> PolicyObjective:
        """What ``policy_loss`` names, with its settings and the other terms; ExtensionError as ``Registry.bind``."""
        from megatron_retool.algorithms.policy_loss import PolicyObjective, policy_losses

        return PolicyObjective(
            loss=policy_losses.bind(self.policy_loss, self.policy_loss_kwargs, settings=self),
            entropy_coefficient=self.entropy_coefficient,
            kl_in_loss=self.kl_in_loss,
            kl_estimator=self.kl_estimator,
            kl_k3_limit=self.kl_k3_limit,
            rejection=self.rollout_correction if self.rollout_correction.bypass_old_log_probs else None,
        )

    @property
    def aggregation(self) -> Extension[LossAggregation]:
        """What ``loss_aggregation`` names, with its settings; ExtensionError as ``Registry.bind``."""
        from megatron_retool.algorithms.loss_aggregation import loss_aggregations

        return loss_aggregations.bind(self.loss_aggregation, self.loss_aggregation_kwargs, settings=self)

    @property
    def needs(self) -> dict[Need, str]:
        """What the run must provide, each with the setting that asks for it, such as ``algorithm.advantage=gae``."""
        asked: dict[Need, str] = {}
        for extension in (self.estimator, self.objective.loss, self.aggregation):
            for need in sorted(extension.needs):
                asked.setdefault(need, extension.label)
        for name in ("kl_in_loss", "kl_in_reward"):
            if getattr(self, name):
                asked.setdefault(Need.REFERENCE, f"algorithm.{name}={getattr(self, name)}")
        return asked

    def dry_run(self) -> None:
        """Call advantage estimator, loss and aggregation on a small made-up batch, where they are not built in.

        Raises:
            ConfigError: one raises, or returns what cannot be trained on.
        """
        from megatron_retool.algorithms.dry_run import check_advantage, check_aggregation, check_policy_loss

        try:
            check_advantage(self.estimator)
            check_policy_loss(self.objective.loss)
            check_aggregation(self.aggregation)
        except ExtensionError as error:
            raise ConfigError(str(error)) from error

    def check(self) -> None:
        """Raise ConfigError where settings of this section contradict each other."""
        if self.kl_in_loss and self.kl_in_reward:
            raise ConfigError(
                "algorithm.kl_in_loss and algorithm.kl_in_reward penalise the same KL twice: set one to 0"
            )
        self.rollout_correction.check()
        if self.kl_k3_limit is not None and self.kl_k3_limit <= 0:
            raise ConfigError(f"algorithm.kl_k3_limit={self.kl_k3_limit} must be positive (10 is verl's), or be null")
        if self.adaptive_kl_target is not None and (not self.kl_in_reward or self.adaptive_kl_target <= 0):
            raise ConfigError("algorithm.adaptive_kl_target must be positive, and needs kl_in_reward as its start")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ConfigError(f"algorithm.dual_clip={self.dual_clip} must be above 1 (3.0 is usual)")
        if self.adaptive_sampling.enable:
            try:
                parse_stages(self.adaptive_sampling.stages)
            except ValueError as error:
                raise ConfigError(f"algorithm.adaptive_sampling.stages: {error}") from error
        try:
            needs, estimator = self.needs, self.estimator
        except ExtensionError as error:
            raise ConfigError(str(error)) from error
        if Need.CRITIC in needs and self.dynamic_sampling.enable:
            raise ConfigError(
                f"{needs[Need.CRITIC]} with algorithm.dynamic_sampling.enable=true would withhold groups of equal "
                "reward from the critic, which learns from them too: set algorithm.dynamic_sampling.enable=false"
            )
        if Need.ENTROPY in estimator.needs and self.rollout_correction.bypass_old_log_probs:
            raise ConfigError(
                f"{estimator.label} needs the entropy at each token before the update, which "
                "algorithm.rollout_correction.bypass_old_log_probs=true skips: set it to false"
            )
