"""Reading a Hugging Face ``config.json``: the fields that every decoder has.

A family's reader is made of these, of ``attention_config``, ``expert_config`` and ``position_config`` (see
``family.Family``). Each part returns values for the fields of ``architecture.Architecture``. Nothing else parses
``config.json``.
"""

from __future__ import annotations

from typing import Any

from conversion.model.config_reader import (
    DECLARATIONS,
    MAKE_FULL_PRECISION,
    ConfigReader,
    MalformedConfig,
    UnsupportedArchitecture,
    shown,
)
from conversion.model.position_config import rope


def decoder(config: ConfigReader) -> dict[str, Any]:
    """Fields of a plain decoder: grouped-query attention without biases, rotary positions, SwiGLU, RMSNorm.

    Of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters).

    Raises:
        UnsupportedArchitecture: a needed key is absent or of the wrong type, or a feature is set that would change the
            computation and that the learner does not compute.
    """
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    groups = config.integer("num_key_value_heads", heads)
    if heads % groups:
        raise MalformedConfig(f"num_attention_heads={heads} is no multiple of num_key_value_heads={groups}")
    if not config.has("head_dim") and hidden % heads:
        raise UnsupportedArchitecture(f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}")
    if config.mapping.get("hidden_act", "silu") != "silu":
        raise UnsupportedArchitecture(
            f"hidden_act={shown(config.mapping['hidden_act'])} is not supported: only silu is"
        )
    config.refuse("mlp_bias")
    for key in DECLARATIONS:
        if config.mapping.get(key):
            raise UnsupportedArchitecture(f"{key} is set: {MAKE_FULL_PRECISION}")
    return {
        **rope(config),
        "num_layers": config.integer("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "head_dim": config.integer("head_dim", hidden // heads),
        "ffn_hidden_size": config.integer("intermediate_size"),
        "vocab_size": config.integer("vocab_size"),
        "tie_word_embeddings": config.flag("tie_word_embeddings"),
        "rms_norm_eps": config.number("rms_norm_eps", 1e-6),
        "max_position_embeddings": config.integer("max_position_embeddings", 32768),
        "initializer_range": config.number("initializer_range", 0.02),
    }


def unbiased_decoder(config: ConfigReader) -> dict[str, Any]:
    """``decoder`` of a family whose attention_bias puts a bias on o_proj too, which no published checkpoint has.

    Raises:
        UnsupportedArchitecture: attention_bias is set, or as ``decoder``.
    """
    config.refuse("attention_bias")
    return decoder(config)


def partial_rotary(config: ConfigReader, default: float = 1.0, *, scaled: bool = False) -> dict[str, Any]:
    """``rotary_dim`` of a model whose positions rotate a part of each head; nothing where they rotate all of it.

    Args:
        default: of partial_rotary_factor, where config.json is silent.
        scaled: whether a factor on only the rotated features has been tried with the family.

    Raises:
        UnsupportedArchitecture: as ``decoder``, or the part is no even number of features.
    """
    share = config.inner("rope_parameters").number(
        "partial_rotary_factor", config.number("partial_rotary_factor", default)
    )
    fields = decoder(config)
    head, scaling = fields["head_dim"], fields["rope_scaling"]
    size = int(head * min(share, 2.0))
    if size < head and scaling is not None and scaling.kind in ("yarn", "longrope") and not scaled:
        raise UnsupportedArchitecture(
            f"{scaling.kind} positions with partial_rotary_factor={share}: a factor on only the rotated features is "
            "missing"
        )
    if share > 1 or size < 2 or size % 2:
        raise UnsupportedArchitecture(f"partial_rotary_factor={share}: {size} of a head's {head} features are no pairs")
    return {} if size == head else {"rotary_dim": size}


def multipliers(config: ConfigReader) -> dict[str, Any]:
    """Granite's factors: of embeddings, attention scores and what layers add, and what logits are divided by.

    Raises:
        UnsupportedArchitecture: one of them is no positive number.
    """
    return {
        "embedding_scale": config.number("embedding_multiplier", 1.0),
        "softmax_scale": config.number("attention_multiplier", 1.0),
        "residual_multiplier": config.number("residual_multiplier", 1.0),
        "logits_scaling": config.number("logits_scaling", 1.0),
    }


def layers_without_positions(config: ConfigReader) -> dict[str, Any]:
    """``unrotated_layers``: where no_rope_layers has 0; without it, every no_rope_layer_interval-th.

    Raises:
        UnsupportedArchitecture: as ``decoder``, no_rope_layers is no list of 0 and 1 for each layer, or positions are
            stretched with a factor on scores, which layers without positions would have too.
    """
    layers = config.integer("num_hidden_layers")
    interval, listed = config.integer("no_rope_layer_interval", 4), config.items("no_rope_layers")
    rotated = listed or [int((number + 1) % interval != 0) for number in range(layers)]
    if len(rotated) != layers or any(each not in (0, 1) for each in rotated):
        raise UnsupportedArchitecture(
            f"no_rope_layers={shown(listed)} is no list of 0 or 1 for each of {layers} layers"
        )
    without = tuple(number for number, each in enumerate(rotated) if not each)
    scaling = decoder(config)["rope_scaling"]
    if without and scaling is not None and scaling.attention_factor != 1.0:
        raise UnsupportedArchitecture(
            f"{scaling.kind} positions with attention_factor={scaling.attention_factor}: a factor in layers with "
            "positions alone is missing"
        )
    return {"unrotated_layers": without} if without else {}
