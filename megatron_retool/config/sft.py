"""Supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_retool.config.base import choice
from megatron_retool.config.learner import OptimizerConfig


@dataclass(frozen=True)
class SFTStage:
    """One pass of supervised fine-tuning; stages follow one another on the same weights."""

    name: str = "sft"
    train_files: list[str] = field(default_factory=list)
    val_files: list[str] = field(default_factory=list)
    batch_size: int = 32
    """Conversations in one optimizer step."""
    epochs: int = 6
    steps: int | None = None
    """None: as many as the epochs need."""
    max_length: int = 16384
    overlong: str = choice("drop", "truncate", "error")
    """What happens to a conversation of more than max_length tokens."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5, schedule="cosine"))


@dataclass(frozen=True)
class SFTConfig:
    stages: list[SFTStage] = field(default_factory=list)
    messages_key: str = "messages"
    tools_key: str = "tools"
    log_freq: int = 10
    test_freq: int = 0
    """Steps between validation losses; 0: at the end of each stage."""
    save_freq: int = 0
