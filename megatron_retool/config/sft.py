"""Supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_retool.config.base import ConfigError, at_least_one, choice, not_negative, number, positive
from megatron_retool.config.optimizer import OptimizerConfig


@dataclass(frozen=True)
class SFTStage:
    """One pass of supervised fine-tuning; stages follow one another on the same weights."""

    name: str = "sft"
    """Of the stage, in metrics and messages."""
    train_files: list[str] = field(default_factory=list)
    """Conversations to learn: Parquet, JSONL or JSON files, folders of one split, or patterns."""
    val_files: list[str] = field(default_factory=list)
    """Held-out conversations, whose loss is logged."""
    batch_size: int = at_least_one(32)
    """Conversations in one optimizer step."""
    epochs: int = at_least_one(6)
    """Passes over the conversations."""
    steps: int | None = at_least_one(None)
    """Optimizer steps; null: as many as the epochs need."""
    max_length: int = at_least_one(16384)
    """Tokens of a conversation, or of each response of a pair with its prompt."""
    overlong: str = choice("drop", "truncate", "error")
    """What happens to a conversation of more than max_length tokens."""
    loss: str = choice("cross_entropy", "dpo", "top_k")
    """cross_entropy: imitate the conversations. dpo: direct preference optimization, on pairs of a chosen and a
    rejected response (sft.chosen_key, sft.rejected_key), against model.path as the reference policy. top_k: KL from a
    teacher's most probable tokens at each token, in files of megatron-retool data score."""
    beta: float = positive(0.1)
    """dpo: how far the policy may move from the reference policy; smaller is farther."""
    label_smoothing: float = number(0.0, minimum=0, below=0.5)
    """dpo: share of the pairs that are taken to be labelled the wrong way round."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5, schedule="cosine"))
    """Only of this stage: each begins with a fresh one."""


@dataclass(frozen=True)
class SFTConfig:
    """Supervised fine-tuning."""

    stages: list[SFTStage] = field(default_factory=list)
    """Passes one after another, each on the weights of the one before."""
    messages_key: str = "messages"
    """Column of the conversation."""
    tools_key: str = "tools"
    """Column of the tools' schemas that the conversation was told; rows without it know none."""
    prompt_key: str = "prompt"
    """dpo: column of what comes before both responses: a text or messages. Not read where they are whole
    conversations."""
    chosen_key: str = "chosen"
    """dpo: column of the better response: a text, messages, or a whole conversation."""
    rejected_key: str = "rejected"
    """dpo: column of the worse response."""
    log_freq: int = not_negative(10)
    """Steps between rows of metrics.jsonl; 0: at the end of each stage."""
    test_freq: int = not_negative(0)
    """Steps between validation losses; 0: at the end of each stage."""
    save_freq: int = not_negative(0)
    """Steps between checkpoints; 0: only at the end."""

    def check(self) -> None:
        """Raise ConfigError where settings of a stage contradict each other."""
        for index, stage in enumerate(self.stages):
            if not stage.name.strip():
                raise ConfigError(f"sft.stages[{index}].name is empty: give the stage a name")
            stage.optimizer.check(f"sft.stages[{index}].optimizer")
            if stage.loss == "dpo" and any(earlier.loss != "dpo" for earlier in self.stages[:index]):
                raise ConfigError(
                    f"sft.stages[{index}].loss=dpo follows a stage that imitates, and its reference policy would be "
                    "the model before that stage: fine-tune in a run of its own, and give its result as model.path here"
                )
            for name, default in (("beta", 0.1), ("label_smoothing", 0.0)):
                if stage.loss != "dpo" and getattr(stage, name) != default:
                    raise ConfigError(
                        f"sft.stages[{index}].{name} is read with loss=dpo only: set loss=dpo, or leave it out"
                    )
