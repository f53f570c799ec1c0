"""Qwen1.5-MoE and Qwen2-MoE: biases on q, k and v, and a gated shared expert beside the experts."""

from __future__ import annotations

from typing import Any

from conversion.model.attention_config import optional_sliding_window
from conversion.model.config_reader import ConfigReader, UnsupportedArchitecture
from conversion.model.expert_config import experts, listed_dense_layers, shared_expert
from conversion.model.family import Family
from conversion.model.hf_config import decoder
from conversion.model.rules import (
    ATTENTION,
    EXPERTS,
    QKV_BIAS,
    SHARED_EXPERT,
    SHARED_EXPERT_GATE,
    SWIGLU,
    decoder_rules,
)


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    fields = {**decoder(config), **experts(config), **listed_dense_layers(config), **shared_expert(config)}
    if not config.flag("qkv_bias", True):
        raise UnsupportedArchitecture("qkv_bias=false is not supported: no published checkpoint has it")
    return {**fields, **optional_sliding_window(config), "attention_bias": True}


FAMILY = Family(
    "qwen2_moe",
    rules=decoder_rules(*ATTENTION, *QKV_BIAS, *EXPERTS, *SWIGLU, *SHARED_EXPERT, *SHARED_EXPERT_GATE),
    read=read,
    engine_classes={"Qwen2MoeForCausalLM": "sglang.srt.models.qwen2_moe:Qwen2MoeForCausalLM"},
)
