"""Where the engine's and the learner's probabilities differ: `python -m megatron_retool report mismatch runs/<name>`.

Reads the stored trajectories and the log-probs that the learner computed for them (rollouts/step_N.parquet and
step_N.learner.parquet), and writes to runs/<name>/report/: pictures, mismatch.json with the figures behind them, and
mismatch.html. The pictures are those of "When speed kills stability" (Liu, Li et al. 2025, section 3): difference over
rollout probability, log-perplexity and probability of one side against the other, first turn and later turns apart.

d = log pi_train - log pi_rollout of a sampled token, everywhere.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_retool.algorithms.probability_bins import PROBABILITY_BIN_EDGES
from megatron_retool.errors import InputError
from megatron_retool.runs.stored_settings import stored_settings
from megatron_retool.trajectory import read_trajectories
from run_files import check_run_directory
from run_files.atomic_files import write_text
from run_files.metrics import read_metrics_and_problems
from run_files.steps import read_estimates, step_path

_MAX_POINTS = 20_000
"""Most points of a scatter plot; the figures are always those of all tokens."""

_CURVES = (
    ("rollout/score/mean", "score of all generated responses", False),
    ("actor/grad_norm", "gradient norm", True),
    ("rollout_corr/k3_kl", "k3 KL", True),
    ("rollout_corr/training_ppl", "perplexity under the learner", True),
    ("actor/entropy", "entropy (nats)", False),
    ("rollout_corr/masked_fraction", "rejected tokens", False),
)


@dataclass(frozen=True)
class MismatchSample:
    """Sampled tokens of several steps, end to end; every array has one entry for each token.

    Attributes:
        train_log_probs, rollout_log_probs: float64, of the sampled token.
        turns: assistant turn, from 0.
        tool_calls: tool calls of the token's whole response.
        responses: number of the response; those of one are together.
        steps: the training step.
    """

    train_log_probs: npt.NDArray[np.float64]
    rollout_log_probs: npt.NDArray[np.float64]
    turns: npt.NDArray[np.int64]
    tool_calls: npt.NDArray[np.int64]
    responses: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.turns)

    @property
    def difference(self) -> npt.NDArray[np.float64]:
        """Learner minus engine of each token, in nats: float64 [T]."""
        return self.train_log_probs - self.rollout_log_probs


def read_sample(run_dir: str | Path, max_steps: int = 20) -> MismatchSample:
    """The responses that were trained on, of at most ``max_steps`` steps spread evenly over the run.

    Raises:
        FileNotFoundError: no step of the run has stored log-probs of the learner, or none trained on anything.
        ValueError: a step's two files do not belong together.
    """
    directory = Path(run_dir) / "rollouts"
    files = sorted(directory.glob("step_*.learner.parquet"))
    if not files:
        check_run_directory(directory.parent)
        raise FileNotFoundError(f"{directory} has no step_N.learner.parquet: the run has not trained a step yet")
    chosen = np.unique(np.linspace(0, len(files) - 1, min(max_steps, len(files))).round().astype(int))
    parts: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in MismatchSample.__dataclass_fields__}
    responses = 0
    for file in (files[i] for i in chosen):
        step = int(file.name.split("_")[1].split(".")[0])
        estimates = read_estimates(file)
        path = step_path(directory, step)
        stored = read_trajectories(path, routed_experts=False)
        trajectories = {t.key: t for t in stored}
        for key, columns in estimates.items():
            trajectory = trajectories.get(key)
            if trajectory is None or len(columns["old_log_probs"]) != len(trajectory.response_ids):
                raise InputError(f"{file}: row {key} does not belong to a trajectory of {path.name}")
            mask = trajectory.loss_mask
            count = int(mask.sum())
            parts["train_log_probs"].append(columns["old_log_probs"][mask].astype(np.float64))
            parts["rollout_log_probs"].append(trajectory.rollout_log_probs[mask].astype(np.float64))
            parts["turns"].append(trajectory.turn_ids[mask].astype(np.int64))
            parts["tool_calls"].append(np.full(count, len(trajectory.tool_calls)))
            parts["responses"].append(np.full(count, responses))
            parts["steps"].append(np.full(count, step))
            responses += 1
    if not responses:
        raise FileNotFoundError(f"{directory}: no step trained on a response, so there is nothing to compare")
    return MismatchSample(**{name: np.concatenate(arrays) for name, arrays in parts.items()})


def mismatch_statistics(sample: MismatchSample) -> list[dict[str, Any]]:
    """One row for each category of each split (all, probability, turn, tool_calls, step) that has tokens.

    Each row: split, category, tokens, mean |d|, mean d, k3 = mean(e^d - 1 - d), largest |d|, share of tokens with
    |d| > 0.1, and Pearson's correlation of the two probabilities (null where one is constant).
    """
    edges = (0.0, *PROBABILITY_BIN_EDGES, 1.0)
    bins = np.digitize(np.exp(sample.rollout_log_probs), PROBABILITY_BIN_EDGES)
    splits: list[tuple[str, npt.NDArray[np.int64], Any]] = [
        ("all", np.zeros(len(sample), np.int64), lambda _: "all"),
        ("probability", bins, lambda i: f"{edges[i]:g}–{edges[i + 1]:g}"),
        ("turn", sample.turns, str),
        ("tool_calls", sample.tool_calls, str),
        ("step", sample.steps, str),
    ]
    rows = []
    for split, categories, name in splits:
        for category in np.unique(categories):
            chosen = categories == category
            rows.append({"split": split, "category": name(int(category)), **_figures(sample, chosen)})
    return rows


def _figures(sample: MismatchSample, chosen: npt.NDArray[np.bool_]) -> dict[str, float | None]:
    difference = sample.difference[chosen]
    bounded = difference.clip(-20, 20)
    train, rollout = np.exp(sample.train_log_probs[chosen]), np.exp(sample.rollout_log_probs[chosen])
    constant = len(difference) < 2 or train.std() < 1e-12 or rollout.std() < 1e-12
    return {
        "tokens": int(chosen.sum()),
        "mean_abs_difference": float(np.abs(difference).mean()),
        "mean_difference": float(difference.mean()),
        "k3_kl": float((np.expm1(bounded) - bounded).mean()),
        "max_abs_difference": float(np.abs(difference).max()),
        "share_above_0.1": float((np.abs(difference) > 0.1).mean()),
        "pearson": None if constant else float(np.corrcoef(train, rollout)[0, 1]),
    }


def log_perplexities(
    sample: MismatchSample, chosen: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Mean -log p of each response over its chosen tokens: (rollout's, learner's), responses without any left out."""
    owners = sample.responses[chosen]
    size = int(sample.responses.max()) + 1
    counts = np.bincount(owners, minlength=size)
    present = counts > 0

    def mean(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return -np.bincount(owners, weights=values[chosen], minlength=size)[present] / counts[present]

    return mean(sample.rollout_log_probs), mean(sample.train_log_probs)


def write_mismatch_report(run_dir: str | Path, max_steps: int = 20) -> tuple[Path, list[str]]:
    """Draw and write everything.

    Returns:
        The page's path, and a sentence for each line of metrics.jsonl that is damaged and not drawn.

    Raises:
        FileNotFoundError, ValueError: as ``read_sample``; or config.yaml cannot be read.
        ValueError: the run was in bypass mode, where the learner's log-probs were not computed.
    """
    run_dir = Path(run_dir)
    check_run_directory(run_dir)
    if _was_bypass(run_dir):
        raise InputError(
            f"{run_dir} took the engine's log-probs as the learner's (rollout_correction.bypass_old_log_probs): there "
            "is nothing to compare"
        )
    sample = read_sample(run_dir, max_steps)
    target = run_dir / "report"
    target.mkdir(exist_ok=True)
    rows = mismatch_statistics(sample)
    write_text(target / "mismatch.json", json.dumps(rows, indent=1, ensure_ascii=False))
    metrics, problems = read_metrics_and_problems(run_dir / "metrics.jsonl")
    pictures = _draw(sample, rows, metrics, target)
    page = target / "mismatch.html"
    write_text(page, _page(run_dir.name, pictures, rows))
    return page, problems


def _was_bypass(run_dir: Path) -> bool:
    if not (run_dir / "config.yaml").exists():
        return False
    return stored_settings(run_dir).get("algorithm.rollout_correction.bypass_old_log_probs") is True


def _draw(
    sample: MismatchSample, rows: Sequence[dict[str, Any]], metrics: Sequence[dict[str, Any]], target: Path
) -> list[tuple[str, str]]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    pictures = []

    def save(canvas: Any, name: str, caption: str) -> None:
        canvas.tight_layout()
        canvas.savefig(target / f"{name}.png", dpi=110)
        plt.close(canvas)
        pictures.append((name, caption))

    shown = np.arange(len(sample))
    if len(shown) > _MAX_POINTS:
        shown = np.sort(np.random.default_rng(0).choice(len(sample), _MAX_POINTS, replace=False))
    first = sample.turns == 0
    halves = [("first turn", first, "tab:blue"), ("later turns", ~first, "tab:orange")]

    canvas, axes = plt.subplots(figsize=(7, 4))
    for label, half, colour in halves:
        points = shown[half[shown]]
        axes.scatter(
            np.exp(sample.rollout_log_probs[points]), sample.difference[points], s=3, alpha=0.3, color=colour,
            label=label, rasterized=True,
        )  # fmt: skip
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set(xlabel="rollout probability", ylabel="log π_train − log π_rollout", title="Difference over probability")
    axes.legend(markerscale=4)
    save(canvas, "mismatch_over_probability", "Difference of the log-probs of a token over its rollout probability.")

    for name, title, log_ppl in (
        ("mismatch_log_ppl", "Log-perplexity of a response", True),
        ("mismatch_probability", "Probability of a token", False),
    ):
        canvas, panels = plt.subplots(1, 2, figsize=(9, 4.4))
        for axes, (label, half, colour) in zip(panels, halves, strict=True):
            if log_ppl:
                x, y = log_perplexities(sample, half)
            else:
                points = shown[half[shown]]
                x, y = np.exp(sample.rollout_log_probs[points]), np.exp(sample.train_log_probs[points])
            axes.scatter(x, y, s=4, alpha=0.3, color=colour, rasterized=True)
            if len(x):
                ends = [min(x.min(), y.min()), max(x.max(), y.max())]
                axes.plot(ends, ends, color="black", linewidth=0.5)
                correlation = np.corrcoef(x, y)[0, 1] if len(x) > 1 and x.std() > 0 and y.std() > 0 else float("nan")
                label = f"{label}: mean |Δ| {np.abs(y - x).mean():.2g}, r {correlation:.6f}"
            axes.set(xlabel="rollout", ylabel="learner", title=label)
        canvas.suptitle(title)
        save(canvas, name, f"{title}: engine against learner, first turn and later turns.")

    canvas, panels = plt.subplots(1, 3, figsize=(12, 3.8))
    for axes, split in zip(panels, ("probability", "turn", "tool_calls"), strict=True):
        chosen = [row for row in rows if row["split"] == split]
        axes.bar([f"{row['category']}\n{row['tokens']}" for row in chosen], [r["mean_abs_difference"] for r in chosen])
        axes.set(xlabel=f"{split.replace('_', ' ')} (below: tokens)", ylabel="mean |d|")
    save(canvas, "mismatch_by_category", "Mean |d| by rollout probability, by turn and by the response's tool calls.")

    curves = [(name, title, log) for name, title, log in _CURVES if any(row.get(name) is not None for row in metrics)]
    if curves:
        canvas, panels = plt.subplots(2, 3, figsize=(12, 6), squeeze=False)
        for axes in panels.flat[len(curves) :]:
            axes.axis("off")
        for axes, (name, title, log_scale) in zip(panels.flat, curves, strict=False):
            points = [(row["step"], row[name]) for row in metrics if row.get(name) is not None]
            axes.plot(*zip(*points, strict=True))
            if log_scale and all(value > 0 for _, value in points):
                axes.set_yscale("log")
            axes.set(title=title, xlabel="step")
            axes.grid(alpha=0.3)
        save(canvas, "mismatch_over_steps", "The run over its steps.")
    return pictures


def _page(name: str, pictures: Sequence[tuple[str, str]], rows: Sequence[dict[str, Any]]) -> str:
    figures = "\n".join(
        f'<figure><img src="{picture}.png" alt=""><figcaption>{html.escape(caption)}</figcaption></figure>'
        for picture, caption in pictures
    )
    header = "".join(f"<th>{html.escape(column)}</th>" for column in rows[0])

    def cell(value: Any) -> str:
        return f"<td>{value:.4g}</td>" if isinstance(value, float) else f"<td>{html.escape(str(value))}</td>"

    body = "\n".join("<tr>" + "".join(map(cell, row.values())) + "</tr>" for row in rows if row["split"] != "step")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Mismatch of {html.escape(name)}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1100px; padding: 0 1rem; color: #222 }}
figure {{ margin: 1rem 0 }} img {{ max-width: 100%; border: 1px solid #ddd }}
td, th {{ padding: 0 1rem 0 0; text-align: left; font-variant-numeric: tabular-nums }}
</style></head><body>
<h1>Engine against learner: {html.escape(name)}</h1>
<p>d = log π_train − log π_rollout of a sampled token.</p>
{figures}
<table><tr>{header}</tr>
{body}
</table>
</body></html>
"""
