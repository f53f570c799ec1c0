"""What a terminal shows of the doctor."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from megatron_retool.parity.doctor.catalogue import DoctorStep
from megatron_retool.parity.doctor.outcome import StepFigure, StepOutcome, StepVerdict

_STYLES = {StepVerdict.PASS: "green", StepVerdict.FAIL: "bold red", StepVerdict.SKIPPED: "yellow"}
FIGURES_SHOWN = 2
"""Of a step that passed, those nearest to their upper bounds; the JSON file has all."""


def steps_table(steps: Sequence[DoctorStep]) -> Table:
    """What ``--list`` prints."""
    table = Table("step", "group", "proves", "needs", box=box.SIMPLE)
    for step in steps:
        table.add_row(step.name, step.group, escape(step.summary), ", ".join(step.needs))
    return table


def outcomes_table(outcomes: Sequence[StepOutcome]) -> Table:
    """A row for each step: verdict, seconds, and figures, reason or cure."""
    table = Table("step", "verdict", "seconds", "what was found", box=box.SIMPLE)
    for outcome in outcomes:
        table.add_row(outcome.step, verdict_text(outcome.verdict), f"{outcome.seconds:.1f}", escape(_found(outcome)))
    return table


def verdict_text(verdict: StepVerdict) -> Text:
    """The verdict in its colour."""
    return Text(str(verdict), style=_STYLES[verdict])


def summary(outcomes: Sequence[StepOutcome]) -> str:
    """How many passed, failed and were skipped."""
    counts = [(verdict, sum(outcome.verdict is verdict for outcome in outcomes)) for verdict in StepVerdict]
    words = {StepVerdict.PASS: "passed", StepVerdict.FAIL: "failed", StepVerdict.SKIPPED: "skipped"}
    return ", ".join(f"{count} {words[verdict]}" for verdict, count in counts)


def _found(outcome: StepOutcome) -> str:
    if outcome.verdict is StepVerdict.SKIPPED:
        return outcome.reason
    if outcome.verdict is StepVerdict.FAIL:
        return f"{outcome.reason}\ncure: {outcome.cure}"
    return "\n".join(str(figure) for figure in sorted(outcome.figures, key=_room)[:FIGURES_SHOWN])


def _room(figure: StepFigure) -> float:
    """How far a figure is below its upper bound, as a share of it; those without one come last."""
    if figure.at_most is None or isinstance(figure.value, str):
        return 2.0 if figure.at_least is None else 1.5
    return 1 - figure.value / figure.at_most if figure.at_most else 0.0
