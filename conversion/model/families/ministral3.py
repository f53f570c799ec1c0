"""Ministral 3, its language model: Mistral whose queries grow with their position."""

from __future__ import annotations

from typing import Any

from conversion.model.attention_config import set_sliding_window
from conversion.model.config_reader import ConfigReader
from conversion.model.family import Family
from conversion.model.hf_config import unbiased_decoder
from conversion.model.rules import ATTENTION, SWIGLU, decoder_rules


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    config = config.with_defaults(head_dim=128, num_key_value_heads=8, rms_norm_eps=1e-5)
    positions = config.inner("rope_parameters")  # transformers and SGLang read no other key
    grown = positions.number("llama_4_scaling_beta"), positions.integer("original_max_position_embeddings")
    return {**unbiased_decoder(config), **set_sliding_window(config), "query_growth": grown}


FAMILY = Family(
    "ministral3",
    rules=decoder_rules(*ATTENTION, *SWIGLU),
    read=read,
    engine_classes={"Ministral3ForCausalLM": "sglang.srt.models.ministral3:Ministral3ForCausalLM"},
    within=("mistral3",),
)
