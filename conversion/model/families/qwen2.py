"""Qwen2 and Qwen2.5: biases on q, k and v."""

from __future__ import annotations

from typing import Any

from conversion.model.family import Family
from conversion.model.hf_config import ConfigReader, decoder, optional_sliding_window
from conversion.model.rules import ATTENTION, QKV_BIAS, SWIGLU, decoder_rules


def read(config: ConfigReader) -> dict[str, Any]:
    return {**decoder(config), **optional_sliding_window(config), "attention_bias": True}


FAMILY = Family(
    "qwen2",
    rules=decoder_rules(*ATTENTION, *QKV_BIAS, *SWIGLU),
    read=read,
    engine_classes={"Qwen2ForCausalLM": "sglang.srt.models.qwen2:Qwen2ForCausalLM"},
)
