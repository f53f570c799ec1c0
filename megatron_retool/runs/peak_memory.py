"""What a process has needed of memory at most, since it began."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def peak_memory(device: torch.device) -> dict[str, float]:
    """In GiB: max_process_memory_gb, the process's resident memory; on a GPU also max_memory_allocated_gb, what tensors
    took, and max_memory_reserved_gb, what PyTorch held for them."""
    peaks = {"max_process_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if device.type == "cuda":
        import torch

        peaks["max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device) / 2**30
        peaks["max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(device) / 2**30
    return peaks
