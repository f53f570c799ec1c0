"""What a run came to: its validations side by side, and how long it took, as a table and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_retool.runs.metrics_file import read_metrics
from run_files.phases import Phase

_MEAN = "val-core/all/acc/mean@"
_BEHAVIOUR = {
    "val-aux/tool/use_rate": "tool use",
    "val-aux/tool/success_rate": "tool success",
    "val-aux/num_turns/mean": "turns",
}


@dataclass(frozen=True)
class Summary:
    """Attributes:
    validations: figures by name of the model that they belong to, in the order of training.
    training: what the steps took and came to, by name, as text.
    """

    validations: Mapping[str, Mapping[str, float]]
    training: Mapping[str, str]

    def text(self) -> str:
        """The summary as lines of plain text."""
        lines = [
            f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in figures.items())
            for name, figures in self.validations.items()
        ]
        return "\n".join([*lines, *(f"{name}: {value}" for name, value in self.training.items())])

    def print(self, console: Console) -> None:
        """Print the summary as a table and lines."""
        if self.validations:
            table = Table(title="held-out problems")
            table.add_column("model")
            columns = list(dict.fromkeys(key for figures in self.validations.values() for key in figures))
            for key in columns:
                table.add_column(key, justify="right")
            for name, figures in self.validations.items():
                table.add_row(name, *(f"{figures[key]:.3f}" if key in figures else "" for key in columns))
            console.print(table)
        for name, value in self.training.items():
            console.print(f"{name}: {value}", highlight=False)


def summarise(run_dir: Path, seconds: Mapping[str, float] | None = None) -> Summary:
    """The run's first, best and last validation, and its steps.

    Args:
        seconds: what each stage took.
    """
    rows = read_metrics(run_dir / "metrics.jsonl")
    models: dict[str, dict[str, float]] = {}
    validated = [row for row in rows if _accuracy(row) is not None]
    if validated:
        best = max(validated, key=lambda row: (_accuracy(row) or 0.0, row["step"]))
        for row, word in ((validated[0], ""), (best, ", best"), (validated[-1], ", last")):
            name = "before RL" if row["step"] == 0 else f"step {row['step']}"
            if word == ", last" and row is best:
                models.pop(f"{name}, best", None)
                word = ", best and last"
            if word and row is validated[0]:
                continue
            models[name + word] = _figures(row)
    return Summary(models, _training(rows, seconds or {}))


def _accuracy(row: Mapping[str, Any]) -> float | None:
    return next((float(value) for key, value in row.items() if key.startswith(_MEAN) and value is not None), None)


def _figures(row: Mapping[str, Any]) -> dict[str, float]:
    figures = {key.rsplit("/", 1)[1]: value for key, value in row.items() if key.startswith(_MEAN)}
    figures |= {
        f"{kind}@{count}": row[key]
        for count in [name.removeprefix("mean@") for name in figures]
        for kind in ("best", "maj")
        if (key := f"val-core/all/acc/{kind}@{count}/mean") in row
    }
    figures |= {word: row[key] for key, word in _BEHAVIOUR.items() if key in row}
    return {name: float(value) for name, value in figures.items() if value is not None}


def _training(rows: Sequence[Mapping[str, Any]], seconds: Mapping[str, float]) -> dict[str, str]:
    def column(name: str) -> list[float]:
        return [float(row[name]) for row in rows if row.get(name) is not None]

    result = {}
    steps = column(Phase.STEP.metric)
    if steps:
        result["steps"] = f"{len(steps)}, median {median(steps):.1f} s, together {_duration(sum(steps))}"
    tokens = sum(column("perf/total_num_tokens"))
    if tokens:
        result["tokens trained on"] = f"{tokens:,.0f}"
    differences = column("rollout_corr/log_prob_abs_diff")
    if differences:
        result["|Δ log p| of engine and learner"] = f"median {median(differences):.2g}, largest {max(differences):.2g}"
    if seconds:
        stages = {**seconds, "all": sum(seconds.values())}
        result["seconds by stage"] = ", ".join(f"{name} {value:.0f}" for name, value in stages.items())
    return result


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
