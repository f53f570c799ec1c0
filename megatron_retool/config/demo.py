"""The demo's model and data."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_retool.config.base import choice


@dataclass(frozen=True)
class DemoConfig:
    """What make-demo writes: a small model and the integer problems it learns to solve with tools."""

    enable: bool = False
    """The pipeline command makes the demo's data and model, fine-tunes and converts it before it trains."""
    variant: str = choice("one_tool", "two_tools")
    """two_tools: half of the problems need a search in a corpus, made too, before or in place of Python."""
    directory: str = "runs/demo_data"
    base: str = "auto"
    """Whose data and fine-tuned model a run starts from: auto (a run in trainer.runs_dir with the same demo, sft and
    trainer.seed settings, else its own), none (its own), or a run's directory (whatever its settings)."""
    hidden_size: int = 128
    num_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    intermediate_size: int = 384
    vocab_size: int = 512
    pretrain_rows: int = 28800
    sft_rows: int = 6000
    sft_val_rows: int = 256
    train_rows: int = 3000
    val_rows: int = 128
    entities: int = 400
    """two_tools: entities that the corpus knows, besides those of val.parquet."""
    val_entities: int = 40
