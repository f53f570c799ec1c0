"""Qwen3-Next: gated delta nets in most layers, gated attention in the others, experts with a gated shared one."""

from __future__ import annotations

from typing import Any

from conversion.model.attention_config import gated_delta_net
from conversion.model.config_reader import ConfigReader
from conversion.model.expert_config import experts, listed_dense_layers, shared_expert
from conversion.model.family import Family
from conversion.model.hf_config import partial_rotary, unbiased_decoder
from conversion.model.predictor_rules import predictor_apart
from conversion.model.recurrent_rules import GATED_DELTA_NET
from conversion.model.rules import EXPERTS, GATED_ATTENTION, SHARED_EXPERT, SHARED_EXPERT_GATE, SWIGLU, decoder_rules

_EXPERTS = (*EXPERTS, *SHARED_EXPERT, *SHARED_EXPERT_GATE)


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    config = config.with_defaults(head_dim=256, norm_topk_prob=True)
    config.refuse("output_gate_type")
    return {
        **unbiased_decoder(config),
        **partial_rotary(config, default=0.25),
        **experts(config),
        **listed_dense_layers(config),
        **shared_expert(config),
        **gated_delta_net(config, full_every=4),
        "attention_gate": True,
        "qk_norm": True,
        "zero_centered_norm": True,
    }


FAMILY = Family(
    "qwen3_next",
    rules=decoder_rules(*GATED_ATTENTION, *GATED_DELTA_NET, *_EXPERTS, *SWIGLU),
    predictors=predictor_apart(*GATED_ATTENTION, *_EXPERTS),
    unannounced_predictors=1,
    read=read,
    engine_classes={"Qwen3NextForCausalLM": "sglang.srt.models.qwen3_next:Qwen3NextForCausalLM"},
)
