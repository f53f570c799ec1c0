"""Statistics of the importance ratio rho before any truncation, under verl's names (rollout_is_*) and by its formulas.

Bounds are the upper one of the configuration and its inverse. Where rho is a response's, each of its tokens has it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_retool.algorithms.ragged import sequence_sum

_MAX_EXPONENT = 20.0


def importance_metrics(
    log_ratio: Tensor, sequence_ids: Tensor, num_sequences: int, upper: float, *, of_responses: bool
) -> dict[str, float]:
    """rollout_is_{mean,std,max,min,eff_sample_size,ratio_fraction_high,ratio_fraction_low} over tokens, and
    rollout_is_seq_{mean,std,max,min,max_deviation,fraction_high,fraction_low} over the responses' means.

    Args:
        log_ratio: [N] of the sampled tokens, each with its response's where the ratio is one of responses.
        sequence_ids: int64 [N] in [0, num_sequences). Responses without a sampled token do not count.
        upper: bound of the weights.
        of_responses: fractions, maximum and minimum count responses in place of tokens.
    """
    if not len(log_ratio):
        return {}
    ratio = log_ratio.to(torch.float64).clamp(-_MAX_EXPONENT, _MAX_EXPONENT).exp()
    lower = 1.0 / upper
    counts = sequence_sum(torch.ones_like(ratio), sequence_ids, num_sequences)
    nonempty = counts > 0
    by_response = sequence_sum(ratio, sequence_ids, num_sequences)[nonempty] / counts[nonempty]
    units = by_response if of_responses else ratio
    bounded = ratio.clamp(lower, upper)
    values = {
        "mean": ratio.mean(),
        "std": bounded.std(correction=0),
        "max": units.max(),
        "min": units.min(),
        "eff_sample_size": bounded.mean().square() / bounded.square().mean(),
        "ratio_fraction_high": (units > upper).double().mean(),
        "ratio_fraction_low": (units < lower).double().mean(),
        "seq_mean": by_response.mean(),
        "seq_std": by_response.std() if len(by_response) > 1 else torch.zeros(()),
        "seq_max": by_response.max(),
        "seq_min": by_response.min(),
        "seq_max_deviation": (by_response - 1.0).abs().max(),
        "seq_fraction_high": (by_response > upper).double().mean(),
        "seq_fraction_low": (by_response < lower).double().mean(),
    }
    return {f"rollout_is_{name}": float(value) for name, value in values.items()}
