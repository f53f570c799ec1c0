"""The table of the doctor's reports in docs/tested.md.

python -m megatron_retool.parity.doctor.tested_page writes it between its marks.

A report that is to be in it lies in docs/doctor/ (megatron-retool doctor --output docs/doctor/NAME.json).
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_retool.installation import ROOT
from megatron_retool.parity.doctor.catalogue import STEPS
from megatron_retool.parity.doctor.outcome import StepOutcome, StepVerdict
from megatron_retool.parity.doctor.report import DoctorReport

PAGE, REPORTS = ROOT / "docs" / "tested.md", ROOT / "docs" / "doctor"
BEGIN, END = "<!-- doctor -->", "<!-- end of doctor -->"


def table(reports: Sequence[tuple[str, DoctorReport]]) -> str:
    """Markdown: a column for each report (path from the page, report), the newest first; a row for each group."""
    newest = sorted(reports, key=lambda each: each[1].date, reverse=True)
    heads = [f"[{report.machine_name}, {report.date[:10]}]({path})" for path, report in newest]
    lines = ["| group of steps | " + " | ".join(heads) + " |", "|---" * (len(newest) + 1) + "|"]
    for group in dict.fromkeys(step.group for step in STEPS):
        names = {step.name for step in STEPS if step.group == group}
        cells = [cell([each for each in report.outcomes if each.step in names]) for _, report in newest]
        lines.append(f"| {group} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def cell(outcomes: Sequence[StepOutcome]) -> str:
    """How a group went: counts, and which steps failed or were skipped."""
    if not outcomes:
        return "not run"
    parts = []
    passed = sum(outcome.verdict is StepVerdict.PASS for outcome in outcomes)
    if passed:
        parts.append(f"{passed} pass")
    for verdict in (StepVerdict.FAIL, StepVerdict.SKIPPED):
        names = [outcome.step for outcome in outcomes if outcome.verdict is verdict]
        if names:
            parts.append(f"{verdict}: {', '.join(names)}")
    return "; ".join(parts)


def page(text: str) -> str:
    """``text`` with the table between its marks."""
    reports = [(str(path.relative_to(PAGE.parent)), DoctorReport.read(path)) for path in sorted(REPORTS.glob("*.json"))]
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table(reports)}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
