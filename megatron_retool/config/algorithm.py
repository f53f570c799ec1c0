"""Advantages, losses, dynamic sampling and rollout correction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_retool.algorithms.kl_schedule import kl_coefficient
from megatron_retool.algorithms.rejection_rules import parse_rejection_rules
from megatron_retool.algorithms.settings import BUILT_IN, CORRECTION_MODES, RolloutCorrectionSettings
from megatron_retool.algorithms.stage_schedule import parse_stages
from megatron_retool.config.base import (
    ConfigError,
    at_least_one,
    check_named,
    choice,
    fraction,
    not_negative,
    number,
    positive,
)
from megatron_retool.config.distillation import DistillationConfig
from megatron_retool.registry import Extension, ExtensionError, Need, load_object

if TYPE_CHECKING:
    from megatron_retool.algorithms.advantages import AdvantageEstimator
    from megatron_retool.algorithms.kl import KLEstimator
    from megatron_retool.algorithms.loss_aggregation import LossAggregation
    from megatron_retool.algorithms.policy_loss import PolicyObjective


@dataclass(frozen=True)
class DynamicSamplingConfig:
    """DAPO's filter of groups whose members are all alike (arXiv:2503.14476, section 3.2)."""

    enable: bool = True
    """Must be off where a critic learns (algorithm.advantage=gae): it learns from groups of equal reward too."""
    max_generation_batches: int = not_negative(10)
    """A step generates at most so many times data.train_batch_size groups to fill its batch; 0: no limit."""
    certainty: float = number(1.0, minimum=0, maximum=10)
    """Standard deviations by which groups under way are expected to be enough for the batch. 1: they are, five times in
    six; 0: half of the time, and more are started then. What is started in vain costs little where engines have room,
    and its full share of the step where they are busy anyway, as on a laptop."""
    surplus: str = choice("drop", "next_step")
    """What becomes of groups that are complete and lie beyond the batch. drop: their prompts are drawn again.
    next_step: they keep their place in the order of the next step, one weight update older than the others, and are
    dropped where they lie beyond its batch too. Partial rollout leaves none."""
    metric: str = choice("reward", "acc")
    """Groups whose members all have the same value of it are dropped and replaced."""


