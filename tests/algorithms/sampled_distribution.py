"""The distribution that an engine with top_p, top_k and min_p samples from, over the whole vocabulary."""

import torch

from megatron_retool.algorithms.sampling import kept_tokens


def sampling_log_probs(logits, config):
    """log mu: [..., V] as ``logits``; -inf for tokens that the filters remove."""
    log_probs = torch.log_softmax(logits / config.temperature, dim=-1)
    kept = log_probs.masked_fill(~kept_tokens(logits, config), float("-inf"))
    return kept - kept.logsumexp(-1, keepdim=True)
