"""Qwen3.5's language model: gated delta nets in most layers, gated attention in the others."""

from __future__ import annotations

from typing import Any

from conversion.model.attention_config import gated_delta_net
from conversion.model.config_reader import ConfigReader
from conversion.model.family import Family
from conversion.model.hf_config import partial_rotary, unbiased_decoder
from conversion.model.predictor_rules import predictor_apart
from conversion.model.recurrent_rules import SPLIT_GATED_DELTA_NET
from conversion.model.rules import GATED_ATTENTION, SWIGLU, decoder_rules


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    config = config.with_defaults(head_dim=256)
    config.refuse("output_gate_type")
    config.require(attn_output_gate=True)
    return {
        **unbiased_decoder(config),
        **partial_rotary(config, default=0.25),
        **gated_delta_net(config, full_every=4),
        "attention_gate": True,
        "qk_norm": True,
        "zero_centered_norm": True,
    }


FAMILY = Family(
    "qwen3_5_text",
    rules=decoder_rules(*GATED_ATTENTION, *SPLIT_GATED_DELTA_NET, *SWIGLU),
    predictors=predictor_apart(*GATED_ATTENTION, *SWIGLU),
    read=read,
    engine_classes={"Qwen3_5ForCausalLM": "sglang.srt.models.qwen3_5_text:Qwen3_5ForCausalLM"},
    within=("qwen3_5",),
)
