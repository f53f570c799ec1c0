"""Each validation problem over the steps: mean accuracy as a heat map, and as a table that names them all."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_retool.rewards.difficulty import Difficulty, difficulties
from megatron_retool.trajectory import accuracy_of
from run_files.atomic_files import write_text
from run_files.parquet_files import UnreadableFile, damage_named, read_parquet
from run_files.steps import step_path

TABLE = "validation_problems.csv"
MAX_MAPS = 6
"""Data sources with a heat map each; more share one."""
LABELLED_PROBLEMS = 60
"""Above it, rows have no name of their own in a heat map."""

_COLUMNS = ("group_id", "reward", "reward_info", "extra_info")
_OPTIONAL = ("segment",)
_MAX_TICKS = 20
_ROW_INCHES, _LEAST_INCHES, _MOST_INCHES = 0.16, 2.5, 14.0


@dataclass(frozen=True)
class ProblemAccuracy:
    """
    Attributes:
        source: data source.
        names: of the problems, as a person finds them again in the data; the easier come first, by what is known of
            their difficulty and then by their mean accuracy.
        groups: by difficulty; "" where nothing is known.
        steps: of the validations.
        accuracy: float64 [problems, steps]; nan where a step's file lacks the problem or cannot be read.
    """

    source: str
    names: Sequence[str]
    groups: Sequence[str]
    steps: Sequence[int]
    accuracy: npt.NDArray[np.float64]


def problem_accuracy(run_dir: Path, rows: Sequence[Mapping[str, Any]], problems: list[str]) -> list[ProblemAccuracy]:
    """Accuracy by problem and step, of each data source, from validation/ (only full validations).

    Args:
        rows: of metrics.jsonl; files of steps without a validation there are left over from before a resume.
        problems: gets a sentence for each file that is damaged; its step is left out.
    """
    steps = sorted({row["step"] for row in rows if any(name.startswith("val-core/") for name in row)})
    result: dict[tuple[str, str], dict[int, float]] = {}
    extra_info: dict[tuple[str, str], Mapping[str, Any]] = {}
    for step in steps:
        path = step_path(run_dir / "validation", step)
        try:
            validated = _read(path)
        except UnreadableFile as error:
            if path.exists():
                problems.append(str(error))
            continue
        for info, accuracy in validated:
            key = (str(info.get("data_source", "unknown")), str(info.get("uid", info.get("index"))))
            result.setdefault(key, {})[step] = accuracy
            extra_info.setdefault(key, info)
    known = dict(zip(result, difficulties([(key[0], extra_info[key]) for key in result]), strict=True))
    return [
        _of_source(source, steps, {key: result[key] for key in result if key[0] == source}, extra_info, known)
        for source in sorted({source for source, _ in result})
    ]


def draw_problems(
    run_dir: Path, rows: Sequence[Mapping[str, Any]], target: Path, problems: list[str]
) -> list[tuple[str, str]]:
    """Write a heat map for each data source and ``TABLE`` into ``target``; ``problems`` as in ``problem_accuracy``.

    Returns:
        (name of the picture without its ending, title); none where the run has no validation's file.
    """
    result = problem_accuracy(run_dir, rows, problems)
    if not result:
        return []
    write_text(target / TABLE, _table(result))
    maps = result if len(result) <= MAX_MAPS else [_together(result)]
    pictures = []
    for number, one in enumerate(maps):
        name = f"validation_problems_{number}" if len(maps) > 1 else "validation_problems"
        title = f"Accuracy by problem: {one.source}" if len(result) > 1 else "Accuracy by problem"
        _draw(one, title, target / f"{name}.png")
        pictures.append((name, title))
    return pictures


def _read(path: Path) -> list[tuple[Mapping[str, Any], float]]:
    """(extra_info, mean accuracy) of each problem in a validation's file."""
    import pyarrow.compute as pc

    table = read_parquet(path, _COLUMNS, _OPTIONAL)
    if "segment" in table.column_names:
        # The rows of a rollout share its reward: it counts once.
        table = table.filter(pc.equal(table["segment"], 0))
    accuracies: dict[int, list[float]] = {}
    infos: dict[int, Mapping[str, Any]] = {}
    with damage_named(path):
        for group, reward, reward_info, extra_info in zip(
            *(table.column(name).to_pylist() for name in _COLUMNS), strict=True
        ):
            accuracies.setdefault(group, []).append(accuracy_of(reward, json.loads(reward_info)))
            if group not in infos:
                infos[group] = json.loads(extra_info)
    return [(infos[group], float(np.mean(values))) for group, values in accuracies.items()]


