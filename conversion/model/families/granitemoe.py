"""Granite 3's mixtures of experts: Granite with experts in every layer, all of a layer in one tensor."""

from __future__ import annotations

from typing import Any

from conversion.model.config_reader import ConfigReader
from conversion.model.family import Family
from conversion.model.hf_config import multipliers, unbiased_decoder
from conversion.model.rules import ATTENTION, decoder_rules
from conversion.model.stacked_rules import ROW_STACKED_EXPERTS


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    fields = {**unbiased_decoder(config), **multipliers(config)}
    return {
        **fields,
        "num_experts": config.integer("num_local_experts", 8),
        "num_experts_per_tok": config.integer("num_experts_per_tok", 2),
        "moe_ffn_hidden_size": fields["ffn_hidden_size"],
    }


FAMILY = Family(
    "granitemoe",
    rules=decoder_rules(*ATTENTION, *ROW_STACKED_EXPERTS),
    read=read,
    engine_classes={"GraniteMoeForCausalLM": "sglang.srt.models.granitemoe:GraniteMoeForCausalLM"},
)
