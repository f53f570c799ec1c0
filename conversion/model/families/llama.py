"""Llama 2 and 3, and what calls itself so."""

from __future__ import annotations

from conversion.model.family import Family
from conversion.model.hf_config import unbiased_decoder
from conversion.model.rules import ATTENTION, SWIGLU, decoder_rules

FAMILY = Family(
    "llama",
    rules=decoder_rules(*ATTENTION, *SWIGLU),
    read=unbiased_decoder,
    # SGLang's loader renames weight_scale_inv to weight_scale, which only this form registers.
    block_fp8="compressed-tensors",
    engine_classes={"LlamaForCausalLM": "sglang.srt.models.llama:LlamaForCausalLM"},
)
