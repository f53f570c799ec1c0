"""What came out of an experiment's runs: a row for each, means by arm as a table, curves."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from experiments.mismatch.arms import Experiment
from experiments.mismatch.runs import Run
from megatron_retool.runs.metrics_file import read_metrics
from megatron_retool.trajectory import read_trajectories
from run_files.atomic_files import atomic_write

CURVES = (
    ("rollout/acc/mean", "accuracy of generated responses", False),
    ("actor/grad_norm", "gradient norm", True),
    ("rollout_corr/k3_kl", "k3 KL", True),
    # Not the perplexity itself: a single response that the model all but excludes would outweigh all others.
    ("rollout_corr/training_log_ppl", "log-perplexity under the learner (nats)", False),
    ("actor/entropy", "entropy (nats)", False),
    ("rollout_corr/masked_fraction", "rejected tokens", False),
)
WINDOW = 10
"""Steps over which the first, the last and the best of a run are taken."""

_COLUMNS = {
    "float32_accuracy": ("held-out, float32", ".3f"),
    "held_out_accuracy": ("held-out, as served", ".3f"),
    "best_accuracy": ("best", ".2f"),
    "final_accuracy": ("last", ".2f"),
    "first_k3_kl": ("k3 first", ".1e"),
    "last_k3_kl": ("k3 last", ".1e"),
    "max_k3_kl": ("k3 largest", ".1e"),
    "steps_with_large_gradient": ("gradient > 1", ".1f"),
    "max_grad_norm": ("largest gradient", ".2g"),
    "mean_rejected": ("rejected", ".1%"),
    "skipped_updates": ("skipped", ".1f"),
}
_LEGEND = (
    f"best, last: accuracy of generated responses over {WINDOW} steps. k3: mean k3 KL over the first and the last "
    f"{WINDOW} steps, and the largest of a step. gradient > 1: steps with a larger gradient norm. rejected: share of "
    "sampled tokens. skipped: steps without an update. degraded: runs whose last accuracy is below 0.9 of their best."
)


def write_results(directory: Path, experiment: Experiment, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """results.jsonl (a row for each run), results.md (tables) and curves.png; the rows."""
    rows = [summary(experiment, run) for run in runs]
    with atomic_write(directory / "results.jsonl") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
    with atomic_write(directory / "results.md") as file:
        file.write(markdown(experiment, rows).encode())
    draw_curves(directory, experiment, runs)
    return rows


def summary(experiment: Experiment, run: Run) -> dict[str, Any]:
    """One row of results.jsonl.

    final_accuracy and best_accuracy are means over 10 steps of the accuracy of all generated responses (over what there
    is of a shorter run); "degraded" says that the end lies below nine tenths of the best. float32_accuracy and
    float32_families (by the demo's families of problems) are mean accuracies of the evaluation in a float32 engine.
    A run that starts from another's checkpoint has the steps that are its own.
    """
    rows = [row for row in read_metrics(run.path / "metrics.jsonl") if row["step"] > 0]
    accuracy = _column(rows, "rollout/acc/mean")
    window = min(WINDOW, len(accuracy))
    means = np.convolve(accuracy, np.ones(window) / window, mode="valid")
    gradients = _column(rows, "actor/grad_norm")

    def largest(name: str) -> float | None:
        values = _column(rows, name)
        return float(values.max()) if len(values) else None

    return {
        "experiment": experiment.name,
        "arm": run.arm.name,
        "seed": run.seed,
        "steps": len(rows),
        "final_accuracy": float(means[-1]),
        "best_accuracy": float(means.max()),
        "degraded": bool(means[-1] < 0.9 * means.max()),
        "held_out_accuracy": next((value for row in reversed(rows) if (value := _held_out(row)) is not None), None),
        **_in_float32(run),
        "steps_with_large_gradient": int((gradients > 1).sum()),
        "max_grad_norm": largest("actor/grad_norm"),
        "first_k3_kl": _mean(rows[:window], "rollout_corr/k3_kl"),
        "last_k3_kl": _mean(rows[-window:], "rollout_corr/k3_kl"),
        "max_k3_kl": largest("rollout_corr/k3_kl"),
        "max_training_ppl": largest("rollout_corr/training_ppl"),
        "mean_rejected": _mean(rows, "rollout_corr/masked_fraction"),
        "skipped_updates": int(_column(rows, "actor/skipped_updates").sum()),
        "final_entropy": _mean(rows[-window:], "actor/entropy"),
        "seconds": float(_column(rows, "timing_s/step").sum()),
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _held_out(row: dict[str, Any]) -> float | None:
    return next((value for key, value in row.items() if key.startswith("val-core/all/acc/mean@")), None)


def _in_float32(run: Run) -> dict[str, Any]:
    if not (run.evaluation / "metrics.jsonl").exists():
        return {}
    (row,) = read_metrics(run.evaluation / "metrics.jsonl")
    families: dict[str, list[float]] = defaultdict(list)
    for trajectory in read_trajectories(run.evaluation / "validation" / "step_000000.parquet"):
        families[trajectory.extra_info["family"]].append(trajectory.reward_info["acc"])
    return {
        "float32_accuracy": _held_out(row),
        "float32_families": {name: float(np.mean(families[name])) for name in sorted(families)},
    }


def _column(rows: Sequence[dict[str, Any]], name: str) -> Any:
    return np.array([row[name] for row in rows if row.get(name) is not None], dtype=np.float64)


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    values = _column(rows, name)
    return float(values.mean()) if len(values) else None


def _by_arm(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {arm: [row for row in rows if row["arm"] == arm] for arm in dict.fromkeys(row["arm"] for row in rows)}


def markdown(experiment: Experiment, rows: Sequence[dict[str, Any]]) -> str:
    """Three tables: means over the seeds of each arm, held-out accuracy by family of problems, every run."""
    arms, columns = _by_arm(rows), {name: each for name, each in _COLUMNS.items() if _mean(rows, name) is not None}
    headings = [heading for heading, _ in columns.values()]
    main = "float32_accuracy" if "float32_accuracy" in columns else "held_out_accuracy"

    def figures(own: Sequence[dict[str, Any]]) -> list[str]:
        return [_formatted(_mean(own, name), form) for name, (_, form) in columns.items()]

    def difference(arm: str) -> str:
        other = next(each.against for each in experiment.arms if each.name == arm)
        here, there = _mean(arms[arm], main), _mean(arms.get(other or "", []), main)
        if other is None:
            return "–"
        return other if here is None or there is None else f"{other}: {here - there:+.3f}"

    text = [f"# {experiment.title}", "", _LEGEND, "", "## Means over the seeds", ""]
    text += _table(
        ["arm", "seeds", *headings, "degraded", f"{_COLUMNS[main][0]}, against"],
        [
            [arm, str(len(own)), *figures(own), f"{sum(row['degraded'] for row in own)}/{len(own)}", difference(arm)]
            for arm, own in arms.items()
        ],
    )
    families = sorted({name for row in rows for name in row.get("float32_families", ())})
    if families:
        text += ["", "## Held-out accuracy by family of problems, float32", ""]
        text += _table(
            ["arm", *families],
            [
                [
                    arm,
                    *(_formatted(_mean([row.get("float32_families", {}) for row in own], f), ".3f") for f in families),
                ]
                for arm, own in arms.items()
            ],
        )
    text += ["", "## Every run", ""]
    text += _table(
        ["arm", "seed", "steps", *headings, "minutes"],
        [
            [row["arm"], f"{row['seed']}", f"{row['steps']}", *figures([row]), f"{row['seconds'] / 60:.0f}"]
            for row in rows
        ],
    )
    return "\n".join(text) + "\n"


def _formatted(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [headings, ["---"] * len(headings), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def results_table(experiment: Experiment, rows: Sequence[dict[str, Any]]) -> Table:
    """Means over the seeds of each arm, for the console."""
    columns = {
        "final_accuracy": "final", "float32_accuracy": "float32", "held_out_accuracy": "held-out",
        "max_k3_kl": "k3 KL", "mean_rejected": "rejected",
    }  # fmt: skip
    table = Table(title=experiment.title, box=box.SIMPLE, pad_edge=False)
    table.add_column("arm", no_wrap=True)
    for heading in (*columns.values(), "degraded"):
        table.add_column(heading, justify="right", no_wrap=True)
    for arm, own in _by_arm(rows).items():
        table.add_row(
            arm,
            *(_formatted(_mean(own, column), ".2g") for column in columns),
            f"{sum(row['degraded'] for row in own)}/{len(own)}",
        )
    return table


def draw_curves(directory: Path, experiment: Experiment, runs: Sequence[Run]) -> Path:
    """curves.png: for every arm the mean over seeds, with the range of the seeds as a band, averaged over 5 steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    by_arm: dict[str, list[list[dict[str, Any]]]] = defaultdict(list)
    for run in runs:
        by_arm[run.arm.name].append([row for row in read_metrics(run.path / "metrics.jsonl") if row["step"] > 0])
    seeds = sorted({run.seed for run in runs})
    canvas, panels = plt.subplots(2, 3, figsize=(15, 8))
    for axes, (name, title, log_scale) in zip(panels.flat, CURVES, strict=True):
        positive = True
        for arm, tables in by_arm.items():
            values_of = [{row["step"]: row[name] for row in rows if row.get(name) is not None} for rows in tables]
            steps = sorted(set.intersection(*map(set, values_of)))
            if not steps:
                continue
            window = min(5, len(steps))
            smooth = np.ones(window) / window
            values = np.array([np.convolve([run[step] for step in steps], smooth, mode="valid") for run in values_of])
            steps = steps[window - 1 :]
            positive &= bool((values > 0).all())
            (line,) = axes.plot(steps, values.mean(0), label=arm)
            axes.fill_between(steps, values.min(0), values.max(0), alpha=0.15, color=line.get_color())
        if log_scale and positive and axes.has_data():
            axes.set_yscale("log")
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
    panels[0, 0].legend(fontsize=8)
    canvas.suptitle(f"{experiment.title} ({len(seeds)} seed{'s' if len(seeds) > 1 else ''}, running means of 5 steps)")
    canvas.tight_layout()
    target = directory / "curves.png"
    with atomic_write(target) as file:
        canvas.savefig(file, format="png", dpi=110)
    plt.close(canvas)
    return target
