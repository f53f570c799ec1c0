"""OLMo 2: norms after attention and MLP instead of before, and on queries and keys over all heads together."""

from __future__ import annotations

from typing import Any

from conversion.model.config_reader import ConfigReader
from conversion.model.family import Family
from conversion.model.hf_config import unbiased_decoder
from conversion.model.rules import FULL_WIDTH_QK_NORM, POST_NORMS, PROJECTIONS, SWIGLU, decoder_rules


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    return {
        **unbiased_decoder(config),
        "rms_norm_eps": config.number("rms_norm_eps", 1e-5),
        "qk_norm": True,
        "qk_norm_full_width": True,
        "pre_norm": False,
        "post_norm": True,
    }


FAMILY = Family(
    "olmo2",
    rules=decoder_rules(*PROJECTIONS, *FULL_WIDTH_QK_NORM, *SWIGLU, *POST_NORMS),
    read=read,
    engine_classes={"Olmo2ForCausalLM": "sglang.srt.models.olmo2:Olmo2ForCausalLM"},
)
