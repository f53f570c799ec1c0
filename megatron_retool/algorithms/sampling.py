"""The distribution that an engine samples from, stated once.

Sampling parameters change the behaviour policy, so importance ratios must be taken against the distribution that was
*sampled*, not against the model's softmax.  With logits z the engine (SGLang, and every library with the usual
parameters) draws a token in four steps:

1. temperature:  p = softmax(z / temperature)
2. top_k:        keep the k most probable tokens (k < 1: 4096), 4096 at most
3. top_p:        of all tokens in descending order, keep those before which less or equal than top_p mass lies (at
                 least one; ties are broken by token id, lowest first)
4. min_p:        keep tokens with p >= min_p * max(p)

and renormalises what the filters keep: mu(y) = p(y) 1[kept] / sum_kept p.  Each filter looks at the full p, not at the
renormalised remainder of another.  That is what SGLang does with one or two of the filters; with all three its
flashinfer sampler renormalises after top_k and takes top_p of that, so that the configuration refuses the three
together for training.

Mass is counted in whole units of 2^-52, so that the sum of the same probabilities is the same number in any order of
addition, and on any device.

What goes into the ratio, in one sentence: the policy *is* mu, on both sides.

* temperature: engines report log p at the sampling temperature, and the learner divides its logits by the same
  temperature.
* filters: the reported log p is not log mu, it lacks the log of the kept mass: log mu = log p - log(kept mass).
  ``rollout_log_probs`` hold log mu, which SGLang gives with ``return_sampling_mask``. The learner removes from its own
  logits what the filters remove (``learner/log_probs.py``), so old_log_probs, the current log-probs of the update and
  the entropy are mu's too, and a ratio is 1 wherever both sides computed the same logits.

The alternative, pi = softmax(z / temperature) only in the numerator, is also exact on the kept tokens,
E_mu[pi / mu * f] = E_pi[f 1[kept]], but a response of n tokens then has a ratio of (kept mass)^n without any mismatch,
which no trust region on the ratio survives.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_retool.algorithms.settings import SamplingSettings
from megatron_retool.errors import InputError

_UNITS = 2.0**52
"""Of mass, in a probability of 1."""
_NO_LIMIT = 2**62


def is_unfiltered(config: SamplingSettings) -> bool:
    """True where no filter is on, so that the reported log-probs are those of the sampled distribution."""
    return config.top_p >= 1.0 and config.top_k < 1 and config.min_p <= 0.0


def kept_tokens(logits: Tensor, config: SamplingSettings) -> Tensor:
    """bool [..., V]: tokens that the filters leave. ``logits`` float [..., V], before temperature.

    Raises:
        ValueError: a temperature that is not positive.
    """
    return kept_of_probabilities(_scaled_log_probs(logits, config).exp(), config)


def kept_of_probabilities(probabilities: Tensor, config: SamplingSettings) -> Tensor:
    """bool [..., V]: tokens that the filters leave of ``probabilities`` float [..., V], at the temperature."""
    keep = torch.full_like(probabilities, is_unfiltered(config), dtype=torch.bool)
    if is_unfiltered(config):
        return keep
    ordered, tokens = (
        each[..., : config.most_tokens] for each in probabilities.sort(dim=-1, descending=True, stable=True)
    )
    return keep.scatter(-1, tokens, kept_in_order(ordered, config.most_tokens, config.top_p, config.min_p))


def kept_in_order(ordered: Tensor, top_k: int | Tensor, top_p: float | Tensor, min_p: float | Tensor) -> Tensor:
    """bool [..., V]: which of probabilities in descending order the filters leave.

    ``top_k`` (at least 1), ``top_p`` and ``min_p`` are numbers, or have an entry for each row, [..., 1]. They are taken
    in float32, as engines do.
    """
    mass = (ordered.double() * _UNITS).long()
    keep = mass.cumsum(-1) - mass <= _units(top_p)
    keep &= torch.arange(ordered.size(-1), device=ordered.device) < top_k
    keep &= ordered >= _in_float32(min_p) * ordered[..., :1]
    keep[..., 0] = True
    return keep


def _units(top_p: float | Tensor) -> int | Tensor:
    """How much mass may lie before a token; any amount where ``top_p`` is 1."""
    share = _in_float32(top_p)
    if isinstance(share, Tensor):
        return torch.where(share < 1.0, (share.double() * _UNITS).long(), _NO_LIMIT)
    return int(share * _UNITS) if share < 1.0 else _NO_LIMIT


def _in_float32(value: float | Tensor) -> float | Tensor:
    return value.float() if isinstance(value, Tensor) else float(np.float32(value))


def _scaled_log_probs(logits: Tensor, config: SamplingSettings) -> Tensor:
    if config.temperature <= 0:
        raise InputError(
            f"temperature={config.temperature}: greedy decoding has no distribution to take a ratio against; "
            "train with a positive temperature"
        )
    dtype = logits.dtype if logits.dtype == torch.float64 else torch.float32
    return torch.log_softmax(logits.to(dtype) / config.temperature, dim=-1)
