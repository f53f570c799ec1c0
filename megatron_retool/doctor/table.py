"""What a terminal shows of the doctor."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from megatron_retool.doctor.catalogue import Step
from megatron_retool.doctor.outcome import Figure, Outcome, Verdict

_STYLES = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.SKIPPED: "yellow"}
FIGURES_SHOWN = 2
"""Of a step that passed, those nearest to their upper bounds; the JSON file has all."""


def steps_table(steps: Sequence[Step]) -> Table:
    """What ``--list`` prints."""
    table = Table("step", "group", "proves", "needs", box=box.SIMPLE)
    for step in steps:
        table.add_row(step.name, step.group, escape(step.summary), ", ".join(step.needs))
    return table


def outcomes_table(outcomes: Sequence[Outcome]) -> Table:
    """A row for each step: verdict, seconds, and figures, reason or cure."""
    table = Table("step", "verdict", "seconds", "what was found", box=box.SIMPLE)
    for outcome in outcomes:
        table.add_row(outcome.step, verdict_text(outcome.verdict), f"{outcome.seconds:.1f}", escape(_found(outcome)))
    return table


def verdict_text(verdict: Verdict) -> Text:
    return Text(str(verdict), style=_STYLES[verdict])


def summary(outcomes: Sequence[Outcome]) -> str:
    """How many passed, failed and were skipped."""
    counts = [(verdict, sum(outcome.verdict is verdict for outcome in outcomes)) for verdict in Verdict]
    words = {Verdict.PASS: "passed", Verdict.FAIL: "failed", Verdict.SKIPPED: "skipped"}
    return ", ".join(f"{count} {words[verdict]}" for verdict, count in counts)


def _found(outcome: Outcome) -> str:
    if outcome.verdict is Verdict.SKIPPED:
        return outcome.reason
    if outcome.verdict is Verdict.FAIL:
        return f"{outcome.reason}\ncure: {outcome.cure}"
    return "\n".join(str(figure) for figure in sorted(outcome.figures, key=_room)[:FIGURES_SHOWN])


def _room(figure: Figure) -> float:
    """How far a figure is below its upper bound, as a share of it; those without one come last."""
    if figure.at_most is None or isinstance(figure.value, str):
        return 2.0 if figure.at_least is None else 1.5
    return 1 - figure.value / figure.at_most if figure.at_most else 0.0
