"""Fields of ``config.json`` about rotary positions: their scaling, how much of a head turns, layers without them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from conversion.model.config_reader import FULL, LARGEST, SLIDING, ConfigReader, UnsupportedArchitecture, shown


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling (``rope_type: llama3``), linear position interpolation (``linear``), YaRN, or
    LongRoPE."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    """Of yarn: rotations over the original positions from which a frequency stays as it is."""
    beta_slow: float = 1.0
    """Of yarn: rotations below which a frequency is divided by ``factor``."""
    truncate: bool = True
    """Of yarn: the dimensions between which it goes from one to the other are whole numbers."""
    attention_factor: float = 1.0
    """Of yarn and longrope: what rotated queries and keys are multiplied by."""
    short_factors: tuple[float, ...] = ()
    """Of longrope: what each frequency is divided by, in texts of up to ``original_max_position_embeddings`` tokens.
    Longer ones have others, which nothing here computes."""


def rope(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` for rotary positions.

    Raises:
        UnsupportedArchitecture: a kind of scaling is not known.
    """
    # transformers 5 keeps theta and scaling together in rope_parameters; 4 has rope_theta and rope_scaling apart.
    key, parameters = rope_parameters(config)
    theta = config.number("rope_theta", 10000.0)
    if FULL not in parameters.mapping and SLIDING not in parameters.mapping:
        theta, scaling = _positions(config, parameters, theta)
        return {"rope_theta": theta, "rope_scaling": scaling}
    local, stretched = _positions(config, parameters.inner(SLIDING), config.number("rope_local_base_freq", theta))
    theta, scaling = _positions(config, parameters.inner(FULL), theta)
    if stretched is not None:
        raise UnsupportedArchitecture(
            f"{key}.{SLIDING}={shown(parameters.mapping[SLIDING])}: stretched positions under a window are missing"
        )
    if scaling is not None and scaling.kind == "longrope":
        raise UnsupportedArchitecture(f"{key}.{FULL}: longrope positions beside a window's own are missing")
    return {"rope_theta": theta, "rope_scaling": scaling, "local_rope_theta": local}


def rope_parameters(config: ConfigReader) -> tuple[str, ConfigReader]:
    """The key that says how positions are rotated, and what it holds."""
    key = "rope_parameters" if config.mapping.get("rope_parameters") else "rope_scaling"
    return key, config.inner(key)


def rope_kind(parameters: ConfigReader) -> str:
    """The kind of scaling, "default" where none is named."""
    return parameters.text("rope_type" if parameters.has("rope_type") else "type", "default")


def _positions(config: ConfigReader, inner: ConfigReader, theta: float) -> tuple[float, RopeScaling | None]:
    """Base (where it is absent, ``theta``), and how positions are stretched."""
    theta = inner.number("rope_theta", theta)
    kind = rope_kind(inner)
    if kind == "default":
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
    if kind == "yarn":
        return theta, _yarn(inner)
    if kind == "longrope":
        return theta, _longrope(config, inner)
    raise UnsupportedArchitecture(
        f"rope type {shown(kind)} is not one of default, linear, llama3, yarn, longrope: {kind} positions are missing"
    )


def _longrope(config: ConfigReader, parameters: ConfigReader) -> RopeScaling:
    """arXiv:2402.13753, with the attention factor of Phi-3 (arXiv:2404.14219)."""
    key, longest = "original_max_position_embeddings", config.integer("max_position_embeddings", 32768)
    # transformers prefers the key that lies outside of the positions' own.
    original = config.integer(key, parameters.integer(key, longest))
    factors = {name: parameters.items(name) for name in ("short_factor", "long_factor")}
    for name, values in factors.items():
        if not values or not all(type(each) in (int, float) and 0 < each <= LARGEST for each in values):
            raise UnsupportedArchitecture(
                f"{name}={shown(values)} of longrope positions is no list of positive numbers"
            )
    factor = parameters.number("factor", longest / original)
    if original == 1:
        raise UnsupportedArchitecture(f"{key}=1: longrope positions are stretched from more than one")
    result = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeScaling(
        kind="longrope",
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=parameters.number("attention_factor", result),
        short_factors=tuple(float(each) for each in factors["short_factor"]),
    )


def check_short_factors(scaling: RopeScaling | None, rotated: int) -> None:
    """Make sure that longrope has a factor for each pair of the ``rotated`` features of a head.

    Raises:
        UnsupportedArchitecture: it has not.
    """
    if scaling is not None and scaling.kind == "longrope" and len(scaling.short_factors) != rotated // 2:
        raise UnsupportedArchitecture(
            f"short_factor has {len(scaling.short_factors)} numbers, and positions rotate {rotated // 2} pairs of a "
            "head's features"
        )


def _yarn(parameters: ConfigReader) -> RopeScaling:
    """arXiv:2309.00071, with what DeepSeek's (mscale) and gpt-oss's (truncate) configurations add."""
    factor = parameters.number("factor")

    def magnitude(share: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0

    result = magnitude(1.0)
    if parameters.mapping.get("mscale") and parameters.mapping.get("mscale_all_dim"):
        result = magnitude(parameters.number("mscale")) / magnitude(parameters.number("mscale_all_dim"))
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=parameters.integer("original_max_position_embeddings"),
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        truncate=parameters.flag("truncate", True),
        attention_factor=parameters.number("attention_factor", result),
    )
