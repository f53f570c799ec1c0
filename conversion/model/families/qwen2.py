"""Qwen2, Qwen2.5 and MiMo: biases on q, k and v."""

from __future__ import annotations

from typing import Any

from conversion.model.attention_config import optional_sliding_window
from conversion.model.config_reader import ConfigReader
from conversion.model.family import Family
from conversion.model.hf_config import decoder
from conversion.model.predictor_rules import predictor_rules
from conversion.model.rules import ATTENTION, QKV_BIAS, SWIGLU, decoder_rules

_LAYER = (*ATTENTION, *QKV_BIAS, *SWIGLU)


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    return {**decoder(config), **optional_sliding_window(config), "attention_bias": True}


FAMILY = Family(
    "qwen2",
    aliases=("mimo",),  # arXiv:2505.07608, section 2.3: Qwen2.5 with a layer for multi-token prediction behind it
    rules=decoder_rules(*_LAYER),
    predictors=predictor_rules(
        *_LAYER,
        hf="model.mtp_layers.{layer}.",
        first_norm="hidden_layernorm",
        second_norm="token_layernorm",
        projection="input_proj",
        final_norm="final_layernorm",
    ),
    predictor_hidden_first=True,
    read=read,
    engine_classes={
        "Qwen2ForCausalLM": "sglang.srt.models.qwen2:Qwen2ForCausalLM",
        "MiMoForCausalLM": "sglang.srt.models.mimo:MiMoForCausalLM",
    },
)
