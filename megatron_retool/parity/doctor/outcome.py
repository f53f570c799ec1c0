"""What a step finds: figures with bounds, and the verdict that follows from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from megatron_retool.errors import OperationError


class StepVerdict(StrEnum):
    """How a step ended."""

    PASS = "pass"
    FAIL = "fail"
    SKIPPED = "skipped"


class Skipped(Exception):
    """The host has not what a step needs. The message says what that is."""


class StepFailed(OperationError):
    """A step cannot continue; the message says why. ``cure`` replaces the step's own, where the cause is known."""

    def __init__(self, message: str, cure: str = "") -> None:
        super().__init__(message)
        self.cure = cure


@dataclass(frozen=True)
class StepFigure:
    """Something that was measured, and what it has to be.

    Attributes:
        value: a number, or a text, which has no bound.
        unit: of value and bounds.
        at_most, at_least: the bounds; None: none.
    """

    name: str
    value: float | str
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the value is within its bounds; what is no finite number is within none."""
        if self.at_most is None and self.at_least is None:
            return True
        if isinstance(self.value, str) or not math.isfinite(self.value):
            return False
        return (self.at_most is None or self.value <= self.at_most) and (
            self.at_least is None or self.value >= self.at_least
        )

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        limits = [
            f"{words} {shown(bound)}"
            for words, bound in (("at most", self.at_most), ("at least", self.at_least))
            if bound is not None
        ]
        return f"{self.name}: {shown(self.value)}{unit}" + (f" ({', '.join(limits)})" if limits else "")

    def as_json(self) -> dict[str, Any]:
        """For the report. JSON has no NaN and no infinity: such a value becomes text."""
        value = self.value if isinstance(self.value, str) or math.isfinite(self.value) else str(self.value)
        limits = {"unit": self.unit, "at_most": self.at_most, "at_least": self.at_least}
        return {"name": self.name, "value": value, "holds": self.holds} | {
            key: limit for key, limit in limits.items() if limit not in (None, "")
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> StepFigure:
        """The figure that ``as_json`` wrote."""
        limits = {key: found.get(key) for key in ("at_most", "at_least")}
        return cls(found["name"], found["value"], found.get("unit", ""), **limits)


@dataclass(frozen=True)
class StepOutcome:
    """What became of a step.

    Attributes:
        step: its name.
        seconds: that it took, the start of its process included.
        reason: why it failed or was skipped; empty where it passed.
        cure: what to do about it; empty where it did not fail.
    """

    step: str
    verdict: StepVerdict
    seconds: float = 0.0
    reason: str = ""
    cure: str = ""
    figures: tuple[StepFigure, ...] = ()

    @classmethod
    def judged(cls, step: str, figures: Sequence[StepFigure], cure: str) -> StepOutcome:
        """Of a step that came to its end: it passed where every figure holds."""
        wrong = [str(figure) for figure in figures if not figure.holds]
        if not wrong:
            return cls(step, StepVerdict.PASS, figures=tuple(figures))
        return cls(step, StepVerdict.FAIL, reason="; ".join(wrong), cure=cure, figures=tuple(figures))

    def as_json(self) -> dict[str, Any]:
        """The outcome as the report's JSON has it; empty texts are left out."""
        result: dict[str, Any] = {"step": self.step, "verdict": str(self.verdict), "seconds": round(self.seconds, 1)}
        result |= {key: text for key, text in (("reason", self.reason), ("cure", self.cure)) if text}
        return result | {"figures": [figure.as_json() for figure in self.figures]}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> StepOutcome:
        """
        Raises:
            KeyError, ValueError: it is none.
        """
        return cls(
            found["step"],
            StepVerdict(found["verdict"]),
            found["seconds"],
            found.get("reason", ""),
            found.get("cure", ""),
            tuple(StepFigure.from_json(each) for each in found["figures"]),
        )


def shown(value: float | str) -> str:
    """A number in few digits."""
    if isinstance(value, str):
        return value
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e6 else f"{value:.3g}"
