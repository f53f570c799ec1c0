"""DeepSeek-V2, V2-Lite and Coder-V2: latent attention, a softmax router, groups of experts chosen by their best one."""

from __future__ import annotations

from typing import Any

from conversion.model.attention_config import latent_attention
from conversion.model.config_reader import ConfigReader
from conversion.model.expert_config import softmax_router
from conversion.model.family import Family
from conversion.model.hf_config import unbiased_decoder
from conversion.model.rules import EXPERTS, LATENT_ATTENTION, SHARED_EXPERT, SWIGLU, decoder_rules, renamed


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    config.require(rope_interleave=True)  # transformers interleaves whatever it says, and engines do as it says
    return {**unbiased_decoder(config), **latent_attention(config), **softmax_router(config)}


FAMILY = Family(
    "deepseek_v2",
    rules=decoder_rules(
        *LATENT_ATTENTION,
        *SWIGLU,
        *EXPERTS,
        *renamed(SHARED_EXPERT, {"shared_expert.": "shared_experts."}),
    ),
    read=read,
    engine_classes={"DeepseekV2ForCausalLM": "sglang.srt.models.deepseek_v2:DeepseekV2ForCausalLM"},
)
