"""Gemma 3, its text model: norms around attention and MLP, a scaled embedding, and windows in most layers."""

from __future__ import annotations

import math
from typing import Any

from conversion.model.attention_config import windows_by_layer
from conversion.model.config_reader import ConfigReader, UnsupportedArchitecture
from conversion.model.family import Family
from conversion.model.hf_config import unbiased_decoder
from conversion.model.rules import ATTENTION, POST_NORMS, QK_NORM, SWIGLU, decoder_rules, renamed


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    config = config.with_defaults(
        rope_theta=1000000.0,
        rope_local_base_freq=10000.0,
        tie_word_embeddings=True,
        num_key_value_heads=4,
        head_dim=256,
    )
    config.refuse("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
    activation = config.text("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise UnsupportedArchitecture(f"hidden_activation={activation!r} is not supported: only gelu_pytorch_tanh is")
    return {
        "local_rope_theta": config.number("rope_local_base_freq"),
        **unbiased_decoder(config),
        **windows_by_layer(config, config.integer("sliding_window_pattern", 6)),
        "activation": "gelu_tanh",
        "qk_norm": True,
        "post_norm": True,
        "zero_centered_norm": True,
        "softmax_scale": config.number("query_pre_attn_scalar", 256) ** -0.5,
        "embedding_scale": math.sqrt(config.integer("hidden_size")),
        "embedding_scale_rounded": True,
    }


FAMILY = Family(
    "gemma3_text",
    rules=decoder_rules(
        *renamed(ATTENTION, {"post_attention_layernorm": "pre_feedforward_layernorm"}),
        *QK_NORM,
        *SWIGLU,
        *POST_NORMS,
    ),
    read=read,
    engine_classes={"Gemma3ForCausalLM": "sglang.srt.models.gemma3_causal:Gemma3ForCausalLM"},
    within=("gemma3",),
)
