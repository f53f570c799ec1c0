"""Nemotron-H and Nemotron 3: a layer is Mamba-2, attention without positions, an MLP or experts, and nothing beside it.

MLPs and experts have no gate and square their ReLU (arXiv:2504.03624, section 2.1; with experts arXiv:2512.20848).
Steps of Mamba-2 have no lower bound, as ``time_step_limit`` says and SGLang computes; transformers raises them to
``time_step_min``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from conversion.model.attention_config import EARLIER_NAMES, MambaSizes, check_steps
from conversion.model.config_reader import FULL, LINEAR, ConfigReader, MalformedConfig, UnsupportedArchitecture, shown
from conversion.model.expert_config import choice_of_groups, sigmoid_gates
from conversion.model.family import Family
from conversion.model.hf_config import unbiased_decoder
from conversion.model.recurrent_rules import MAMBA
from conversion.model.rules import (
    ATTENTION,
    EXPERTS,
    HF_LAYER,
    LATENT_PROJECTIONS,
    MCORE_LAYER,
    PROJECTIONS,
    ROUTER_BIAS,
    Layers,
    decoder_rules,
    renamed,
    ungated_mlp,
)

MLP, MOE = "mlp", "moe"
PATTERN = {"M": LINEAR, "*": FULL, "-": MLP, "E": MOE}
"""The letters of hybrid_override_pattern."""
NAMES = {
    "model.layers.": "backbone.layers.",
    ".self_attn.": ".mixer.",
    ".mamba.": ".mixer.",
    ".mlp.": ".mixer.",
    ".input_layernorm.": ".norm.",
    ".post_attention_layernorm.": ".norm.",
    "model.embed_tokens.": "backbone.embeddings.",
    "model.norm.": "backbone.norm_f.",
}
_RULES = (
    replace(ATTENTION[0], layers=Layers.MIXER),
    *(replace(rule, layers=Layers.ATTENTION) for rule in PROJECTIONS),
    *MAMBA,
    replace(ATTENTION[-1], layers=Layers.MLP),
    *ungated_mlp(MCORE_LAYER + "mlp.", HF_LAYER + "mlp.", "ffn", Layers.DENSE),
    EXPERTS[0],
    *ungated_mlp(
        MCORE_LAYER + "mlp.experts.local_experts.{expert}.",
        HF_LAYER + "mlp.experts.{expert}.",
        "expert_ffn",
        Layers.EXPERTS,
        "expert_hidden",
    ),
    *LATENT_PROJECTIONS,
    *ROUTER_BIAS,
    *ungated_mlp(MCORE_LAYER + "mlp.shared_experts.", HF_LAYER + "mlp.shared_experts.", "shared_ffn", Layers.EXPERTS),
)


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    config = config.with_defaults(
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, intermediate_size=21504, vocab_size=131072,
        max_position_embeddings=4096,
    )  # fmt: skip
    kinds = layer_kinds(config)
    config.refuse("use_bias", "mamba_proj_bias", "residual_in_fp32", "sliding_window")
    config.require(mlp_hidden_act="relu2", mamba_hidden_act="silu", use_conv_bias=True, mamba_conv_bias=True)
    config.require(attention_head_dim=config.integer("head_dim"), n_shared_experts=1)
    sizes = {"num_hidden_layers": len(kinds), "rms_norm_eps": config.number("layer_norm_epsilon", 1e-5)}
    fields = {
        **unbiased_decoder(ConfigReader({**config.mapping, **sizes})),
        "activation": "relu2",
        "gated_mlp": False,
        "unrotated_layers": tuple(range(len(kinds))),
        "layers_without_mixer": _numbers(kinds, MLP, MOE),
        "layers_without_mlp": _numbers(kinds, LINEAR, FULL),
    }
    if linear := _numbers(kinds, LINEAR):
        fields |= {"linear_layers": linear, "mamba": _mamba(config)}
    return {**fields, **_experts(config, _numbers(kinds, MLP))} if MOE in kinds else fields


def layer_kinds(config: ConfigReader) -> list[str]:
    """What each layer is: one of the values of ``PATTERN``.

    Raises:
        UnsupportedArchitecture: neither hybrid_override_pattern nor layers_block_type says it, or the two differ.
    """
    pattern = config.text("hybrid_override_pattern", "")
    drawn = [PATTERN.get(letter, letter) for letter in pattern]
    items = config.items("layers_block_type")
    listed = [EARLIER_NAMES.get(kind, kind) if isinstance(kind, str) else kind for kind in items]
    kinds = listed or drawn
    if not kinds or any(kind not in PATTERN.values() for kind in (*listed, *drawn)):
        raise UnsupportedArchitecture(
            f"hybrid_override_pattern={shown(pattern)} and layers_block_type={shown(listed)}: one of them has to say "
            f"what each layer is, by the letters {' '.join(PATTERN)} or the words {', '.join(PATTERN.values())}"
        )
    if listed and drawn and listed != drawn:
        raise UnsupportedArchitecture(
            f"hybrid_override_pattern={shown(pattern)} says something else than layers_block_type={shown(listed)}: "
            "make the two agree"
        )
    if config.integer("num_hidden_layers", len(kinds)) != len(kinds):
        raise MalformedConfig(
            f"num_hidden_layers={config.integer('num_hidden_layers')} with {len(kinds)} kinds of layers: make the two "
            "agree"
        )
    return kinds


def _numbers(kinds: list[str], *wanted: str) -> tuple[int, ...]:
    return tuple(number for number, kind in enumerate(kinds) if kind in wanted)


def _mamba(config: ConfigReader) -> MambaSizes:
    check_steps(config)
    heads = config.integer("mamba_num_heads", 128)
    groups = config.integer("mamba_n_groups", config.integer("n_groups", 8))
    if heads % groups:
        raise UnsupportedArchitecture(f"mamba_num_heads={heads} is no multiple of n_groups={groups}")
    return MambaSizes(
        heads=heads,
        head_dim=config.integer("mamba_head_dim", 64),
        groups=groups,
        state_dim=config.integer("ssm_state_size", 128),
        kernel=config.integer("mamba_d_conv", config.integer("conv_kernel", 4)),
    )


def _experts(config: ConfigReader, dense: tuple[int, ...]) -> dict[str, Any]:
    config = config.with_defaults(num_experts_per_tok=2)
    gates = sigmoid_gates(config)
    return {
        **gates,
        "router_groups": choice_of_groups(config, gates["num_experts_per_tok"]),
        "num_experts": config.integer("n_routed_experts", 8),
        "moe_ffn_hidden_size": config.integer("moe_intermediate_size", 7688),
        "moe_latent_size": config.integer("moe_latent_size") if config.has("moe_latent_size") else None,
        "shared_expert_ffn_hidden_size": config.integer("moe_shared_expert_intermediate_size", 7688),
        "routed_scaling_factor": config.number("routed_scaling_factor", 1.0),
        "dense_layers": dense,
    }


FAMILY = Family(
    "nemotron_h",
    rules=renamed(decoder_rules(*_RULES), NAMES),
    read=read,
    engine_classes={"NemotronHForCausalLM": "sglang.srt.models.nemotron_h:NemotronHForCausalLM"},
)
