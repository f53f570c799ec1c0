"""Model FLOPs (attention included), and what share of the hardware's peak they are.

A multiply-add counts as two.  Recomputation does not count: MFU measures useful work (PaLM, arXiv:2204.02311,
appendix B).
"""

from __future__ import annotations

import re
from collections import Counter
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
    architecture: Architecture,
    lengths: Sequence[int] | npt.NDArray[Any],
    head_tokens: int | None = None,
    *,
    masked: bool = False,
) -> float:
    """FLOPs of one forward pass over whole sequences.

    Args:
        architecture: the model; of a mixture of experts only the chosen experts count, and of sparse attention only the
            chosen keys, beside the indexer's scores of all.
        lengths: tokens of each sequence.
        head_tokens: tokens whose logits are computed; None: all.
        masked: also count the pairs that sparse attention leaves out, which the learner computes and masks.
    """
    lengths = np.asarray(lengths, dtype=np.float64)
    tokens = float(lengths.sum())
    heads = tokens if head_tokens is None else float(head_tokens)
    windows = Counter(architecture.windows)
    scores = 0.0
    if architecture.indexer is not None:
        scores = architecture.num_layers * index_pair_flops(architecture) * _causal_pairs(lengths, None)
        if not masked:
            windows = Counter({architecture.indexer.index_topk: architecture.num_layers})  # so many pairs, of any keys
    pairs = sum(layers * _causal_pairs(lengths, window) for window, layers in windows.items()) / windows.total()
    return scores + forward_flops_of(architecture, tokens, pairs, heads)


def forward_flops_of(architecture: Architecture, tokens: float, pairs: float, head_tokens: float) -> float:
    """FLOPs of one forward pass over so many tokens, some of which the head reads.

    Args:
        pairs: (query, key) pairs of a layer, on average over the layers.
    """
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
    """Forward FLOPs of one layer for one token, apart from the attention scores; the mean where layers differ.

    Layers with a state in place of attention have, beside their projections, a convolution with 2 x kernel FLOPs for
    each feature that it sees, and ``state_flops``: the recurrence, whatever a chunked form computes beside it.
    """
    a = architecture
    router = a.hidden_size * ((a.num_experts or 0) + (1 if a.shared_expert_gate else 0))
    routers = len(a.expert_layers) / a.num_layers
    mixers = 2.0 * a.all_attention_weights / a.num_layers
    if a.recurrent is not None:
        share = len(a.linear_layers) / a.num_layers
        mixers += share * (2.0 * a.recurrent.kernel * a.recurrent.convolved_size + a.recurrent.state_flops)
    return mixers + 2.0 * router * routers + mlp_flops(a)


def mlp_flops(architecture: Architecture) -> float:
    """Forward FLOPs for one token of one layer's MLP: dense, or its chosen experts and shared one; the mean where
    layers differ."""
    a = architecture
    own = a.dense_mlps * a.hidden_size * a.ffn_hidden_size
    latent = 0
    if a.is_moe:
        routed = (a.num_experts_per_tok or 0) * a.expert_hidden_size * (a.moe_ffn_hidden_size or 0)
        own += len(a.expert_layers) * (routed + a.hidden_size * (a.shared_expert_ffn_hidden_size or 0))
        latent = len(a.expert_layers) * 2 * a.hidden_size * (a.moe_latent_size or 0)
    return 2.0 * ((3 if a.gated_mlp else 2) * own + latent) / a.num_layers


def pair_flops(architecture: Architecture) -> float:
    """Forward FLOPs of one layer for one (query, key) pair: its score, and its part of the weighted sum of values; the
    mean where some layers have no pairs."""
    share = architecture.attention_layers / architecture.num_layers
    return share * 2.0 * (architecture.query_size + architecture.output_size)


def index_pair_flops(architecture: Architecture) -> float:
    """Forward FLOPs of one layer's indexer for one (query, key) pair: each head's score, and their weighted sum; the
    mean where some layers have none."""
    indexer = architecture.indexer
    if indexer is None:
        return 0.0
    return architecture.indexer_layers / architecture.num_layers * 2.0 * (indexer.query_size + indexer.heads)


def quadratic_cost(architecture: Architecture) -> float:
    """c such that a sequence of n tokens costs n + c n^2, in units of one token's FLOPs outside attention scores.

    A causal model attends to half of the n^2 pairs. The learner computes those that sparse attention leaves out, too.
    """
    return 0.5 * (pair_flops(architecture) + index_pair_flops(architecture)) / token_flops(architecture)


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
