"""DeepSeek-V3, R1 and Kimi K2: latent attention, a sigmoid router with a bias and groups."""

from __future__ import annotations

from typing import Any

from conversion.model.attention_config import latent_attention
from conversion.model.config_reader import ConfigReader
from conversion.model.expert_config import sigmoid_router
from conversion.model.family import Family
from conversion.model.hf_config import unbiased_decoder
from conversion.model.predictor_rules import COPIES_BEHIND, predictor_behind
from conversion.model.rules import EXPERTS, LATENT_ATTENTION, ROUTER_BIAS, SHARED_EXPERT, SWIGLU, decoder_rules, renamed

_EXPERTS = (*EXPERTS, *ROUTER_BIAS, *renamed(SHARED_EXPERT, {"shared_expert.": "shared_experts."}))
LAYER = (*LATENT_ATTENTION, *SWIGLU, *_EXPERTS)


ROUTER_DEFAULTS: dict[str, Any] = {
    "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5
}  # fmt: skip
"""What transformers and engines take where config.json lacks a key."""


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    config.refuse("index_topk")  # SGLang's class reads it: attention is sparse then, as in the family deepseek_v32
    config = config.with_defaults(**ROUTER_DEFAULTS)
    return {**unbiased_decoder(config), **latent_attention(config), **sigmoid_router(config)}


FAMILY = Family(
    "deepseek_v3",
    aliases=("kimi_k2",),  # arXiv:2507.20534, section 2.3: DeepSeek-V3 with other sizes, and one group of experts
    rules=decoder_rules(*LAYER),
    predictors=predictor_behind(*LATENT_ATTENTION, *_EXPERTS),
    predictor_copies=COPIES_BEHIND,
    read=read,
    engine_classes={"DeepseekV3ForCausalLM": "sglang.srt.models.deepseek_v2:DeepseekV3ForCausalLM"},
)
