"""Configurations to admit beside the first published one of each family."""

from __future__ import annotations

from typing import Any

from megatron_retool.planning.models import MODELS

VARIANTS: dict[str, dict[str, Any]] = {
    "dense layers among experts": {**MODELS["qwen3-30b-a3b"], "mlp_only_layers": [20]},
    "deepseek-v2-lite": MODELS["deepseek-v2-lite"],
    "kimi-k2": MODELS["kimi-k2"],
}
