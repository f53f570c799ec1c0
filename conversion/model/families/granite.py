"""Granite 3: Llama with factors on embeddings, attention scores, what layers add, and logits."""

from __future__ import annotations

from typing import Any

from conversion.model.config_reader import ConfigReader
from conversion.model.family import Family
from conversion.model.hf_config import multipliers, unbiased_decoder
from conversion.model.rules import ATTENTION, SWIGLU, decoder_rules


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    return {**unbiased_decoder(config), **multipliers(config)}


FAMILY = Family(
    "granite",
    rules=decoder_rules(*ATTENTION, *SWIGLU),
    read=read,
    engine_classes={"GraniteForCausalLM": "sglang.srt.models.granite:GraniteForCausalLM"},
)
