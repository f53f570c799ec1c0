"""GLM-5: DeepSeek-V3.2's layers, some of which may see the keys that the layer before them sees."""

from __future__ import annotations

from typing import Any

from conversion.model.attention_config import shared_choices, sparse_attention
from conversion.model.config_reader import ConfigReader
from conversion.model.expert_config import sigmoid_router
from conversion.model.families import deepseek_v32
from conversion.model.family import Family
from conversion.model.hf_config import unbiased_decoder


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    rotated = config.integer("qk_rope_head_dim")
    config = config.with_defaults(
        first_k_dense_replace=3, routed_scaling_factor=2.5, rms_norm_eps=1e-5, head_dim=rotated
    )
    return {
        **unbiased_decoder(config),
        **sparse_attention(config, interleaved=True),
        **shared_choices(config),
        **sigmoid_router(config),
    }


FAMILY = Family(
    "glm_moe_dsa",
    rules=deepseek_v32.RULES,
    read=read,
    engine_classes={"GlmMoeDsaForCausalLM": "sglang.srt.models.glm4_moe:GlmMoeDsaForCausalLM"},
)
