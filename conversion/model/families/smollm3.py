"""SmolLM3: Llama with every fourth layer without positions."""

from __future__ import annotations

from typing import Any

from conversion.model.config_reader import ConfigReader
from conversion.model.family import Family
from conversion.model.hf_config import layers_without_positions, unbiased_decoder
from conversion.model.rules import ATTENTION, SWIGLU, decoder_rules


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    config.refuse("use_sliding_window")
    config = config.with_defaults(num_key_value_heads=4, rope_theta=2000000.0, tie_word_embeddings=True)
    return {**unbiased_decoder(config), **layers_without_positions(config)}


# SGLang has no class of its own for it.
FAMILY = Family("smollm3", rules=decoder_rules(*ATTENTION, *SWIGLU), read=read)
