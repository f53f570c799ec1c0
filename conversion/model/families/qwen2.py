"""Qwen2, Qwen2.5 and MiMo: biases on q, k and v."""

from __future__ import annotations

from typing import Any

from conversion.model.family import Family
from conversion.model.hf_config import ConfigReader, decoder, optional_sliding_window
from conversion.model.rules import ATTENTION, QKV_BIAS, SWIGLU, decoder_rules


def read(config: ConfigReader) -> dict[str, Any]:
    return {**decoder(config), **optional_sliding_window(config), "attention_bias": True}


FAMILY = Family(
    "qwen2",
    aliases=("mimo",),  # arXiv:2505.07608, section 2.3: Qwen2.5 with a layer for multi-token prediction behind it
    rules=decoder_rules(*ATTENTION, *QKV_BIAS, *SWIGLU),
    read=read,
    engine_classes={
        "Qwen2ForCausalLM": "sglang.srt.models.qwen2:Qwen2ForCausalLM",
        "MiMoForCausalLM": "sglang.srt.models.mimo:MiMoForCausalLM",
    },
)
