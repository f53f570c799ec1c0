"""A teacher's most probable tokens at each position, and how far the policy is from them.

With p the policy's next-token distribution and q the teacher's, of which only the k most probable tokens are known, the
events are these k and one more for all others together (``learner/divergence.py`` has the same with ``top_k``):

    KL(q | p) = sum_j q_j (log q_j - log p_j) + q_rest (log q_rest - log p_rest)
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_REST = 1e-6
"""A smaller probability of all others counts as this: 1 less a sum of float32 numbers is no more exact."""


def top_tokens_divergence(log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """KL(q | p) of each row.

    Args:
        log_probs: [n, K], the policy's, of the teacher's tokens.
        teacher_log_probs: [n, K], -inf where a row has fewer tokens.

    Returns:
        float64 [n].
    """
    counted = ~teacher_log_probs.isneginf()
    log_q = teacher_log_probs.double().masked_fill(~counted, 0.0)
    log_p = log_probs.double().masked_fill(~counted, 0.0)
    q = log_q.exp() * counted
    q_rest = 1.0 - q.sum(-1)
    p_rest = (1.0 - (log_p.exp() * counted).sum(-1)).clamp(min=SMALLEST_REST)
    told_apart = (q * (log_q - log_p)).sum(-1)
    rest = torch.where(q_rest > SMALLEST_REST, q_rest * (q_rest.clamp(min=SMALLEST_REST).log() - p_rest.log()), 0.0)
    return told_apart + rest
