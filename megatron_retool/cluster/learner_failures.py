"""What becomes of a learner whose ranks fail, and which of several ranks' errors tells the cause."""

from __future__ import annotations

import asyncio
from enum import IntEnum
from typing import Any

from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, WorkerCrashedError

from megatron_retool.errors import OperationError

DEATHS = (RayActorError, WorkerCrashedError, NodeDiedError, OutOfMemoryError)
"""What Ray raises when an actor is gone. OutOfMemoryError, of Ray's memory monitor, is no RayActorError."""
_OUT_OF_MEMORY = (
    "the node's memory is used up: end what else runs there, give it more memory, or lower the memory of engines, "
    "sandboxes and rollout.engine.count"
)
_BROKEN_LINKS = ("DistBackendError", "DistNetworkError", "AcceleratorError")


class LearnerDied(OperationError):
    """A rank is gone, or its device or links are: the whole group must be built again. The message names the rank."""


class OutOfStep(OperationError):
    """A rank left a series of collectives in which others may still wait for it: none of them can be used again."""


class Severity(IntEnum):
    """Of a rank's error. Links come last: they break when a rank leaves."""

    DEATH = 0
    OUT_OF_STEP = 1
    ORDINARY = 2
    LINK = 3


def severity(error: BaseException) -> Severity:
    """Which of several ranks' errors tells the cause: the smallest."""
    if isinstance(error, DEATHS):
        return Severity.DEATH
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, OutOfStep):
        return Severity.OUT_OF_STEP
    names = {kind.__name__ for kind in type(cause).__mro__}
    # gloo raises plain RuntimeErrors; subclasses, as of a weight sync or a checkpoint, may only quote it.
    broken = bool(names & set(_BROKEN_LINKS)) or (type(cause) is RuntimeError and "gloo" in str(cause))
    return Severity.LINK if broken else Severity.ORDINARY


def failures(tasks: list[asyncio.Task[Any]]) -> list[tuple[int, BaseException]]:
    """(rank, error) of the calls that failed, the most telling first."""
    errors = [(rank, task.exception()) for rank, task in enumerate(tasks) if task.done() and not task.cancelled()]
    result = [(rank, error) for rank, error in errors if error is not None]
    return sorted(result, key=lambda pair: severity(pair[1]))


def in_one_line(error: BaseException) -> str:
    """The error's first and last line, and whether memory ran out."""
    text = str(getattr(error, "cause", None) or error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = " ".join([*lines[:1], *lines[-1:]] if len(lines) > 1 else lines)[:500]
    return f"{_OUT_OF_MEMORY}: {said}" if isinstance(error, OutOfMemoryError) else said