@dataclass(frozen=True)
class AdaptiveSamplingConfig:
    """Number of responses by stage of training and by the prompt's own history, in place of rollout.train.n."""

    enable: bool = False
    """Let stages and history choose the number of responses."""
    stages: list[str] = field(default_factory=lambda: ["0 24", "30 16", "80 12"])
    """"<first step> <n>" in ascending order."""
    easy_accuracy: float = fraction(0.9)
    """Above it a prompt is easy."""
    easy_batches: int = not_negative(3)
    """A prompt above easy_accuracy in its last easy_batches groups gets easy_n responses."""
    easy_n: int = at_least_one(8, maximum=1_000_000)
    """Responses to an easy prompt."""
    hard_accuracy: float = fraction(0.5)
    """Below it a prompt is hard."""
    hard_n: int = at_least_one(24, maximum=1_000_000)
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
        check_named(f"{key}.mode", self.mode, CORRECTION_MODES)
        if self.mode != "none" and not 0 <= self.lower < self.upper:
            raise ConfigError(f"{key}: the bounds must satisfy 0 <= lower={self.lower} < upper={self.upper}")
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
    """grpo, dr_grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, gae, reverse_kl (on-policy distillation,
    see distillation), zero (only distillation.divergence teaches), or one's own: path/to/file.py:function or
    package.module:function."""
    advantage_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the estimator; those that it has in common with this section are filled from here."""
    normalize_by_std: bool = True
    """grpo: divide by the standard deviation of the group's rewards."""
    reward_weight: float = not_negative(0.0)
    """reverse_kl: how much of grpo's advantage counts beside the teacher; 0: the reward is only measured."""
    gamma: float = fraction(1.0)
    """Discount from one sampled token to the next."""
    gae_lambda: float = fraction(0.95)
    """gae: how far advantages look ahead."""
    gae_reward: str = choice("last_token", "spread", "linear_decay")
    """Where a response's reward goes: its last sampled token, equal shares on all sampled tokens, or shares that fall
    linearly from the first sampled token to the last."""
    gae_reward_last_share: float = not_negative(0.0, maximum=1_000_000)
    """linear_decay: the last sampled token's share in units of the first's; 1 is spread; above 1 shares grow."""
    gae_level: str = choice("token", "sequence")
    """sequence: every token gets the mean of its response's token advantages."""
    gae_whiten: bool = True
    """gae: advantages of a step get mean 0 and standard deviation 1."""
    policy_loss: str = "clip"
    """clip, gspo, cispo, policy_gradient, or one's own: path/to/file.py:function or package.module:function."""
    policy_loss_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the loss; those that it has in common with this section are filled from here."""
    clip_ratio_low: float = not_negative(0.2)
    """The probability ratio is clipped below 1 - clip_ratio_low."""
    clip_ratio_high: float = not_negative(0.28)
    """The probability ratio is clipped above 1 + clip_ratio_high."""
    dual_clip: float | None = number(None, above=1)
    """PPO's dual clip constant c (3.0 is usual); null: off."""
    loss_aggregation: str = "token-mean"
    """token-mean, seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm, or one's own:
    path/to/file.py:function or package.module:function."""
    loss_aggregation_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the aggregation; those that it has in common with this section are filled from here."""
    entropy_coefficient: float = number(0.0)
    """Times the entropy is taken off the loss."""
    kl_in_loss: float = not_negative(0.0)
    """Coefficient of the KL to the initial policy in the loss; 0: off."""
    kl_in_reward: float = not_negative(0.0)
    """Coefficient of the KL to the initial policy in each token's reward; 0: off."""
    kl_estimator: str = "k3"
    """How that KL is estimated from one token: k1, k2, k3, abs, mse, or one's own: path/to/file.py:function or
    package.module:function."""
    kl_estimator_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the estimator; those that it has in common with this section are filled from here."""
    kl_k3_limit: float | None = positive(10.0)
    """The largest k3 of a token, beyond which it has no gradient (as in verl); null: no limit."""
    kl_schedule: str = choice("constant", "linear", "cosine")
    """How the coefficient (kl_in_loss or kl_in_reward) goes to kl_final over kl_schedule_steps; constant: it stays."""
    kl_final: float = not_negative(0.0)
    """Coefficient of the KL from the end of kl_schedule on."""
    kl_schedule_steps: int | None = at_least_one(None)
    """Training steps after which the coefficient is kl_final; linear and cosine need it."""
    adaptive_kl_target: float | None = positive(None)
    """KL that kl_in_reward is adapted to; null: it stays as it is."""
    adaptive_kl_horizon: int = at_least_one(10000)
    """Responses over which a KL 20 % off its target changes kl_in_reward by 20 %."""
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    """DAPO's filter of groups without a difference."""
    adaptive_sampling: AdaptiveSamplingConfig = field(default_factory=AdaptiveSamplingConfig)
    """More responses for hard prompts."""
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    """What is done against the mismatch of engine and learner."""
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    """Teachers that score the policy's responses."""

    @property
    def estimator(self) -> Extension[AdvantageEstimator]:
        """What ``advantage`` names, with its settings; ExtensionError as ``Registry.bind``."""
        # Here and below: a configuration is read, and its types are imported, where torch is not needed.
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
            kl_estimator=self.kl_penalty,
            rejection=self.rollout_correction if self.rollout_correction.bypass_old_log_probs else None,
        )

    @property
    def aggregation(self) -> Extension[LossAggregation]:
        """What ``loss_aggregation`` names, with its settings; ExtensionError as ``Registry.bind``."""
        from megatron_retool.algorithms.loss_aggregation import loss_aggregations

        return loss_aggregations.bind(self.loss_aggregation, self.loss_aggregation_kwargs, settings=self)

    @property
    def kl_penalty(self) -> Extension[KLEstimator]:
        """What ``kl_estimator`` names, with its settings; ExtensionError as ``Registry.bind``."""
        from megatron_retool.algorithms.kl import kl_estimators

        return kl_estimators.bind(self.kl_estimator, self.kl_estimator_kwargs, settings=self)

    @property
    def needs(self) -> dict[Need, str]:
        """What the run must provide, each with the setting that asks for it, such as ``algorithm.advantage=gae``."""
        asked: dict[Need, str] = {}
        for name in BUILT_IN:
            for need in sorted(self._needs_of(name)):
                asked.setdefault(need, f"algorithm.{name}={getattr(self, name)}")
        for name in ("kl_in_loss", "kl_in_reward"):
            if getattr(self, name):
                asked.setdefault(Need.REFERENCE, f"algorithm.{name}={getattr(self, name)}")
        return asked

    @property
    def keeps_reference(self) -> bool:
        """Whether the learner keeps a frozen model: the initial policy where one is asked for, or a teacher."""
        return bool(self.distillation.paths) or (Need.REFERENCE in self.needs and not self.distillation.teachers)

    def _needs_of(self, name: str) -> Collection[Need]:
        """What the object that setting ``name`` names needs of the run; ExtensionError as ``Registry.bind``.

        A built-in without keyword arguments of its own is known without its module, which imports torch.
        """
        target, built_in = getattr(self, name), BUILT_IN[name]
        if target in built_in and not getattr(self, f"{name}_kwargs"):
            return built_in[target]
        if ":" not in target and target not in built_in:
            load_object(f"algorithm.{name}", target, known=built_in)
        bound: dict[str, Callable[[], Extension[Any]]] = {
            "advantage": lambda: self.estimator,
            "policy_loss": lambda: self.objective.loss,
            "loss_aggregation": lambda: self.aggregation,
            "kl_estimator": lambda: self.kl_penalty,
        }
        return bound[name]().needs

    def dry_run(self) -> None:
        """Call what is not built in on a small made-up batch: estimators, loss, aggregation, correction.

        Raises:
            ConfigError: one raises, or returns what cannot be trained on.
        """
        own = [name for name, built_in in BUILT_IN.items() if getattr(self, name) not in built_in]
        if not own and not self.rollout_correction.has_own:
            return
        from megatron_retool.algorithms import dry_run

        try:
            dry_run.check_advantage(self.estimator)
            dry_run.check_policy_loss(self.objective.loss)
            dry_run.check_aggregation(self.aggregation)
            dry_run.check_kl_estimator(self.kl_penalty)
            dry_run.check_correction(self.rollout_correction)
        except ExtensionError as error:
            raise ConfigError(str(error)) from error

    def scheduled_kl(self, step: int) -> float:
        """Coefficient of the KL (of kl_in_loss or kl_in_reward, whichever is set) in ``step``, from 1."""
        initial = self.kl_in_loss or self.kl_in_reward
        return kl_coefficient(self.kl_schedule, initial, self.kl_final, self.kl_schedule_steps or 1, step)

    def _check_kl_schedule(self) -> None:
        if self.kl_schedule == "constant":
            given = "kl_schedule_steps" if self.kl_schedule_steps is not None else "kl_final" if self.kl_final else None
            if given is not None:
                raise ConfigError(
                    f"algorithm.{given}={getattr(self, given)} belongs to a schedule, and algorithm.kl_schedule is "
                    "constant: set it to linear or cosine"
                )
            return
        schedule = f"algorithm.kl_schedule={self.kl_schedule}"
        if not (self.kl_in_loss or self.kl_in_reward):
            raise ConfigError(f"{schedule} needs algorithm.kl_in_loss or algorithm.kl_in_reward as its start, above 0")
        if self.kl_schedule_steps is None:
            raise ConfigError(f"{schedule} needs algorithm.kl_schedule_steps, such as the number of training steps")
        if self.adaptive_kl_target is not None:
            raise ConfigError(
                f"{schedule} fixes the coefficient of every step, and algorithm.adaptive_kl_target="
                f"{self.adaptive_kl_target} adapts it: set one of them"
            )

    def _check_distillation(self, needs: Mapping[Need, str]) -> None:
        self.distillation.check()
        teachers = "algorithm.distillation.teachers"
        compares = self.distillation.divergence != "none"
        if self.distillation.teachers and Need.REFERENCE not in needs and not compares:
            raise ConfigError(
                f"{teachers} score responses for nothing: set algorithm.advantage=reverse_kl, kl_in_loss or "
                "kl_in_reward above 0, or algorithm.distillation.divergence, or leave them out"
            )
        correction = self.rollout_correction
        if compares and correction.bypass_old_log_probs and (correction.rejection or correction.veto_threshold):
            raise ConfigError(
                f"algorithm.distillation.divergence={self.distillation.divergence} must give no loss where a token is "
                "rejected, and with algorithm.rollout_correction.bypass_old_log_probs=true tokens are rejected in the "
                "update, after it: set that to false, or rejection to [] and veto_threshold to null"
            )
        if self.advantage == "zero" and not compares:
            raise ConfigError(
                "algorithm.advantage=zero without algorithm.distillation.divergence teaches nothing: set that, or "
                "another advantage"
            )
        if self.advantage in ("reverse_kl", "zero") and self.dynamic_sampling.enable and not self.reward_weight:
            raise ConfigError(
                f"algorithm.advantage={self.advantage} learns from groups of equal reward too, which "
                "algorithm.dynamic_sampling.enable=true would drop: set it to false"
            )
        if self.advantage != "reverse_kl":
            return
        if not self.distillation.teachers:
            raise ConfigError(
                f"algorithm.advantage=reverse_kl without {teachers} would teach the policy to stay as it was: name a "
                "teacher's url or path"
            )

    def check(self) -> None:
        """Raise ConfigError where settings of this section contradict each other."""
        if self.kl_in_loss and self.kl_in_reward:
            raise ConfigError(
                "algorithm.kl_in_loss and algorithm.kl_in_reward penalise the same KL twice: set one to 0"
            )
        self.rollout_correction.check()
        if self.adaptive_kl_target is not None and not self.kl_in_reward:
            raise ConfigError(
                f"algorithm.adaptive_kl_target={self.adaptive_kl_target} needs algorithm.kl_in_reward as its start"
            )
        self._check_kl_schedule()
        if self.adaptive_sampling.enable:
            try:
                parse_stages(self.adaptive_sampling.stages)
            except ValueError as error:
                raise ConfigError(f"algorithm.adaptive_sampling.stages: {error}") from error
        try:
            needs, before_update = self.needs, self._needs_of("advantage")
        except ExtensionError as error:
            raise ConfigError(str(error)) from error
        self._check_distillation(needs)
        if Need.CRITIC in needs and self.dynamic_sampling.enable:
            raise ConfigError(
                f"{needs[Need.CRITIC]} with algorithm.dynamic_sampling.enable=true would withhold groups of equal "
                "reward from the critic, which learns from them too: set algorithm.dynamic_sampling.enable=false"
            )
        if Need.ENTROPY in before_update and self.rollout_correction.bypass_old_log_probs:
            raise ConfigError(
                f"algorithm.advantage={self.advantage} needs the entropy at each token before the update, which "
                "algorithm.rollout_correction.bypass_old_log_probs=true skips: set it to false"
            )
