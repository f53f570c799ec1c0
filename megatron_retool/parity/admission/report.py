"""What a terminal shows of an admission, and the file of several."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from megatron_retool.parity.admission.outcome import Admission, AdmissionVerdict, Check
from run_files.atomic_files import write_text

_STYLES = {AdmissionVerdict.PASS: "green", AdmissionVerdict.FAIL: "bold red", AdmissionVerdict.NOT_APPLICABLE: "yellow"}
_PACKAGES = ("megatron-core", "transformers", "torch")


def table(admission: Admission) -> Table:
    """A row for each check: verdict, and its largest figures or the reason."""
    rows = Table("check", "", "verdict", "what was found", box=box.SIMPLE)
    for check in admission.checks:
        verdict = Text(str(check.verdict), style=_STYLES[check.verdict])
        rows.add_row(check.kind, escape(check.name), verdict, escape(_found(check)))
    return rows


def _worst_of_each_kind(figures: Mapping[str, float]) -> dict[str, float]:
    """ "metric …" and "replay: …" have one figure each."""
    worst: dict[str, float] = {}
    for name, value in figures.items():
        kind = "metrics" if name.startswith("metric ") else "replay" if ": " in name else name
        worst[kind] = max(worst.get(kind, 0.0), float(f"{value:.3g}"))
    return worst


def _found(check: Check) -> str:
    if check.reason or check.verdict is not AdmissionVerdict.PASS:
        return check.reason
    if {"log_probs", "gradient"} <= check.figures.keys():
        return f"log-probs {check.figures['log_probs']:.0e}, gradients {check.figures['gradient']:.0e}"
    if check.kind in ("checkpoint", "replay"):
        return f"at most {max(check.figures.values()):.0e}"
    return ", ".join(f"{name} {value:g}" for name, value in check.figures.items())


def write_json(path: Path, admissions: Sequence[Admission]) -> None:
    """{"packages": versions, "models": [each admission]}; figures with three digits, one for all of a kind."""
    models = [admission.as_json() for admission in admissions]
    for check in (check for model in models for check in model["checks"]):
        check["figures"] = _worst_of_each_kind(check["figures"])
    content = {"packages": {package: version(package) for package in _PACKAGES}, "models": models}
    write_text(path, json.dumps(content, indent=1) + "\n")
