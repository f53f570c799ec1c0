"""Seed-OSS: Llama with biases on q, k and v."""

from __future__ import annotations

from typing import Any

from conversion.model.config_reader import ConfigReader, UnsupportedArchitecture
from conversion.model.family import Family
from conversion.model.hf_config import decoder
from conversion.model.rules import ATTENTION, QKV_BIAS, SWIGLU, decoder_rules


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    config.refuse("attention_out_bias")
    if not config.flag("attention_bias", True):
        raise UnsupportedArchitecture("attention_bias=false is not supported: no published checkpoint has it")
    return {**decoder(config), "attention_bias": True}


FAMILY = Family("seed_oss", rules=decoder_rules(*ATTENTION, *QKV_BIAS, *SWIGLU), read=read)
