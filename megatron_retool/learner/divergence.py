"""How far the policy is from a teacher at each token, over the whole vocabulary or the teacher's most probable tokens.

With p the policy's next-token distribution, q the teacher's and m = beta q + (1 - beta) p:

    forward_kl      KL(q | p) = sum_j q_j (log q_j - log p_j)
    reverse_kl      KL(p | q) = sum_j p_j (log p_j - log q_j)
    jensen_shannon  beta KL(q | m) + (1 - beta) KL(p | m)             (Agarwal et al. 2024, arXiv:2306.13649, eq. 1)

Each is a function of p whose derivative by a logit x_j of the policy is h_j - p_j sum_i h_i with h_j = p_j dD/dp_j, up
to a multiple of p_j, which cancels:

    forward_kl      h_j = -q_j
    reverse_kl      h_j = p_j (log p_j - log q_j)
    jensen_shannon  h_j = (1 - beta) p_j (log p_j - log m_j)

With ``top_k`` the events are the teacher's k most probable tokens and one more for all others together, so that the
result stays a divergence, and is never larger than that over the whole vocabulary.

The head calls this chunk by chunk over tokens (``log_probs.token_scores``); the vocabulary may be split over
tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

_SMALLEST = 1e-30
"""Below it a probability counts as 0, whose logarithm is not asked for."""


@dataclass(frozen=True)
class Divergence:
    """Which divergence is measured.

    Attributes:
        kind: "forward_kl", "reverse_kl" or "jensen_shannon".
        beta: weight of the teacher in the mixture of jensen_shannon, between 0 and 1.
        top_k: how many of the teacher's most probable tokens are told apart; 0: all of the vocabulary.
    """

    kind: str
    beta: float = 0.5
    top_k: int = 0


@dataclass(frozen=True)
class TeacherHead:
    """The teacher's part of one micro-batch.

    Attributes:
        hidden: [n, h of the teacher], its last hidden states at the places that the policy's head reads.
        weight: [V / TP, h of the teacher], this rank's rows of its output layer, cut as the policy's.
        divergence: what is measured between the two.
    """

    hidden: Tensor
    weight: Tensor
    divergence: Divergence


class _Events(NamedTuple):
    """Log-probs of this rank's part of the vocabulary, and of all tokens together that are not told apart."""

    log_probs: Tensor
    """float32 [rows, V / TP]; 0 where ``counted`` is false."""
    probs: Tensor
    """float32 [rows, V / TP]; 0 where ``counted`` is false."""
    rest: Tensor
    """float32 [rows, 1], the probability of the others; 0 where all are told apart."""


def teacher_log_probs(
    teacher: TeacherHead, take: slice, dtype: torch.dtype, padding: int, group: dist.ProcessGroup | None
) -> Tensor:
    """log q of the rows ``take``: float32 [rows, V / TP], -inf at the last ``padding`` columns."""
    x = torch.mm(teacher.hidden[take].to(dtype), teacher.weight.to(dtype).t()).float()
    if padding:
        x[:, x.size(1) - padding :] = float("-inf")
    peak = x.amax(-1, keepdim=True)
    if group is not None:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    x.sub_(peak)
    total = x.exp().sum(-1, keepdim=True)
    if group is not None:
        dist.all_reduce(total, group=group)
    return x.sub_(total.log())


def divergence_of(
    log_p: Tensor,
    log_q: Tensor,
    divergence: Divergence,
    group: dist.ProcessGroup | None,
    *,
    with_gradient: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The divergence of each row and, where it is asked for, its derivative by the policy's logits.

    Args:
        log_p, log_q: float32 [rows, V / TP], of this rank's part of the vocabulary; -inf where both have padding.
        group: over which the vocabulary is split; None: it is not.

    Returns:
        float32 [rows], the same on every rank of ``group``; float32 [rows, V / TP] or None.
    """
    counted = _counted(log_q, divergence.top_k, group)
    p, q = _events(log_p, counted, group), _events(log_q, counted, group)
    value = _summand(p.probs, p.log_probs, q.probs, q.log_probs, divergence).sum(-1, keepdim=True)
    value = _summed(value, group)
    rests = p.rest, p.rest.clamp(min=_SMALLEST).log(), q.rest, q.rest.clamp(min=_SMALLEST).log()
    if divergence.top_k:
        value = value + _summand(*rests, divergence)
    if not with_gradient:
        return value.squeeze(-1), None
    share = _share(p.probs, p.log_probs, q.probs, q.log_probs, divergence)
    total = _summed(share.sum(-1, keepdim=True), group)
    probs = log_p.exp()
    if divergence.top_k:
        of_rest = _share(*rests, divergence)
        total = total + of_rest
        share = torch.where(counted, share, probs * (of_rest / p.rest.clamp(min=_SMALLEST)))
    return value.squeeze(-1), share - probs * total


def _counted(log_q: Tensor, top_k: int, group: dist.ProcessGroup | None) -> Tensor:
    """bool [rows, V / TP]: the tokens that are told apart."""
    known = ~log_q.isneginf()
    if not top_k:
        return known
    best = log_q.topk(min(top_k, log_q.size(1)), -1).values
    if group is not None:
        parts = [torch.empty_like(best) for _ in range(group.size())]
        dist.all_gather(parts, best.contiguous(), group=group)
        best = torch.cat(parts, -1)
        best = best.topk(min(top_k, best.size(1)), -1).values
    return known & (log_q >= best[:, -1:])


def _events(log_probs: Tensor, counted: Tensor, group: dist.ProcessGroup | None) -> _Events:
    every = log_probs.exp()
    rest = _summed(every.masked_fill(counted, 0.0).sum(-1, keepdim=True), group)
    return _Events(log_probs.masked_fill(~counted, 0.0), every.masked_fill(~counted, 0.0), rest)


def _summand(p: Tensor, log_p: Tensor, q: Tensor, log_q: Tensor, divergence: Divergence) -> Tensor:
    """What each event adds to the divergence."""
    if divergence.kind == "forward_kl":
        return q * (log_q - log_p)
    if divergence.kind == "reverse_kl":
        return p * (log_p - log_q)
    log_m = _log_mixture(p, q, divergence.beta)
    return divergence.beta * q * (log_q - log_m) + (1 - divergence.beta) * p * (log_p - log_m)


def _share(p: Tensor, log_p: Tensor, q: Tensor, log_q: Tensor, divergence: Divergence) -> Tensor:
    """p dD/dp of each event, up to a multiple of p."""
    if divergence.kind == "forward_kl":
        return -q
    if divergence.kind == "reverse_kl":
        return p * (log_p - log_q)
    return (1 - divergence.beta) * p * (log_p - _log_mixture(p, q, divergence.beta))


def _log_mixture(p: Tensor, q: Tensor, beta: float) -> Tensor:
    return (beta * q + (1 - beta) * p).clamp(min=_SMALLEST).log()


def _summed(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(x, group=group)
    return x
