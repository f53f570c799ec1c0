"""Integer settings that change during training: ``["0 24", "30 16", "80 12"]``, each "<first step> <value>"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_retool.errors import InputError


class ScheduledValue(NamedTuple):
    """``value`` holds from step ``first_step`` until the next stage begins."""

    first_step: int
    value: int


def parse_stages(texts: Sequence[str]) -> list[ScheduledValue]:
    """Parse and check a schedule.

    Raises:
        ValueError: an entry is not two integers, the first stage does not begin at step 0, steps do not ascend, or a
            value is below 1.
    """
    stages = []
    for text in texts:
        try:
            first_step, value = (int(word) for word in text.split())
        except ValueError:
            raise InputError(f"stage {text!r} is not of the form '<first step> <value>', as in '30 16'") from None
        stages.append(ScheduledValue(first_step, value))
    if not stages or stages[0].first_step != 0:
        raise InputError(f"the first stage of {list(texts)} must begin at step 0")
    if any(later.first_step <= earlier.first_step for earlier, later in zip(stages, stages[1:], strict=False)):
        raise InputError(f"the stages {list(texts)} must begin at ascending steps")
    if any(stage.value < 1 for stage in stages):
        raise InputError(f"the values of {list(texts)} must be at least 1")
    return stages


def stage_value(stages: Sequence[ScheduledValue], step: int) -> int:
    """The value at ``step`` (from 0)."""
    value = stages[0].value
    for stage in stages:
        if step >= stage.first_step:
            value = stage.value
    return value


def is_due(stages: Sequence[ScheduledValue], step: int) -> bool:
    """Is ``step`` (from 1) a step of a schedule of frequencies, e.g. of validations? Counted from step 0."""
    return step > 0 and step % stage_value(stages, step) == 0


def is_multiple(step: int, frequency: int) -> bool:
    """Is ``step`` (from 1) one of those that come every ``frequency`` steps? None is where ``frequency`` is 0."""
    return frequency > 0 and step % frequency == 0
