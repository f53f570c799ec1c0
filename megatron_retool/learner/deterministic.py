"""trainer.deterministic in a learner's process: the same numbers to the bit from the same inputs and layout."""

from __future__ import annotations

import math
import os

import torch

from conversion.model.architecture import Architecture
from conversion.model.layout import ParallelLayout
from megatron_retool.config import Config, ConfigError
from megatron_retool.learner.precision import Acceleration

LARGEST_SCORES = 2**30
"""Texts x heads x (longest text)^2 of a micro-batch from which Transformer Engine 2.20 leaves cuDNN's deterministic
backward pass on Hopper, whose workspace would not fit: SM90_DET_FUSED_THD_BWD_MAX_BHSS of
pytorch/attention/dot_product_attention/utils.py."""

ENVIRONMENT = {
    # Read when Transformer Engine chooses an attention kernel, cuBLAS makes its handle, NCCL its communicators.
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
}


def make_deterministic() -> None:
    """Call it before CUDA, NCCL or Transformer Engine are used; Megatron's own part is ``deterministic_mode``.

    An operation that has no deterministic kernel raises from then on.
    """
    os.environ.update(ENVIRONMENT)
    torch.use_deterministic_algorithms(True)
    # It would write to all memory that is about to be overwritten.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def check_attention(
    config: Config, architecture: Architecture, layout: ParallelLayout, acceleration: Acceleration
) -> str | None:
    """What trainer.deterministic makes of attention's kernels on this machine; None: they stay cuDNN's.

    Whether a micro-batch reaches ``LARGEST_SCORES`` depends on its texts: a warning says so where some could.

    Raises:
        ConfigError: the longest text reaches it by itself, and there is no other kernel.
    """
    learner = config.learner
    on_hopper = not acceleration.packs_attention(architecture, layout.context) and acceleration.capability == (9, 0)
    if not (config.trainer.deterministic and on_hopper) or learner.share_prefixes or learner.dtype == "float32":
        return None
    budget = learner.max_tokens_per_micro_batch
    longest = min(budget, config.data.max_prompt_length + config.data.max_response_length)
    heads = architecture.num_attention_heads // layout.tensor
    # The texts beside one of n tokens may have two: (1 + (budget - n) / 2) n^2 is largest at two thirds of the budget.
    most = min(longest, (2 * budget + 4) // 3)
    if max(heads * longest**2, (1 + (budget - most) // 2) * heads * most**2) < LARGEST_SCORES:
        return None
    alone = math.isqrt((LARGEST_SCORES - 1) // heads) + 1
    said = (
        "trainer.deterministic=true: on Hopper Transformer Engine leaves cuDNN's attention in updates of micro-batches "
        f"with texts x {heads} heads x (longest text)^2 of 2^30 or more (one text of {alone:,} tokens, or shorter ones "
        "together)"
    )
    cures = (
        "set trainer.deterministic=false, or make texts shorter (data.max_response_length, "
        "learner.max_tokens_per_micro_batch) or heads on a rank fewer (learner.tensor_model_parallel_size)"
    )
    if acceleration.flash_attention is not None:
        return (
            f"{said}, and takes {acceleration.flash_attention} there, while old log-probs stay with cuDNN: a policy "
            f"that has not moved has other probabilities in its update than before it. To keep one kernel, {cures}"
        )
    said += ", and no flash-attn package is installed to continue with"
    if longest >= alone:
        raise ConfigError(f"{said}: install flash-attn-4, or {cures}")
    return f"{said}, so that such an update fails: install flash-attn-4, or {cures}"
