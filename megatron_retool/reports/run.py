"""The run's curves as PNG files and one page of them, plots.html, for papers and for readers without a script.

They are made of what the run left on disk (metrics.jsonl, validation/); the report itself is viewer/report.py's.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_retool.reports.problems import TABLE, draw_problems
from megatron_retool.rewards.code_purpose import Purpose
from megatron_retool.runs.metrics_file import require_rows
from run_files.atomic_files import write_text
from run_files.phases import Phase

_DRAWN_PHASES = (
    Phase.STEP,
    Phase.GENERATION,
    Phase.REWARD,
    Phase.OLD_LOG_PROB,
    Phase.UPDATE_ACTOR,
    Phase.WEIGHT_SYNC,
)
PLOTS_PAGE = "plots.html"


@dataclass(frozen=True)
class Figure:
    """One picture: a title, and (metric name, legend) pairs drawn over the step; none in a heat map of problems."""

    name: str
    title: str
    series: Sequence[tuple[str, str]]
    log_scale: bool = False


def _figures(metrics: set[str]) -> list[Figure]:
    sources = sorted({name.split("/acc/")[0] for name in metrics if name.startswith("val-core/") and "/acc/" in name})
    figures = [
        Figure(
            "learning_curve",
            "Learning to use the tool",
            [
                *((name, f"held-out {name.split('/')[-1]}") for name in sorted(metrics) if _is_overall_mean(name)),
                ("rollout/acc/mean", "accuracy of generated responses"),
                ("tool/use_rate", "responses with a tool call"),
                ("tool/success_rate", "tool calls that succeed"),
            ],
        )
    ]
    overall = [
        (name, name.split("/acc/")[1])
        for name in sorted(metrics)
        if name.startswith("val-core/all/acc/") and "std" not in name
    ]
    if overall:
        figures.append(Figure("validation_accuracy", "Held-out accuracy", overall))
    by_source = [
        (name, source.removeprefix("val-core/"))
        for source in sources
        if source != "val-core/all"
        for name in sorted(metrics)
        if name.startswith(f"{source}/acc/mean@")
    ]
    if by_source:
        figures.append(Figure("validation_by_source", "Held-out accuracy by data source (mean@k)", by_source))
    by_difficulty = [
        (name, name.removeprefix("val-aux/").replace("/acc/", " ").rsplit("/", 1)[0])
        for name in sorted(metrics)
        if re.fullmatch(r"val-aux/.+/acc/[^/]+/mean@\d+", name)
    ]
    if by_difficulty:
        figures.append(Figure("validation_by_difficulty", "Held-out accuracy by difficulty (mean@k)", by_difficulty))
    quick = [
        (name, name.rsplit("/acc/", 1)[1]) for name in sorted(metrics) if name.startswith("val-quick/all/acc/mean@")
    ]
    if quick:
        figures.append(Figure("validation_quick", "Accuracy in quick validations (few problems)", quick))
    figures += [
        Figure("accuracy", "Accuracy of generated responses", [("rollout/acc/mean", "all generated")]),
        Figure("score", "Score", [("rollout/score/mean", "all generated"), ("critic/score/mean", "trained on")]),
        Figure(
            "tools",
            "Tool use",
            [
                ("tool/use_rate", "responses with a call"),
                ("tool/success_rate", "calls that succeed"),
                ("tool/parse_error_rate", "calls that do not parse"),
            ],
        ),
        Figure(
            "code",
            "Code",
            [
                ("code/ratio", "responses with code"),
                ("code/pass_rate", "code that runs"),
                ("code/last_pass_rate/right", "last code of right responses runs"),
                ("code/last_pass_rate/wrong", "last code of wrong responses runs"),
                ("code/self_correction_rate", "failed code that is mended"),
                ("code/first_call_position", "part of the response before the first call"),
            ],
        ),
        Figure(
            "code_lines",
            "Lines of code",
            [("code/lines_per_response", "in a response"), ("code/lines_per_call", "in a call")],
        ),
        Figure("code_purpose", "What code is for", [(f"code/purpose/{p.value}", p.value) for p in Purpose]),
        Figure("turns", "Turns", [("num_turns/mean", "mean"), ("num_turns/max", "max")]),
        Figure(
            "length", "Response length (tokens)", [("response_length/mean", "mean"), ("response_length/max", "max")]
        ),
        Figure("entropy", "Entropy (nats)", [("actor/entropy", "entropy")]),
        Figure("gradient", "Gradient norm", [("actor/grad_norm", "norm")]),
        Figure("clip", "Clipped tokens", [("actor/pg_clipfrac", "upper"), ("actor/pg_clipfrac_lower", "dual clip")]),
        Figure(
            "mismatch",
            "Training and rollout probabilities",
            [("rollout_corr/log_prob_abs_diff", "mean |Δ log p|"), ("rollout_corr/k3_kl", "k3 KL")],
            log_scale=True,
        ),
        Figure("masked", "Tokens masked by the correction", [("rollout_corr/masked_fraction", "fraction")]),
        Figure(
            "time",
            "Seconds of a step",
            [(phase.metric, phase) for phase in _DRAWN_PHASES],
        ),
    ]
    return figures


def _is_overall_mean(name: str) -> bool:
    return name.startswith("val-core/all/acc/mean@")


@dataclass(frozen=True)
class Plots:
    """The pictures of a run, drawn into ``directory``.

    Attributes:
        last: metrics of the last step.
        problems: sentences about files, lines and values of the run that are damaged and not drawn.
    """

    run_dir: Path
    directory: Path
    pictures: Sequence[Figure]
    last: dict[str, Any]
    problems: Sequence[str]

    def write_page(self, notes: str = "") -> Path:
        """A page of all, plots.html beside them; its path.

        Args:
            notes: plain text under the heading.
        """
        page = self.directory / PLOTS_PAGE
        write_text(page, _page(self.run_dir.name, notes, self.pictures, self.last))
        return page


def draw_plots(run_dir: str | Path) -> Plots:
    """Draw every curve that the run has into runs/<name>/report/.

    The accuracy of each validation problem at each step is a picture and a table (validation_problems.csv) beside them.

    Args:
        run_dir: a run's directory with metrics.jsonl.

    Raises:
        FileNotFoundError: there is no such run, or it has no metrics.
    """
    run_dir = Path(run_dir)
    rows, problems = require_rows(run_dir, "there is nothing to report")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    target = run_dir / "report"
    target.mkdir(exist_ok=True)
    pictures = []
    for figure in _figures({name for row in rows for name in row}):
        present = [(name, legend) for name, legend in figure.series if any(row.get(name) is not None for row in rows)]
        if not present:
            continue
        canvas, axes = plt.subplots(figsize=(7, 4), dpi=110)
        for name, legend in present:
            points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            few = len(points) < 20
            axes.plot(*zip(*points, strict=True), label=legend, marker="o" if few else None, linewidth=2 if few else 1)
        axes.set(title=figure.title, xlabel="step")
        if figure.log_scale:
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        canvas.tight_layout()
        canvas.savefig(target / f"{figure.name}.png")
        plt.close(canvas)
        pictures.append(figure)
    pictures += [Figure(name, title, []) for name, title in draw_problems(run_dir, rows, target, problems)]
    return Plots(run_dir, target, pictures, rows[-1], problems)


def _page(title: str, notes: str, pictures: Sequence[Figure], last: dict[str, Any]) -> str:
    link = (
        f'<p>Accuracy of each problem: <a href="{TABLE}">{TABLE}</a></p>' if any(not p.series for p in pictures) else ""
    )
    images = "\n".join(f'<figure><img src="{p.name}.png" alt="{html.escape(p.title)}"></figure>' for p in pictures)
    cells = "\n".join(
        f"<tr><td>{html.escape(name)}</td><td>{value:.6g}</td></tr>"
        for name, value in sorted(last.items())
        if isinstance(value, (int, float))
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1500px; padding: 0 1rem; color: #222 }}
main {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(460px, 1fr)); gap: 1rem }}
figure {{ margin: 0 }} img {{ width: 100%; border: 1px solid #ddd }} pre {{ background: #f6f6f6; padding: 1rem }}
td {{ padding: 0 1rem 0 0; font-variant-numeric: tabular-nums }}
</style></head><body>
<h1>{html.escape(title)}</h1>
{f"<pre>{html.escape(notes)}</pre>" if notes else ""}
<main>
{images}
</main>
{link}
<details><summary>All metrics of the last step ({last["step"]})</summary><table>
{cells}
</table></details>
</body></html>
"""
