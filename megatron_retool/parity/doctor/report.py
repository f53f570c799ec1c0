"""The doctor's JSON file: machine, date, versions, and every figure with its bound."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_retool.errors import InputError
from megatron_retool.parity.doctor.outcome import StepOutcome, StepVerdict
from run_files.atomic_files import write_text

FORMAT = 1


class ReportError(InputError):
    """A file is no report of the doctor. The message names it."""


@dataclass(frozen=True)
class DoctorReport:
    """
    Attributes:
        date: of its beginning, in ISO 8601, UTC.
        machine: processor, cores, memory_gib, gpus; neither host name nor paths.
        versions: of packages that matter, by name.
        outcomes: in the order of the steps.
    """

    date: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str] = field(default_factory=dict)
    outcomes: Sequence[StepOutcome] = ()

    @property
    def failed(self) -> bool:
        """Whether any step failed."""
        return any(outcome.verdict is StepVerdict.FAIL for outcome in self.outcomes)

    @property
    def machine_name(self) -> str:
        """The machine in a few words."""
        gpus: list[str] = list(self.machine.get("gpus", ()))
        host = f"{self.machine['processor']}, {self.machine['cores']} cores, {self.machine['memory_gib']:.0f} GiB"
        return f"{len(gpus)} x {gpus[0]}, {host}" if gpus else host

    def write(self, path: Path) -> None:
        """Write the JSON file; it appears complete or not at all."""
        result = {
            "format": FORMAT,
            "verdict": str(StepVerdict.FAIL if self.failed else StepVerdict.PASS),
            "date": self.date,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "steps": [outcome.as_json() for outcome in self.outcomes],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(result, indent=1, allow_nan=False) + "\n")

    @classmethod
    def read(cls, path: Path) -> DoctorReport:
        """
        Raises:
            ReportError: the file is none, or of another format.
        """
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            if result["format"] != FORMAT:
                raise ReportError(f"{path} has format {result['format']}, not {FORMAT}: make it again with the doctor")
            outcomes = [StepOutcome.from_json(each) for each in result["steps"]]
            return cls(result["date"], result["machine"], result["versions"], outcomes)
        except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ReportError(f"{path} is no report of the doctor: {type(error).__name__}: {error}") from error
