"""Mistral: Llama with a sliding window in all layers, where config.json sets one."""

from __future__ import annotations

from typing import Any

from conversion.model.attention_config import sliding_window
from conversion.model.config_reader import ConfigReader
from conversion.model.family import Family
from conversion.model.hf_config import unbiased_decoder
from conversion.model.rules import ATTENTION, SWIGLU, decoder_rules


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    return {**unbiased_decoder(config), **sliding_window(config)}


# SGLang loads it with Llama's class.
FAMILY = Family(
    "mistral",
    rules=decoder_rules(*ATTENTION, *SWIGLU),
    read=read,
    block_fp8="compressed-tensors",
    within=("mistral3",),
)
