"""trainer.deterministic in a learner's process: the same numbers to the bit from the same inputs and layout."""

from __future__ import annotations

import os

import torch

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
