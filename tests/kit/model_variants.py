"""Configurations to admit beside the first published one of each family."""

from __future__ import annotations

from typing import Any

from megatron_retool.planning.models import MODELS

PHI_3_5_MINI: dict[str, Any] = {
    **MODELS["phi-4"],
    "hidden_size": 3072,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0 + 0.02 * pair for pair in range(48)],
        "long_factor": [1.0 + pair for pair in range(48)],
    },
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
}
"""Its sizes of heads and positions; the factors are made up."""
PHI_4_MINI: dict[str, Any] = {
    **PHI_3_5_MINI,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "tie_word_embeddings": True,
}
FACTOR = 1.19
LONG_TEXTS: dict[str, Any] = {
    **PHI_4_MINI,
    "original_max_position_embeddings": 131072,
    "rope_scaling": {
        **PHI_4_MINI["rope_scaling"],
        "short_factor": PHI_4_MINI["rope_scaling"]["long_factor"],
        "attention_factor": FACTOR,
        "short_mscale": FACTOR,
        "long_mscale": FACTOR,
    },
}
"""As docs/models.md has every text computed by the long factors."""
VARIANTS: dict[str, dict[str, Any]] = {
    "dense layers among experts": {**MODELS["qwen3-30b-a3b"], "mlp_only_layers": [20]},
    "deepseek-v2-lite": MODELS["deepseek-v2-lite"],
    "glm-5 with shared keys": {**MODELS["glm-5"], "indexer_types": ["full", "shared"] * 39},
    "kimi-k2": MODELS["kimi-k2"],
    "mimo-7b": MODELS["mimo-7b"],
    "granite-4.0-micro": MODELS["granite-4.0-micro"],
    "granite-4.0-h-tiny": MODELS["granite-4.0-h-tiny"],
    "nemotron-h-8b": MODELS["nemotron-h-8b"],
    "nemotron-3-super-120b-a12b": MODELS["nemotron-3-super-120b-a12b"],
    "longrope": PHI_3_5_MINI,
    "longrope on a part of each head": PHI_4_MINI,
    "longrope's long factors": LONG_TEXTS,
}
