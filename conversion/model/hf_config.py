"""Reading a Hugging Face ``config.json``: typed look-ups, and the parts that decoders have in common.

A family's reader is made of these parts (see ``family.Family``). Each returns values for the fields of
``architecture.Architecture``. Nothing else parses ``config.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class UnsupportedArchitecture(ValueError):
    """config.json is malformed, or describes a model that no family here covers. The message names the key."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling (``rope_type: llama3``) or linear position interpolation (``linear``)."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


class ConfigReader:
    """Typed look-ups in ``mapping`` whose errors name the key. null counts as absent."""

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self.mapping = mapping

    def _value(self, key: str, default: Any) -> Any:
        value = self.mapping.get(key)
        if value is None:
            value = default
        if value is None:
            raise UnsupportedArchitecture(f"{key} is missing")
        return value

    def text(self, key: str) -> str:
        return str(self._value(key, None))

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self._value(key, default))

    def integer(self, key: str, default: int | None = None) -> int:
        """Raises UnsupportedArchitecture where the value is no positive integer, or absent without a default."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnsupportedArchitecture(f"{key}={value!r} is not a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Raises UnsupportedArchitecture where the value is no positive number, or absent without a default."""
        value = self._value(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
            raise UnsupportedArchitecture(f"{key}={value!r} is not a positive number")
        return float(value)

    def refuse(self, *keys: str) -> None:
        """Raises UnsupportedArchitecture where one of ``keys`` is set: the learner does not compute what it asks."""
        for key in keys:
            if self.mapping.get(key):
                value = json.dumps(self.mapping[key])
                raise UnsupportedArchitecture(f"{key}={value} is not supported for {self.text('model_type')}")


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
        raise UnsupportedArchitecture(f"num_attention_heads={heads} is no multiple of num_key_value_heads={groups}")
    if config.mapping.get("head_dim") is None and hidden % heads:
        raise UnsupportedArchitecture(f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}")
    activation = config.mapping.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedArchitecture(f"hidden_act={activation!r} is not supported: only silu is")
    config.refuse("mlp_bias")
    if config.mapping.get("quantization_config"):
        raise UnsupportedArchitecture("quantization_config is set: start from the full-precision weights")
    theta, scaling = _rope(config)
    return {
        "num_layers": config.integer("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "head_dim": config.integer("head_dim", hidden // heads),
        "ffn_hidden_size": config.integer("intermediate_size"),
        "vocab_size": config.integer("vocab_size"),
        "tie_word_embeddings": config.flag("tie_word_embeddings"),
        "rope_theta": theta,
        "rope_scaling": scaling,
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


def experts(config: ConfigReader) -> dict[str, Any]:
    """Fields of a mixture of experts in every layer.

    Raises:
        UnsupportedArchitecture: as ``decoder``.
    """
    count_key = "num_experts" if config.mapping.get("num_experts") is not None else "num_local_experts"
    return {
        "num_experts": config.integer(count_key),
        "num_experts_per_tok": config.integer("num_experts_per_tok"),
        "moe_ffn_hidden_size": config.integer("moe_intermediate_size"),
        "norm_topk_prob": config.flag("norm_topk_prob"),
    }


def shared_expert(config: ConfigReader) -> dict[str, Any]:
    """Fields of a gated SwiGLU beside the experts.

    Raises:
        UnsupportedArchitecture: as ``decoder``.
    """
    return {
        "shared_expert_ffn_hidden_size": config.integer("shared_expert_intermediate_size"),
        "shared_expert_gate": True,
    }


def check_experts_everywhere(config: ConfigReader) -> None:
    """Raise UnsupportedArchitecture where some layers of a mixture of experts are dense."""
    if config.integer("decoder_sparse_step", 1) != 1 or config.mapping.get("mlp_only_layers"):
        raise UnsupportedArchitecture(
            "a mix of dense and expert layers (decoder_sparse_step, mlp_only_layers) is not supported"
        )


def set_sliding_window(config: ConfigReader) -> dict[str, Any]:
    """``sliding_window`` where config.json sets one; absent means none."""
    return {} if config.mapping.get("sliding_window") is None else sliding_window(config)


def sliding_window(config: ConfigReader) -> dict[str, Any]:
    """The field of a window that all layers have, unless ``sliding_window`` is null."""
    window = _window(config)
    return {} if window is None else {"sliding_window": window}


def switched_sliding_window(config: ConfigReader) -> dict[str, Any]:
    """``sliding_window`` where ``use_sliding_window`` turns it on."""
    return sliding_window(config) if config.flag("use_sliding_window") else {}


def optional_sliding_window(config: ConfigReader) -> dict[str, Any]:
    """The field of a window that ``use_sliding_window`` turns on, in the layers that ``layer_types`` or, without it,
    ``max_window_layers`` names.

    Raises:
        UnsupportedArchitecture: some layers have a window and others have none, or layers are to have one that is not
            set.
    """
    window = _window(config) if config.flag("use_sliding_window") else None
    layers, types = config.integer("num_hidden_layers"), layer_types(config)
    full = int(config.mapping.get("max_window_layers", _MAX_WINDOW_LAYERS))
    if types is None:
        named, windowed = f"max_window_layers={full}", 0 if window is None else max(layers - full, 0)
    else:
        named, windowed = "layer_types", types.count(_SLIDING)
    if windowed == 0:
        return {}
    if window is None:
        raise UnsupportedArchitecture(
            f"layer_types asks for {_SLIDING}, but sliding_window is not set or use_sliding_window is false"
        )
    if windowed < layers:
        raise UnsupportedArchitecture(f"{named}: sliding-window attention in some of {layers} layers is not supported")
    return {"sliding_window": window}


# What transformers takes for keys that are absent.
_WINDOW, _MAX_WINDOW_LAYERS = 4096, 28
_FULL, _SLIDING = "full_attention", "sliding_attention"


def _window(config: ConfigReader) -> int | None:
    if "sliding_window" in config.mapping and config.mapping["sliding_window"] is None:
        return None
    return config.integer("sliding_window", _WINDOW)


def layer_types(config: ConfigReader) -> list[str] | None:
    """The attention of each layer, "full_attention" or "sliding_attention"; None where config.json does not say.

    Raises:
        UnsupportedArchitecture: another kind is among them, or there are not as many as layers.
    """
    types = config.mapping.get("layer_types")
    if types is None:
        return None
    layers = config.integer("num_hidden_layers")
    if not isinstance(types, list) or len(types) != layers:
        raise UnsupportedArchitecture(f"layer_types is no list of num_hidden_layers={layers} kinds of attention")
    types = [_FULL if kind == "attention" else kind for kind in types]  # its earlier name
    for number, kind in enumerate(types):
        if kind not in (_FULL, _SLIDING):
            raise UnsupportedArchitecture(f"layer_types[{number}]={kind!r} is not one of {_FULL}, {_SLIDING}")
    return types


def check_layer_types(config: ConfigReader, window: int | None) -> None:
    """Make sure that a model whose layers all have the same ``window`` is the one that ``layer_types`` describes.

    Raises:
        UnsupportedArchitecture: it is not, and the learner would compute something else.
    """
    types, wanted = layer_types(config), _FULL if window is None else _SLIDING
    for number, kind in enumerate(types or []):
        if kind != wanted:
            raise UnsupportedArchitecture(
                f"layer_types[{number}]={kind!r}, but sliding_window={window} holds for every layer of a "
                f"{config.text('model_type')} model: make the two agree"
            )


def _rope(config: ConfigReader) -> tuple[float, RopeScaling | None]:
    # transformers 5 keeps theta and scaling together in rope_parameters; 4 has rope_theta and rope_scaling apart.
    key = "rope_parameters" if config.mapping.get("rope_parameters") else "rope_scaling"
    parameters = config.mapping.get(key) or {}
    if not isinstance(parameters, Mapping):
        raise UnsupportedArchitecture(f'{key}={parameters!r} is no mapping, such as {{"rope_theta": 10000.0}}')
    inner = ConfigReader(parameters)
    theta = inner.number("rope_theta", config.number("rope_theta", 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind in (None, "default"):
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=inner.number("factor"))
    if kind == "llama3":
        return theta, RopeScaling(
            kind="llama3",
            factor=inner.number("factor"),
            low_freq_factor=inner.number("low_freq_factor"),
            high_freq_factor=inner.number("high_freq_factor"),
            original_max_position_embeddings=inner.integer("original_max_position_embeddings"),
        )
    raise UnsupportedArchitecture(f"rope type {kind!r} is not one of default, linear, llama3")
