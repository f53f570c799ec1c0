"""What one check of an admission found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class AdmissionVerdict(StrEnum):
    """How a check ended."""

    PASS = "pass"
    FAIL = "fail"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class Check:
    """
    Attributes:
        kind: its row of docs/models.md: "layout" and the like.
        reason: why it failed or does not apply, or which setting passed.
        figures: what was measured, by name.
    """

    kind: str
    name: str
    verdict: AdmissionVerdict
    reason: str = ""
    figures: dict[str, float] = field(default_factory=dict)


def judged(kind: str, name: str, figures: dict[str, float], exceeding: dict[str, float]) -> Check:
    """A check that measured ``figures``; ``exceeding`` names those beyond their tolerance."""
    if not exceeding:
        return Check(kind, name, AdmissionVerdict.PASS, figures=figures)
    worst = sorted(exceeding.items(), key=lambda item: -item[1])
    return Check(
        kind, name, AdmissionVerdict.FAIL, ", ".join(f"{key} {value:.1e}" for key, value in worst[:4]), figures
    )


@dataclass(frozen=True)
class Admission:
    """Every check of one model.

    Attributes:
        model: what was asked for: a directory, a file, or a published model's name.
        config: config.json as it was shrunk.
    """

    family: str
    model: str
    config: dict[str, Any]
    checks: tuple[Check, ...]

    @property
    def admitted(self) -> bool:
        """Whether no check failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.verdict is AdmissionVerdict.FAIL)

    def as_json(self) -> dict[str, Any]:
        """The admission as its JSON file has it."""
        return {**asdict(self), "admitted": self.admitted}
