"""How weights travel from the learner to the engines."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_retool.config.base import at_least_one, choice, positive


@dataclass(frozen=True)
class WeightSyncConfig:
    method: str = choice("distributed", "tensor", "disk")
    """distributed: NCCL or gloo broadcast. tensor: shared memory or CUDA IPC, on one node. disk: files in the run."""
    bucket_bytes: int = at_least_one(512 * 2**20, maximum=2**40)
    """Size of the pieces in which weights travel."""
    verify: bool = False
    """Compare checksums of every tensor on both sides after each sync."""
    round_to_fp8: bool = False
    """Send linear weights rounded to block-wise e4m3 values, in the engine's own dtype: the mismatch of FP8 serving on
    engines that cannot serve FP8."""
    timeout_seconds: float = positive(300.0)
    """For one piece on its way."""