def _of_source(
    source: str,
    steps: Sequence[int],
    found: Mapping[tuple[str, str], Mapping[int, float]],
    extra_info: Mapping[tuple[str, str], Mapping[str, Any]],
    known: Mapping[tuple[str, str], Difficulty | None],
) -> ProblemAccuracy:
    def order(key: tuple[str, str]) -> tuple[float, float]:
        difficulty = known[key]
        return (np.inf if difficulty is None else difficulty.order, -float(np.mean(list(found[key].values()))))

    keys = sorted(found, key=order)
    groups = [difficulty.group if (difficulty := known[key]) is not None else "" for key in keys]
    accuracy = np.array([[found[key].get(step, np.nan) for step in steps] for key in keys])
    return ProblemAccuracy(source, [_name(extra_info[key]) for key in keys], groups, steps, accuracy)


def _name(info: Mapping[str, Any]) -> str:
    """What the data call the problem: an id that is text, else its place in the file, else the run's own id."""
    for key, value in info.items():
        if key.lower() in ("id", "unique_id", "problem_id") and isinstance(value, str) and 0 < len(value) <= 32:
            return value
    return f"#{info['index']}" if "index" in info else str(info.get("uid", "?"))[:8]


def _together(found: Sequence[ProblemAccuracy]) -> ProblemAccuracy:
    """All data sources one below the other, each a group."""
    return ProblemAccuracy(
        "all",
        [name for one in found for name in one.names],
        [one.source for one in found for _ in one.names],
        found[0].steps,
        np.concatenate([one.accuracy for one in found]),
    )


def _table(found: Sequence[ProblemAccuracy]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["data_source", "problem", "difficulty", "mean", *(f"step {step}" for step in found[0].steps)])
    for one in found:
        for name, group, accuracy in zip(one.names, one.groups, one.accuracy, strict=True):
            cells = ["" if np.isnan(value) else f"{value:.4g}" for value in (np.nanmean(accuracy), *accuracy)]
            writer.writerow([one.source, name, group, *cells])
    return text.getvalue()


def _draw(one: ProblemAccuracy, title: str, path: Path) -> None:
    import matplotlib.pyplot as plt

    problems, steps = one.accuracy.shape
    height = min(max(_ROW_INCHES * problems, _LEAST_INCHES), _MOST_INCHES) + 1.0
    canvas, axes = plt.subplots(figsize=(7, height), dpi=110)
    colours = plt.get_cmap("viridis").with_extremes(bad="#cccccc")
    image = axes.imshow(one.accuracy, vmin=0, vmax=1, cmap=colours, aspect="auto", interpolation="nearest")
    every = -(-steps // _MAX_TICKS)
    axes.set_xticks(range(0, steps, every), [str(step) for step in one.steps[::every]])
    borders = [row for row in range(1, problems) if one.groups[row] != one.groups[row - 1]]
    edges = [0, *borders, problems]
    middles = {one.groups[first]: (first + end - 1) / 2 for first, end in pairwise(edges)} if borders else {}
    for border in borders:
        axes.axhline(border - 0.5, color="white", linewidth=1)
    if problems <= LABELLED_PROBLEMS:
        axes.set_yticks(range(problems), one.names, fontsize=7)
        for group, middle in middles.items():
            axes.text(steps - 0.4, middle, group, fontsize=7, rotation=270, va="center")
    elif middles:
        axes.set_yticks(list(middles.values()), list(middles), fontsize=7)
    else:
        axes.set_ylabel("problem")
    axes.set(title=title, xlabel="step")
    canvas.colorbar(image, ax=axes, label="mean accuracy", pad=0.06, aspect=4 * height)
    canvas.tight_layout()
    canvas.savefig(path)
    plt.close(canvas)
