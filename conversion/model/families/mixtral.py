"""Mixtral: Mistral with a mixture of experts in every layer, whose probabilities are normalised."""

from __future__ import annotations

from typing import Any

from conversion.model.attention_config import set_sliding_window
from conversion.model.config_reader import ConfigReader
from conversion.model.family import Family
from conversion.model.hf_config import unbiased_decoder
from conversion.model.rules import ATTENTION, EXPERTS, decoder_rules, renamed

NAMES = {
    "mlp.gate.": "block_sparse_moe.gate.",
    "mlp.experts.": "block_sparse_moe.experts.",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    config.refuse("router_jitter_noise")
    fields = unbiased_decoder(config)
    return {
        **fields,
        **set_sliding_window(config),
        "num_experts": config.integer("num_local_experts"),
        "num_experts_per_tok": config.integer("num_experts_per_tok", 2),
        "moe_ffn_hidden_size": fields["ffn_hidden_size"],
    }


FAMILY = Family("mixtral", rules=decoder_rules(*ATTENTION, *renamed(EXPERTS, NAMES)), read=read)
