"""What a caller teaches the learner by itself: sequences with targets of their own, a loss, and one optimizer step.

``TrajectoryBatch`` is a rollout, whose tokens predict one another. Here each position has the targets that the caller
gives it: the next token, any other, or several, each with its own weight (distillation from a teacher's top k).

All losses are sums over tokens, without a mean or a weight of the batch: what is accumulated in several calls is then
the same as what is accumulated in one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_retool.errors import InputError

Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class RequestRefused(InputError):
    """What a caller asked for cannot be done. Nothing has changed, and the learner answers further requests."""


@dataclass(frozen=True, eq=False)
class TargetSequence:
    """One sequence whose targets are given.

    Attributes:
        tokens: int64 [N], what the model reads; N is at least 1.
        targets: int64 [N] or [N, K]: position i predicts ``targets[i]``, one token or K of them.
        columns: float32 by name, each in the shape of ``targets`` and finite; which ones are needed depends on the
            loss (``algorithms.token_losses``).

    Raises:
        RequestRefused: a shape or dtype is another, a token id is negative, or a number is not finite.
    """

    tokens: Int64Array
    targets: Int64Array
    columns: Mapping[str, FloatArray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_array("tokens", self.tokens, np.int64)
        _check_array("targets", self.targets, np.int64)
        if self.tokens.ndim != 1 or not len(self.tokens):
            raise RequestRefused(f"tokens: has shape {list(self.tokens.shape)}: give one row of at least one token")
        length, shape = len(self.tokens), self.targets.shape
        if shape[:1] != (length,) or self.targets.ndim > 2 or 0 in shape:
            raise RequestRefused(
                f"targets: has shape {list(shape)} for {length} tokens: give [{length}], or [{length}, K] for K "
                "targets of each position"
            )
        for name, ids in (("tokens", self.tokens), ("targets", self.targets)):
            if ids.min() < 0:
                raise RequestRefused(f"{name}: holds {ids.min()}: a token id is not negative")
        for name, column in self.columns.items():
            _check_array(name, column, np.float32)
            if column.shape != shape:
                raise RequestRefused(f"{name}: has shape {list(column.shape)}: give it that of targets, {list(shape)}")
            if not np.isfinite(column).all():
                raise RequestRefused(f"{name}: holds a number that is not finite")


@dataclass(frozen=True)
class TokenLoss:
    """A loss by name, with its settings.

    Attributes:
        name: a built-in one of ``algorithms.token_losses``, ``package.module:function`` or
            ``path/to/file.py:function``.
            The latter two run code: take them from the configuration, never from a client.
        arguments: its keyword arguments.
    """

    name: str
    arguments: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class TokenOutputs:
    """What the learner says of some ``TargetSequence``, in their order.

    Attributes:
        log_probs: of each sequence's targets: float32 in their shape.
        elementwise_loss: of each target: float32 in the same shapes; None where the loss does not report it.
        metrics: by name; "loss" is the sum over all tokens.
    """

    log_probs: list[FloatArray]
    elementwise_loss: list[FloatArray] | None
    metrics: dict[str, float]


@dataclass(frozen=True)
class OptimizerStep:
    """One step of AdamW (arXiv:1711.05101) on what was accumulated.

    Attributes:
        grad_clip_norm: the gradient is scaled down to this norm; 0: never.

    Raises:
        RequestRefused: a number is out of its range.
    """

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise RequestRefused(f"{name}={value}: give a finite number that is not negative")
            if name.startswith("beta") and value >= 1:
                raise RequestRefused(f"{name}={value}: give a number below 1")
        if not self.eps:
            # Many elements have no gradient at first (those of A while B is 0): their step would be 0 / 0.
            raise RequestRefused("eps=0: give a number above 0")


def _check_array(name: str, value: Any, dtype: type[np.generic]) -> None:
    if not isinstance(value, np.ndarray) or value.dtype != dtype:
        result = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
        raise RequestRefused(f"{name}: is {result}: give an array of {np.dtype(dtype)}")


@dataclass(frozen=True)
class TopTokens:
    """The teacher's most probable tokens in place of each of T response tokens, at most K of them.

    Attributes:
        ids: int32 [T, K]; 0 where there are fewer.
        log_probs: float32 [T, K]; -inf where there are fewer.
    """

    ids: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]
