"""ERNIE-4.5, its dense models: Llama whose positions rotate features side by side."""

from __future__ import annotations

from typing import Any

from conversion.model.config_reader import ConfigReader
from conversion.model.family import Family
from conversion.model.hf_config import unbiased_decoder
from conversion.model.rules import ATTENTION, SWIGLU, decoder_rules


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    config.refuse("use_bias")
    config = config.with_defaults(
        head_dim=128, num_key_value_heads=2, rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=True
    )
    return {**unbiased_decoder(config), "rotary_pairs": True}


FAMILY = Family(
    "ernie4_5",
    rules=decoder_rules(*ATTENTION, *SWIGLU),
    read=read,
    engine_classes={"Ernie4_5_ForCausalLM": "sglang.srt.models.ernie4:Ernie4_5_ForCausalLM"},
)
