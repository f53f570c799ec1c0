"""Phi-3 and Phi-4: Llama with q, k and v in one tensor on disk, and gate and up in another."""

from __future__ import annotations

from typing import Any

from conversion.model.family import Family
from conversion.model.hf_config import ConfigReader, UnsupportedArchitecture, set_sliding_window, unbiased_decoder
from conversion.model.rules import FUSED_ATTENTION, FUSED_SWIGLU, decoder_rules


def read(config: ConfigReader) -> dict[str, Any]:
    rope = config.mapping.get("rope_parameters") or {}
    share = rope.get("partial_rotary_factor", config.mapping.get("partial_rotary_factor"))
    if share not in (None, 1.0):
        raise UnsupportedArchitecture(f"partial_rotary_factor={share}: positions on a part of each head are missing")
    return {**unbiased_decoder(config), **set_sliding_window(config)}


# SGLang loads it with Llama's class.
FAMILY = Family("phi3", rules=decoder_rules(*FUSED_ATTENTION, *FUSED_SWIGLU), read=read, block_fp8="compressed-tensors")
