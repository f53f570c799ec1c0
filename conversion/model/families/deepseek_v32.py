"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention: an indexer in every layer chooses the keys."""

from __future__ import annotations

from typing import Any

from conversion.model.attention_config import sparse_attention
from conversion.model.config_reader import ConfigReader
from conversion.model.expert_config import sigmoid_router
from conversion.model.families import deepseek_v3
from conversion.model.family import Family
from conversion.model.hf_config import unbiased_decoder
from conversion.model.rules import INDEXER, decoder_rules

RULES = decoder_rules(*deepseek_v3.LAYER, *INDEXER)


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    config = config.with_defaults(**deepseek_v3.ROUTER_DEFAULTS)
    # transformers gives every layer an indexer of its own, and SGLang does as these say.
    config.refuse("indexer_types", "index_topk_pattern")
    config.require(index_topk_freq=1)
    return {**unbiased_decoder(config), **sparse_attention(config, interleaved=False), **sigmoid_router(config)}


FAMILY = Family(
    "deepseek_v32",
    rules=RULES,
    read=read,
    engine_classes={"DeepseekV32ForCausalLM": "sglang.srt.models.deepseek_v2:DeepseekV32ForCausalLM"},
)
