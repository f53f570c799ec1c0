"""Prompts of training and validation."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_retool.config.base import ConfigError, choice


@dataclass(frozen=True)
class DataConfig:
    train_files: list[str] = field(default_factory=list)
    val_files: list[str] = field(default_factory=list)
    train_batch_size: int = 32
    """Prompts whose groups are trained on in one step."""
    max_prompt_length: int = 2048
    max_response_length: int = 16384
    """Tokens after the prompt: sampled tokens and tool results together."""
    overlong_prompts: str = choice("filter", "error")
    shuffle: bool = True
    deduplicate: bool = True
    """Keep the first row of each distinct prompt (DAPO-Math-17k ships 1.79 M rows of about 17 k prompts)."""
    prompt_key: str = "prompt"
    question_instruction: str = "Solve the problem step by step and put your final answer within \\boxed{}."
    """Added below bare questions (AIME's files, reasoning-gym); prompts that are messages stay as they are."""
    max_val_samples: int | None = None

    def check(self) -> None:
        """Raise ConfigError where a size is below 1."""
        for name in ("train_batch_size", "max_prompt_length", "max_response_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"data.{name}={getattr(self, name)} must be at least 1")
