"""GLM-4.7-Flash: DeepSeek-V3's layers, the first one dense."""

from __future__ import annotations

from typing import Any

from conversion.model.config_reader import ConfigReader
from conversion.model.families import deepseek_v3
from conversion.model.family import Family


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    if not config.has("mlp_layer_types"):
        config.require(first_k_dense_replace=1)  # transformers knows no other number, and engines read it
    config.require(partial_rotary_factor=1.0)  # nothing reads it: qk_rope_head_dim says how much is rotated
    rotated = config.integer("qk_rope_head_dim")
    defaults = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8}
    return deepseek_v3.read(config.with_defaults(**defaults, rms_norm_eps=1e-5, head_dim=rotated))


FAMILY = Family(
    "glm4_moe_lite",
    rules=deepseek_v3.FAMILY.rules,
    predictors=deepseek_v3.FAMILY.predictors,
    predictor_copies=deepseek_v3.FAMILY.predictor_copies,
    read=read,
    engine_classes={"Glm4MoeLiteForCausalLM": "sglang.srt.models.glm4_moe_lite:Glm4MoeLiteForCausalLM"},
)
