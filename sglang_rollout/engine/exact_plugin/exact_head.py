"""The last of an engine's exact operators: output layer, log-softmax, and what sampling filters leave."""

from __future__ import annotations

from typing import Any

import torch

from megatron_retool.algorithms.sampling import kept_in_order
from megatron_retool.exact import operators


def take_log_softmax(original: Any, sampler: Any, *arguments: Any, **kwargs: Any) -> None:
    """Have a sampler return log-softmax, as its deterministic mode does, and not the logarithm of probabilities."""
    original(sampler, *arguments, **kwargs)
    sampler.enable_deterministic = True


def filter_exactly(
    original: Any, sampler: Any, logits_output: Any, sampling_info: Any, *arguments: Any, **kwargs: Any
) -> torch.Tensor:
    """Sample from what top_k, top_p and min_p leave, and give the log-probs of that distribution, as learners do."""
    filters = sampling_info.need_top_k_sampling, sampling_info.need_top_p_sampling, sampling_info.need_min_p_sampling
    if sampling_info.is_all_greedy or not any(filters):
        return original(sampler, logits_output, sampling_info, *arguments, **kwargs)
    from sglang.srt.layers import sampler as sglang_sampler

    # SGLang writes probabilities over its logits.
    scaled = logits_output.next_token_logits / sampling_info.temperatures
    ordered, tokens = operators.probabilities(scaled).sort(dim=-1, descending=True, stable=True)
    settings = (each.unsqueeze(-1) for each in (sampling_info.top_ks, sampling_info.top_ps, sampling_info.min_ps))
    kept = kept_in_order(ordered, *settings)
    weights = ordered.masked_fill(~kept, 0.0)

    def sampled(
        _probs: Any, _ks: Any, _ps: Any, _min_ps: Any, _need: Any, seed: Any, positions: torch.Tensor, **options: Any
    ) -> Any:
        """As top_k_top_p_min_p_sampling_from_probs_torch, from ``weights``."""
        if seed is None:
            drawn = torch.multinomial(weights, 1)
        else:
            drawn = sglang_sampler.multinomial_with_seed(weights.double().log(), seed, positions)
        ids = tokens.gather(1, drawn).view(-1).int()
        if not options.get("return_filtered_probs"):
            return ids
        return ids, weights, tokens.int(), weights.gather(1, drawn).view(-1)

    ordinary = sglang_sampler.top_k_top_p_min_p_sampling_from_probs_torch
    sglang_sampler.top_k_top_p_min_p_sampling_from_probs_torch = sampled
    try:
        ids = original(sampler, logits_output, sampling_info, *arguments, **kwargs)
    finally:
        sglang_sampler.top_k_top_p_min_p_sampling_from_probs_torch = ordinary
    rows = sampling_info.sampling_mask_batch_indices
    if rows is not None:
        left = torch.zeros_like(kept).scatter(1, tokens, kept)[rows]
        log_probs = log_softmax(scaled[rows].masked_fill(~left, -torch.inf))
        chosen = log_probs.gather(1, ids[rows].long().view(-1, 1)).view(-1)
        logits_output.sampling_mask_output.selected_logprobs = chosen
    return ids


def keep_log_softmax(original: Any, processor: Any, *arguments: Any, **kwargs: Any) -> None:
    """Have a prompt's log-probs come from log-softmax too."""
    original(processor, *arguments, **kwargs)
    processor.enable_fast_input_logprobs = False


def log_softmax(logits: torch.Tensor, dim: int = -1, *arguments: Any, **kwargs: Any) -> torch.Tensor:
    """``torch.log_softmax`` of rows [rows, vocabulary]."""
    assert logits.dim() == 2 and dim in (-1, 1), "only rows of logits have an exact log-softmax"
    return operators.log_softmax(logits.float())


def logits(processor: Any, hidden: torch.Tensor, head: Any, bias: torch.Tensor | None = None, **_: Any) -> torch.Tensor:
    """float32 [rows, vocabulary], never rounded to the model's dtype."""
    return operators.linear(hidden, head.weight, bias, torch.float32)
