"""Qwen3, dense: RMSNorm on queries and keys."""

from __future__ import annotations

from typing import Any

from conversion.model.attention_config import optional_sliding_window
from conversion.model.config_reader import ConfigReader
from conversion.model.family import Family
from conversion.model.hf_config import unbiased_decoder
from conversion.model.rules import ATTENTION, QK_NORM, SWIGLU, decoder_rules


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    return {**unbiased_decoder(config), **optional_sliding_window(config), "qk_norm": True}


FAMILY = Family(
    "qwen3",
    rules=decoder_rules(*ATTENTION, *QK_NORM, *SWIGLU),
    read=read,
    engine_classes={"Qwen3ForCausalLM": "sglang.srt.models.qwen3:Qwen3ForCausalLM"},
    within=("qwen3_vl",),
)
