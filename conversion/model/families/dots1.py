"""dots.llm1: Qwen3's attention, and DeepSeek-V3's experts with a dense layer first."""

from __future__ import annotations

from typing import Any

from conversion.model.attention_config import optional_sliding_window
from conversion.model.config_reader import ConfigReader
from conversion.model.expert_config import sigmoid_router
from conversion.model.family import Family
from conversion.model.hf_config import unbiased_decoder
from conversion.model.rules import (
    ATTENTION,
    EXPERTS,
    QK_NORM,
    ROUTER_BIAS,
    SHARED_EXPERT,
    SWIGLU,
    decoder_rules,
    renamed,
)


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    config = config.with_defaults(norm_topk_prob=False, max_window_layers=62)
    windowed = "sliding_window" not in config.mapping or config.has("sliding_window")
    return {
        **unbiased_decoder(config),
        **optional_sliding_window(ConfigReader({**config.mapping, "use_sliding_window": windowed})),
        **sigmoid_router(config),
        "qk_norm": True,
    }


# SGLang has no class of its own for it.
FAMILY = Family(
    "dots1",
    rules=decoder_rules(
        *ATTENTION,
        *QK_NORM,
        *SWIGLU,
        *EXPERTS,
        *ROUTER_BIAS,
        *renamed(SHARED_EXPERT, {"shared_expert.": "shared_experts."}),
    ),
    read=read,
)
