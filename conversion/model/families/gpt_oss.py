"""gpt-oss: attention with sinks and a window in every second layer, and biased experts with a clamped SwiGLU."""

from __future__ import annotations

from typing import Any

from conversion.model.attention_config import windows_by_layer
from conversion.model.config_reader import ConfigReader, UnsupportedArchitecture
from conversion.model.family import Family
from conversion.model.hf_config import decoder
from conversion.model.rules import ATTENTION, OUTPUT_BIAS, QKV_BIAS, SINKS, decoder_rules
from conversion.model.stacked_rules import STACKED_EXPERTS


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    # What transformers takes for keys that are absent.
    config = ConfigReader({"sliding_window": 128, **config.mapping})
    config = config.with_defaults(rope_theta=150000.0, rms_norm_eps=1e-5, head_dim=64)
    if not (config.mapping.get("rope_parameters") or config.mapping.get("rope_scaling")):
        raise UnsupportedArchitecture("rope_parameters is missing, for which transformers would take yarn's")
    if not config.flag("attention_bias", True):
        raise UnsupportedArchitecture("attention_bias=false is not supported: no published checkpoint has it")
    if (alpha := config.number("swiglu_alpha", 1.702)) != 1.702:
        raise UnsupportedArchitecture(f"swiglu_alpha={alpha} is not supported: only 1.702 is")
    fields = decoder(config)
    return {
        **fields,
        **windows_by_layer(config, full_every=2),
        "num_experts": config.integer("num_local_experts"),
        "num_experts_per_tok": config.integer("num_experts_per_tok", 4),
        "moe_ffn_hidden_size": fields["ffn_hidden_size"],
        "attention_bias": True,
        "linear_bias": True,
        "attention_sinks": True,
        "activation": "quick_gelu",
        "activation_limit": config.number("swiglu_limit", 7.0),
        "activation_offset": 1.0,
    }


FAMILY = Family(
    "gpt_oss",
    rules=decoder_rules(*ATTENTION, *QKV_BIAS, *OUTPUT_BIAS, *SINKS, *STACKED_EXPERTS),
    read=read,
    engine_classes={"GptOssForCausalLM": "sglang.srt.models.gpt_oss:GptOssForCausalLM"},
)
