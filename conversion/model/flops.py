"""Model FLOPs (attention included), and what share of the hardware's peak they are.

A multiply-add counts as two.  Recomputation does not count: MFU measures useful work (PaLM, arXiv:2204.02311,
appendix B).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from conversion.model.architecture import Architecture

PEAK_FLOPS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
}
"""Dense bf16 FLOPs a second by the words of the device's name that say which chip it is."""


def forward_flops(
    architecture: Architecture, lengths: Sequence[int] | npt.NDArray[Any], head_tokens: int | None = None
) -> float:
    """FLOPs of one forward pass over whole sequences.

    Args:
        architecture: the model; of a mixture of experts only the chosen experts count.
        lengths: tokens of each sequence.
        head_tokens: tokens whose logits are computed; None: all.
    """
    lengths = np.asarray(lengths, dtype=np.float64)
    tokens = float(lengths.sum())
    heads = tokens if head_tokens is None else float(head_tokens)
    return forward_flops_of(architecture, tokens, _causal_pairs(lengths, architecture.sliding_window), heads)


def forward_flops_of(architecture: Architecture, tokens: float, pairs: float, head_tokens: float) -> float:
    """FLOPs of one forward pass over so many tokens with so many (query, key) pairs, of which the head reads some."""
    return (
        tokens * architecture.num_layers * token_flops(architecture)
        + architecture.num_layers * pair_flops(architecture) * pairs
        + head_tokens * 2.0 * architecture.hidden_size * architecture.vocab_size
    )


def training_flops(
    architecture: Architecture, lengths: Sequence[int] | npt.NDArray[Any], head_tokens: int | None = None
) -> float:
    """FLOPs of a forward and a backward pass, which is two forward passes' worth."""
    return 3.0 * forward_flops(architecture, lengths, head_tokens)


def token_flops(architecture: Architecture) -> float:
    """Forward FLOPs of one layer for one token, apart from the attention scores."""
    hidden = architecture.hidden_size
    attention = hidden * (2 * architecture.query_size + 2 * architecture.key_value_size)
    if architecture.is_moe:
        assert architecture.moe_ffn_hidden_size and architecture.num_experts_per_tok and architecture.num_experts
        mlp = architecture.num_experts_per_tok * 3 * hidden * architecture.moe_ffn_hidden_size
        mlp += hidden * architecture.num_experts
        if architecture.shared_expert_ffn_hidden_size is not None:
            mlp += 3 * hidden * architecture.shared_expert_ffn_hidden_size
            mlp += hidden if architecture.shared_expert_gate else 0
    else:
        mlp = 3 * hidden * architecture.ffn_hidden_size
    return 2.0 * (attention + mlp)


def pair_flops(architecture: Architecture) -> float:
    """Forward FLOPs of one layer for one (query, key) pair: its score, and its part of the weighted sum of values."""
    return 4.0 * architecture.query_size


def quadratic_cost(architecture: Architecture) -> float:
    """c such that a sequence of n tokens costs n + c n^2, in units of one token's FLOPs outside attention scores.

    A causal model attends to half of the n^2 pairs.
    """
    return 0.5 * pair_flops(architecture) / token_flops(architecture)


def peak_flops(device_name: str | None) -> float | None:
    """Dense bf16 peak of a device in FLOPs a second; None where it is not known (a CPU, say)."""
    kind = device_kind(device_name)
    return None if kind is None else PEAK_FLOPS[kind]


def device_kind(device_name: str | None) -> str | None:
    """Which key of PEAK_FLOPS a device is, by whole words of its name; None where it is none of them.

    "NVIDIA A100-SXM4-80GB" is an A100; an L40S is no L4, a GH200 no H200, and a laptop's RTX 4090 another chip.
    """
    if device_name is None or "Laptop" in device_name:
        return None
    words = f" {' '.join(re.findall('[A-Za-z0-9]+', device_name))} "
    return next((kind for kind in PEAK_FLOPS if f" {kind} " in words), None)


def _causal_pairs(lengths: npt.NDArray[np.float64], window: int | None) -> float:
    if window is None:
        return float((lengths * (lengths + 1) / 2).sum())
    full = np.minimum(lengths, window)
    return float((full * (full + 1) / 2 + (lengths - full) * window).sum())
