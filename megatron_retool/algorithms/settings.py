"""Settings that algorithms read; the configuration's sections extend them. Without torch, as the configuration is."""

from __future__ import annotations

from dataclasses import dataclass, field

CORRECTION_LEVELS = ("token", "sequence", "geometric")
NORMALIZE_OVER = ("kept_tokens", "all")
CORRECTION_MODES = ("truncate", "none", "clip", "mask")


@dataclass(frozen=True)
class SamplingSettings:
    """The distribution that an engine samples from: ``sampling``."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0


@dataclass(frozen=True)
class RolloutCorrectionSettings:
    """Weights and rejection against the mismatch of engine and learner: ``rollout_correction``."""

    level: str = field(default="token", metadata={"choices": CORRECTION_LEVELS})
    """Level of the importance weight."""
    mode: str = field(default="truncate", metadata={"choices": CORRECTION_MODES})
    """What happens to the weight outside its bounds; "none" turns weights off and leaves rejection on."""
    lower: float = 0.0
    upper: float = 2.0
    rejection: list[str] = field(default_factory=lambda: ["geometric_ratio 0.999 1.001"])
    """Rules, ANDed, each "<level>_<statistic> <lower> <upper>": see ``rejection_rules``."""
    veto_threshold: float | None = 1e-4
    """Drop a sequence with any token ratio strictly below it."""
    batch_k3_limit: float | None = None
    """Skip the update where the batch's k3 KL exceeds it."""
    batch_normalize: bool = False
    """Divide the weights by their mean over the whole global batch."""
    batch_normalize_over: str = field(default="kept_tokens", metadata={"choices": NORMALIZE_OVER})
    """kept_tokens: the mean over the tokens that give loss, so that the weights that count average to 1. all: verl's,
    over all sampled tokens, at the levels sequence and geometric over all responses."""
    bypass_old_log_probs: bool = False
    """Take the rollout log-probs as old_log_probs and skip the learner's recomputation."""
