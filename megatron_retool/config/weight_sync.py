"""How weights travel from the learner to the engines."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_retool.config.base import choice


@dataclass(frozen=True)
class WeightSyncConfig:
    method: str = choice("distributed", "tensor", "disk")
    bucket_bytes: int = 512 * 2**20
    verify: bool = False
    """Compare checksums of every tensor on both sides after each sync."""
    round_to_fp8: bool = False
    """Send linear weights rounded to block-wise e4m3 values, in the engine's own dtype: the mismatch of FP8 serving on
    engines that cannot serve FP8."""
    timeout_seconds: float = 300.0
