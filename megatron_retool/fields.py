"""What the declaration of a setting says of its values besides their type: choices and ranges.

    schedule: str = choice("constant", "linear", "cosine")
    lr: float = positive(1e-6, maximum=1)
    total_steps: int | None = at_least_one(None)
    betas: list[float] = number([0.9, 0.95], minimum=0, below=1)

The configuration checks them when it is loaded, and its reference page prints them. Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

BILLION = 10**9
"""The bound of settings that name none: what exceeds it is a slip of the keyboard."""


@dataclass(frozen=True)
class Range:
    """Numbers between two bounds, and perhaps one more that means something of its own (such as top_k=-1).

    ``nan`` lies in no range, and an infinite number in none whose bounds are finite.
    """

    low: float = -BILLION
    high: float = BILLION
    includes_low: bool = True
    includes_high: bool = True
    special: float | None = None

    def __contains__(self, value: float) -> bool:
        if self.special is not None and value == self.special:
            return True
        above = self.low <= value if self.includes_low else self.low < value
        return above and (value <= self.high if self.includes_high else value < self.high)

    def __str__(self) -> str:
        """Such as "above 0, at most 1" or "-1, or at least 1, at most 1e9"."""
        low, high = "at least" if self.includes_low else "above", "at most" if self.includes_high else "below"
        text = f"{low} {_plain(self.low)}, {high} {_plain(self.high)}"
        return text if self.special is None else f"{_plain(self.special)}, or {text}"


def choice(default: str | None, *others: str) -> Any:
    """A field of text that is ``default`` or one of ``others``; None stands for null."""
    return field(default=default, metadata={"choices": (default, *others)})


def number(
    default: float | list[float] | None,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    special: float | None = None,
) -> Any:
    """A field of a number, or a list of numbers, between two bounds.

    Args:
        default: None for a setting that may be left out.
        minimum: smallest number; or ``above``, which is not allowed itself.
        maximum: largest number; or ``below``, which is not allowed itself.
        special: one more number that is allowed.
    """
    low, high = above if minimum is None else minimum, below if maximum is None else maximum
    allowed = Range(
        -BILLION if low is None else low,
        BILLION if high is None else high,
        includes_low=above is None,
        includes_high=below is None,
        special=special,
    )
    metadata = {"range": allowed}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def at_least_one(default: int | None, *, maximum: float | None = None) -> Any:
    """A field of a whole number that is at least 1."""
    return number(default, minimum=1, maximum=maximum)


def positive(default: float | None, *, maximum: float | None = None) -> Any:
    """A field of a number above 0."""
    return number(default, above=0, maximum=maximum)


def not_negative(default: float | None, *, maximum: float | None = None) -> Any:
    """A field of a number that is at least 0."""
    return number(default, minimum=0, maximum=maximum)


def fraction(default: float | None) -> Any:
    """A field of a number from 0 to 1."""
    return number(default, minimum=0, maximum=1)


def _plain(bound: float) -> str:
    """Round powers of ten as 1e9, anything else as it is."""
    power = round(math.log10(abs(bound))) if bound else 0
    if power >= 5 and abs(bound) == 10**power:
        return f"{'-' if bound < 0 else ''}1e{power}"
    return f"{bound}"
