"""Which settings go with gradients that a caller accumulates by itself, and with several runs on one base model."""

from __future__ import annotations

from conversion.model.architecture import Architecture
from megatron_retool.config.base import ConfigError
from megatron_retool.config.learner import LearnerConfig


def check_accumulation(learner: LearnerConfig, architecture: Architecture, role: str = "actor") -> None:
    """Raise ConfigError where a setting does not go with ``Learner.accumulate`` and ``Learner.apply``."""
    reasons = {
        "role=critic": (role != "actor", "a critic has values and no targets"),
        "learner.share_prefixes=true": (learner.share_prefixes, "set it to false"),
        f"learner.routing_replay={learner.routing_replay}": (
            learner.routing_replay != "none",
            "sequences come without an engine's choice of experts: set it to none",
        ),
        "learner.mtp.train=true": (bool(architecture.predictors), "targets may be others than the next tokens"),
        f"learner.moe_router_bias_update_rate={learner.moe_router_bias_update_rate}": (
            bool(learner.moe_router_bias_update_rate),
            "biases move with the updates of a run: set it to 0",
        ),
        f"learner.optimizer.name={learner.optimizer.name}": (
            learner.optimizer.name != "adamw",
            "a step has settings of AdamW: set it to adamw",
        ),
    }
    for setting, (wrong, why) in reasons.items():
        if wrong:
            raise ConfigError(f"{setting} does not go with gradients that a caller accumulates: {why}")


def check_runs(learner: LearnerConfig, architecture: Architecture, role: str = "actor") -> None:
    """Raise ConfigError where a setting does not go with several runs on one base model."""
    check_accumulation(learner, architecture, role)
    if not learner.lora.rank:
        raise ConfigError("learner.lora.rank=0: runs on one base model train adapters: set it to the largest rank")
    if learner.dtype == "float16":
        raise ConfigError(
            "learner.dtype=float16 does not go with several runs, whose gradients would be scaled by one another's "
            "losses: set it to bfloat16"
        )
    if learner.optimizer.cpu_offload:
        raise ConfigError("learner.optimizer.cpu_offload=true does not go with several runs: set it to false")
