"""Hugging Face models of a few thousand parameters, one for each of some families."""

from __future__ import annotations

from typing import Any

from megatron_retool.parity.admission.shrink import VOCAB_SIZE
from megatron_retool.parity.admission.tiny_model import random_model

FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama", "mistral")
WITH_PARTS = ("olmo2", "olmo3", "gemma3_text", "granite")
"""Families whose layers have other parts than Megatron's."""

_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
_LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_OWN: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "glm4_moe": {
        "head_dim": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
    },
    "llama": {"rope_parameters": _LLAMA_ROPE, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 16, "head_dim": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "seed_oss": {"head_dim": 8},
    "olmo2": {},
    "phi3": {"pad_token_id": None},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
        "pad_token_id": None,
    },
    "granite": {
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.5,
        "residual_multiplier": 0.22,
        "logits_scaling": 3.0,
        "tie_word_embeddings": True,
        "pad_token_id": None,
    },
    "olmo3": {"sliding_window": 16, "rope_theta": 10000.0, "rope_scaling": _YARN},
}


def hf_model(family: str, **overrides: Any) -> Any:
    """A transformers model with random fp32 weights, biases and norms included."""
    return random_model({"model_type": family, **_COMMON, **_OWN[family], **overrides})
