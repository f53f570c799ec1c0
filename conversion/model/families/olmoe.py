"""OLMoE: experts in every layer, and norms on queries and keys over all heads together."""

from __future__ import annotations

from typing import Any

from conversion.model.config_reader import ConfigReader
from conversion.model.expert_config import experts
from conversion.model.family import Family
from conversion.model.hf_config import unbiased_decoder
from conversion.model.rules import ATTENTION, EXPERTS, FULL_WIDTH_QK_NORM, decoder_rules


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    config.refuse("clip_qkv")
    config.require(norm_topk_prob=False, rms_norm_eps=1e-5)  # SGLang computes with these, whatever config.json says
    config = config.with_defaults(
        rms_norm_eps=1e-5, moe_intermediate_size=config.integer("intermediate_size"), num_experts_per_tok=8
    )
    return {**unbiased_decoder(config), **experts(config), "qk_norm": True, "qk_norm_full_width": True}


FAMILY = Family(
    "olmoe",
    rules=decoder_rules(*ATTENTION, *FULL_WIDTH_QK_NORM, *EXPERTS),
    read=read,
    engine_classes={"OlmoeForCausalLM": "sglang.srt.models.olmoe:OlmoeForCausalLM"},
)
