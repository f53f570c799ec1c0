"""Phi-3, Phi-3.5 and Phi-4: Llama with q, k and v in one tensor on disk, and gate and up in another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conversion.model.attention_config import set_sliding_window
from conversion.model.config_reader import ConfigReader
from conversion.model.family import Family
from conversion.model.hf_config import partial_rotary, unbiased_decoder
from conversion.model.rules import FUSED_ATTENTION, FUSED_SWIGLU, decoder_rules


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    config = _with_longrope(config).with_defaults(original_max_position_embeddings=4096)
    return {**unbiased_decoder(config), **partial_rotary(config, scaled=True), **set_sliding_window(config)}


def _with_longrope(config: ConfigReader) -> ConfigReader:
    """Under the name of today, as transformers reads its earlier ones."""
    changed = dict(config.mapping)
    for key in ("rope_parameters", "rope_scaling"):
        rope = changed.get(key)
        if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
            changed[key] = {**rope, "rope_type": "longrope"}
    return ConfigReader(changed)


# SGLang loads it with Llama's class.
FAMILY = Family("phi3", rules=decoder_rules(*FUSED_ATTENTION, *FUSED_SWIGLU), read=read, block_fp8="compressed-tensors")
