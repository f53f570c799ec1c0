"""MiniMax-M2: experts on disk as Mixtral's, a sigmoid router with a bias, OLMo 2's norms of queries and keys, and
positions on a part of each head."""

from __future__ import annotations

from typing import Any

from conversion.model.config_reader import ConfigReader, UnsupportedArchitecture
from conversion.model.expert_config import sigmoid_gates
from conversion.model.families import mixtral
from conversion.model.family import Family
from conversion.model.hf_config import partial_rotary, unbiased_decoder
from conversion.model.rules import ATTENTION, EXPERTS, FULL_WIDTH_QK_NORM, ROUTER_BIAS, decoder_rules, renamed

NAMES = {"mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias", **mixtral.NAMES}


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    config = config.with_defaults(head_dim=128, num_key_value_heads=8, num_experts_per_tok=8, rope_theta=5000000.0)
    config.refuse("router_jitter_noise", "shared_intermediate_size")
    # transformers computes only these, whatever config.json says.
    config.require(use_qk_norm=True, qk_norm_type="per_layer", use_routing_bias=True)
    if any(kind != 1 for kind in config.items("attn_type_list")):
        raise UnsupportedArchitecture("attn_type_list has other kinds of layers than 1: linear attention is missing")
    # use_mtp and num_mtp_modules announce layers that published checkpoints lack; files.hf_checkpoint looks for them.
    fields = unbiased_decoder(config)
    share = config.integer("rotary_dim", fields["head_dim"]) / fields["head_dim"]
    return {
        **fields,
        **partial_rotary(config, default=share),
        **sigmoid_gates(config),
        "num_experts": config.integer("num_local_experts"),
        "moe_ffn_hidden_size": fields["ffn_hidden_size"],
        "qk_norm": True,
        "qk_norm_full_width": True,
    }


FAMILY = Family(
    "minimax_m2",
    rules=decoder_rules(*ATTENTION, *FULL_WIDTH_QK_NORM, *renamed((*EXPERTS, *ROUTER_BIAS), NAMES)),
    read=read,
    engine_classes={"MiniMaxM2ForCausalLM": "sglang.srt.models.minimax_m2:MiniMaxM2ForCausalLM"},
)
