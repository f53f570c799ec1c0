"""Qwen3 with a mixture of experts, in every layer unless config.json says which are dense."""

from __future__ import annotations

from typing import Any

from conversion.model.attention_config import switched_sliding_window
from conversion.model.config_reader import ConfigReader
from conversion.model.expert_config import experts, listed_dense_layers
from conversion.model.family import Family
from conversion.model.hf_config import unbiased_decoder
from conversion.model.rules import ATTENTION, EXPERTS, QK_NORM, SWIGLU, decoder_rules


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    fields = unbiased_decoder(config)
    return {
        **fields,
        **experts(config),
        **listed_dense_layers(config),
        **switched_sliding_window(config),
        "qk_norm": True,
    }


FAMILY = Family(
    "qwen3_moe",
    rules=decoder_rules(*ATTENTION, *QK_NORM, *EXPERTS, *SWIGLU),
    read=read,
    engine_classes={"Qwen3MoeForCausalLM": "sglang.srt.models.qwen3_moe:Qwen3MoeForCausalLM"},
    within=("qwen3_vl_moe",),
)
