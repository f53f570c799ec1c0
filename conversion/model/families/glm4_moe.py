"""GLM-4.5, 4.6 and 4.7: positions on a part of each head, DeepSeek-V3's router, and a dense layer first."""

from __future__ import annotations

from typing import Any

from conversion.model.config_reader import ConfigReader
from conversion.model.expert_config import sigmoid_router
from conversion.model.family import Family
from conversion.model.hf_config import decoder, partial_rotary
from conversion.model.predictor_rules import COPIES_BEHIND, predictor_behind
from conversion.model.rules import (
    ATTENTION,
    EXPERTS,
    QK_NORM,
    QKV_BIAS,
    ROUTER_BIAS,
    SHARED_EXPERT,
    SWIGLU,
    decoder_rules,
    optional,
    renamed,
)

_ATTENTION = (*ATTENTION, *optional(QKV_BIAS, "attention_bias"), *optional(QK_NORM, "qk_norm"))
_EXPERTS = (*EXPERTS, *ROUTER_BIAS, *renamed(SHARED_EXPERT, {"shared_expert.": "shared_experts."}))


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    config = config.with_defaults(first_k_dense_replace=1)
    return {
        **decoder(config),
        **partial_rotary(config, default=0.5),
        **sigmoid_router(config),
        "attention_bias": config.flag("attention_bias"),
        "qk_norm": config.flag("use_qk_norm"),
    }


FAMILY = Family(
    "glm4_moe",
    rules=decoder_rules(*_ATTENTION, *SWIGLU, *_EXPERTS),
    predictors=predictor_behind(*_ATTENTION, *_EXPERTS),
    predictor_copies=COPIES_BEHIND,
    read=read,
    engine_classes={"Glm4MoeForCausalLM": "sglang.srt.models.glm4_moe:Glm4MoeForCausalLM"},
)
