"""Prompts of training and validation."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_retool.config.base import at_least_one, choice, not_negative


@dataclass(frozen=True)
class DataConfig:
    """Prompts of training and validation."""

    train_files: list[str] = field(default_factory=list)
    """Prompts to train on: Parquet, JSONL or JSON files, folders of one split, or patterns (data/train-*.parquet)."""
    val_files: list[str] = field(default_factory=list)
    """Prompts of validations; each file's name or data_source is a row of its own in the metrics."""
    train_batch_size: int = at_least_one(32)
    """Prompts whose groups are trained on in one step."""
    max_prompt_length: int = at_least_one(2048)
    """Tokens of a prompt, chat template included."""
    max_response_length: int = at_least_one(16384)
    """Tokens after the prompt: sampled tokens and tool results together."""
    overlong_prompts: str = choice("filter", "error")
    """What happens to a prompt of more than max_prompt_length tokens: it is left out, or it ends the run."""
    shuffle: bool = True
    """Another order of the prompts in every epoch, drawn from trainer.seed."""
    deduplicate: bool = True
    """Of rows that are equal in every column, keep the first (DAPO-Math-17k has 1.79 M rows of about 17 k prompts)."""
    prompt_key: str = "prompt"
    """Column of the prompt: messages, or a question as text."""
    question_instruction: str = "Solve the problem step by step and put your final answer within \\boxed{}."
    """Added below bare questions (AIME's files, reasoning-gym); prompts that are messages stay as they are."""
    max_val_samples: int | None = at_least_one(None)
    """Validation prompts at most, spread evenly over the files; null: all."""
    quick_val_samples: int = at_least_one(12)
    """Prompts of a quick validation (trainer.quick_test_freq): one of each of as many equal stretches of the validation
    prompts, the same ones at every step."""
    quick_val_seed: int = not_negative(0)
    """Draws them. It is not trainer.seed: runs that differ in that one ask the same problems."""
