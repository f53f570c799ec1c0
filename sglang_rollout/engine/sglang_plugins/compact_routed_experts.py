"""SGLang plugin: routed experts leave the scheduler in one or two bytes each, where SGLang sends four.

SGLang writes them into its JSON as base64, so they are most of a long answer. SGLang finds this plugin through the
entry point beside this file, that is, only in processes which have this directory on their path.
"""

from __future__ import annotations

import os
from typing import Any

import torch

VARIABLE = "MEGATRON_RETOOL_EXPERT_DTYPE"
"""The type that experts fit into, uint8 or int16; whoever starts the engine knows the model."""


def register() -> None:
    """Entry point of group ``sglang.srt.plugins``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if os.environ.get(VARIABLE):
        HookRegistry.register(
            "sglang.srt.state_capturer.routed_experts.RoutedExpertsCapturer.get_topk", compact, HookType.AFTER
        )


def compact(rows: torch.Tensor, *arguments: Any, **kwargs: Any) -> torch.Tensor:
    """int32 [tokens, layers, k] in the smaller type; as they are where one does not fit, which the client refuses."""
    dtype: torch.dtype = getattr(torch, os.environ[VARIABLE])
    if rows.numel() and not (rows.min() >= 0 and rows.max() < torch.iinfo(dtype).max):
        return rows
    return rows.to(dtype)
