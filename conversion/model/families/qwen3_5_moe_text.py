"""Qwen3.5's language model as a mixture of experts, with a gated shared one."""

from __future__ import annotations

from typing import Any

from conversion.model.config_reader import ConfigReader
from conversion.model.expert_config import experts, shared_expert
from conversion.model.families import qwen3_5_text
from conversion.model.family import Family
from conversion.model.predictor_rules import predictor_apart
from conversion.model.recurrent_rules import SPLIT_GATED_DELTA_NET
from conversion.model.rules import EXPERTS, GATED_ATTENTION, SHARED_EXPERT, SHARED_EXPERT_GATE, decoder_rules

_EXPERTS = (*EXPERTS, *SHARED_EXPERT, *SHARED_EXPERT_GATE)


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    # No layer is dense, and gates are always normalised.
    config = config.with_defaults(intermediate_size=config.integer("moe_intermediate_size"), norm_topk_prob=True)
    config.require(norm_topk_prob=True)
    return {**qwen3_5_text.read(config), **experts(config), **shared_expert(config)}


FAMILY = Family(
    "qwen3_5_moe_text",
    rules=decoder_rules(*GATED_ATTENTION, *SPLIT_GATED_DELTA_NET, *_EXPERTS),
    predictors=predictor_apart(*GATED_ATTENTION, *_EXPERTS),
    read=read,
    engine_classes={"Qwen3_5MoeForCausalLM": "sglang.srt.models.qwen3_5_text:Qwen3_5MoeForCausalLM"},
    within=("qwen3_5_moe",),
)
