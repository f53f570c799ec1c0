"""Settings that algorithms read; the configuration's sections extend them. Without torch, as the configuration is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_retool.fields import choice, fraction, not_negative, number
from megatron_retool.registry import Need

BUILT_IN: Mapping[str, Mapping[str, tuple[Need, ...]]] = {
    "advantage": {
        "grpo": (Need.GROUPS,),
        "dr_grpo": (Need.GROUPS,),
        "rloo": (Need.GROUPS,),
        "reinforce_plus_plus": (),
        "reinforce_plus_plus_baseline": (Need.GROUPS,),
        "gae": (Need.CRITIC,),
        "reverse_kl": (Need.REFERENCE,),
        "zero": (),
    },
    "policy_loss": {"clip": (), "gspo": (), "cispo": (), "policy_gradient": ()},
    "loss_aggregation": {
        "token-mean": (),
        "seq-mean-token-sum": (),
        "seq-mean-token-mean": (),
        "seq-mean-token-sum-norm": (),
    },
    "kl_estimator": {"k1": (), "k2": (), "k3": (), "abs": (), "mse": ()},
}
"""Setting of the section algorithm -> names of what is built in -> what that needs of the run."""

READ_BY: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "advantage": {
        "normalize_by_std": ("grpo", "reverse_kl"),
        "reward_weight": ("reverse_kl",),
        "gamma": ("reinforce_plus_plus", "gae"),
        "gae_lambda": ("gae",),
        "gae_reward": ("gae",),
        "gae_reward_last_share": ("gae",),
        "gae_level": ("gae",),
        "gae_whiten": ("gae",),
    },
    "policy_loss": {
        "clip_ratio_low": ("clip", "gspo", "cispo"),
        "clip_ratio_high": ("clip", "gspo", "cispo"),
        "dual_clip": ("clip", "gspo"),
    },
    "kl_estimator": {"kl_k3_limit": ("k3",)},
}
"""Setting of the section algorithm -> other settings of that section -> the built-ins that read them."""

MAX_SUPPORT = 4096
"""Filters leave this many tokens at most: SGLang lists them with each token that it sampled."""

CORRECTION_LEVELS = ("token", "sequence", "geometric")
NORMALIZE_OVER = ("kept_tokens", "all")
CORRECTION_MODES = ("truncate", "none", "clip", "mask")


@dataclass(frozen=True)
class SamplingSettings:
    """The distribution that an engine samples from: ``sampling``."""

    temperature: float = not_negative(1.0, maximum=1000)
    """Logits are divided by it; 0, only in validations, takes the most probable token."""
    top_p: float = number(1.0, above=0, maximum=1)
    """Sample from the most probable tokens that make up this probability."""
    top_k: int = number(-1, minimum=1, special=-1)
    """Sample from this many most probable tokens; -1: from all."""
    min_p: float = fraction(0.0)
    """Sample from tokens of at least this share of the most probable one's probability."""

    @property
    def most_tokens(self) -> int:
        """How many tokens the filters leave at most, where the log-probs are those of what they leave."""
        return min(self.top_k, MAX_SUPPORT) if self.top_k > 0 else MAX_SUPPORT


@dataclass(frozen=True)
class RolloutCorrectionSettings:
    """Weights and rejection against the mismatch of engine and learner: ``rollout_correction``."""

    level: str = choice(*CORRECTION_LEVELS)
    """Level of the importance weight."""
    mode: str = "truncate"
    """What happens to the weight outside its bounds: truncate, clip, mask, or one's own: path/to/file.py:function or
    package.module:function. none turns weights off and leaves rejection on."""
    mode_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the mode; lower and upper are filled from here."""
    lower: float = not_negative(0.0)
    """Lower bound of the weight."""
    upper: float = number(2.0, above=0)
    """Upper bound of the weight."""
    rejection: list[str] = field(default_factory=lambda: ["geometric_ratio 0.999 1.001"])
    """Rules, ANDed, each "<level>_<statistic> <lower> <upper>", or with a statistic of one's own "<token or sequence>
    <path/to/file.py:function> <lower> <upper> <key=value> …": see ``rejection_rules``."""
    veto_threshold: float | None = number(1e-4, above=0, below=1)
    """Drop a sequence with any token ratio strictly below it; null: none."""
    batch_k3_limit: float | None = number(None, above=0)
    """Skip the update where the batch's k3 KL exceeds it; null: never."""
    batch_normalize: bool = False
    """Divide the weights by their mean over the whole global batch."""
    batch_normalize_over: str = field(default="kept_tokens", metadata={"choices": NORMALIZE_OVER})
    """kept_tokens: the mean over the tokens that give loss, so that the weights that count average to 1. all: verl's,
    over all sampled tokens, at the levels sequence and geometric over all responses."""
    bypass_old_log_probs: bool = False
    """Take the rollout log-probs as old_log_probs and skip the learner's recomputation."""

    @property
    def has_own(self) -> bool:
        """Whether the mode or a rule is not built in."""
        return ":" in self.mode or any(":" in rule for rule in self.rejection)
