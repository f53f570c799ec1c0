"""Which validation follows a step."""

from __future__ import annotations

from enum import Enum, auto

from megatron_retool.algorithms.stage_schedule import is_due, is_multiple, parse_stages
from megatron_retool.config import TrainerConfig


class Validation(Enum):
    """How much a validation asks."""

    FULL = auto()
    """Every validation prompt: val-core/ and val-aux/."""
    QUICK = auto()
    """A few of them with few responses: val-quick/."""


def validation_after(trainer: TrainerConfig, step: int, *, last: bool) -> Validation | None:
    """The validation that follows ``step`` (from 1). The last step has a full one; where both are due, so has any.

    It depends only on the step: a run that continues from a checkpoint makes those that are left.
    """
    if trainer.test_schedule:
        full = is_due(parse_stages(trainer.test_schedule), step)
    else:
        full = is_multiple(step, trainer.test_freq)
    if full or last:
        return Validation.FULL
    return Validation.QUICK if is_multiple(step, trainer.quick_test_freq) else None
