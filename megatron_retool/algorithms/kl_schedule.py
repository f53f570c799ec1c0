"""Coefficient of the KL penalty by training step, fixed before the run. Without torch, as the configuration is."""

from __future__ import annotations

import math

KL_SCHEDULES = ("constant", "linear", "cosine")


def kl_coefficient(schedule: str, initial: float, final: float, steps: int, step: int) -> float:
    """The coefficient in ``step``.

    It is initial w + final (1 - w), with p = min((step - 1) / steps, 1) and w = 1 - p (``linear``) or
    w = (1 + cos(pi p)) / 2 (``cosine``). Step 1 has ``initial``, steps after ``steps`` have ``final``.

    Args:
        schedule: constant, linear or cosine.
        steps: at least 1. step: of training, from 1.

    Raises:
        ValueError: an unknown schedule.
    """
    progress = min(max(step - 1, 0) / steps, 1.0)
    if schedule == "constant":
        return initial
    if schedule == "linear":
        weight = 1.0 - progress
    elif schedule == "cosine":
        weight = (1.0 + math.cos(math.pi * progress)) / 2.0
    else:
        raise ValueError(f"algorithm.kl_schedule={schedule!r} is not one of {', '.join(KL_SCHEDULES)}")
    return initial * weight + final * (1.0 - weight)
