"""Length penalties, added to a response's reward: ``reward.overlong.mode``. Pure functions of lengths in tokens."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megatron_retool.errors import InputError
from megatron_retool.registry import Extension, ExtensionError, Registry

LengthPenalty = Callable[..., float]
"""penalty(length, max_response_length, *, settings) -> what is added to the reward, usually 0 or less."""

length_penalties: Registry[LengthPenalty] = Registry(
    "reward.overlong.mode", takes=("length", "max_response_length"), kwargs_key="reward.overlong.kwargs"
)


def length_penalty(penalty: Extension[LengthPenalty], length: int, max_response_length: int) -> float:
    """What ``penalty`` says of a response of so many tokens.

    Raises:
        ExtensionError: it raised, or did not return a finite number.
    """
    result: Any = penalty.attempt(length, max_response_length)
    if isinstance(result, bool) or not isinstance(result, int | float) or not math.isfinite(result):
        raise ExtensionError(f"{penalty.label}: it returned {str(result)[:40]!r} for {length} tokens: return a number")
    return float(result)


@length_penalties.register("soft_punish")
def soft_punishment(length: int, max_response_length: int, *, buffer_length: int, penalty: float) -> float:
    """DAPO's soft overlong punishment, arXiv:2503.14476, eq. 13.

    0 up to ``max_response_length - buffer_length``, then linear down to ``-penalty`` at ``max_response_length``, and
    ``-penalty`` beyond.

    Raises:
        ValueError: the buffer is not inside the response.
    """
    if not 0 < buffer_length <= max_response_length:
        raise InputError(
            f"reward.overlong.buffer_length={buffer_length} must lie between 1 and data.max_response_length="
            f"{max_response_length}"
        )
    excess = length - (max_response_length - buffer_length)
    return -penalty * min(max(excess / buffer_length, 0.0), 1.0)


@length_penalties.register("piecewise")
def piecewise_penalty(length: int, max_response_length: int, *, pieces: Sequence[str]) -> float:
    """Continuous and piecewise linear: nothing before the first piece, then the sum over the pieces passed.

    Raises:
        ValueError: as ``parse_pieces``.
    """
    parsed = parse_pieces(tuple(pieces))
    total = 0.0
    for piece, following in zip(parsed, [*parsed[1:], None], strict=True):
        end = length if following is None else min(length, following.start)
        total -= max(end - piece.start, 0) / 1000.0 * piece.per_thousand
    return total


class PenaltyPiece(NamedTuple):
    """From ``start`` tokens on, every further 1000 tokens cost ``per_thousand``."""

    start: int
    per_thousand: float


@functools.lru_cache(maxsize=8)
def parse_pieces(texts: tuple[str, ...]) -> list[PenaltyPiece]:
    """Parse ``["8000 0.01", "12000 0.05"]``, each "<from tokens> <penalty per 1000 tokens>".

    Raises:
        ValueError: an entry is not a pair of numbers, or starts do not ascend.
    """
    pieces = []
    for text in texts:
        try:
            start, slope = text.split()
            pieces.append(PenaltyPiece(int(start), float(slope)))
        except ValueError:
            raise InputError(f"piece {text!r} is not of the form '<from tokens> <penalty per 1000 tokens>'") from None
    if not pieces or any(b.start <= a.start for a, b in zip(pieces, pieces[1:], strict=False)):
        raise InputError(f"the pieces {list(texts)} must begin at ascending lengths")
    return pieces
