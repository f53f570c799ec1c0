"""Metrics of a run over its steps, and what is good and bad of each."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from run_files import METRICS_FILE, check_run_directory
from run_files.metrics import read_metrics_and_problems
from run_viewer.json_numbers import number_for_json
from run_viewer.metric_captions import GLOSSARY, caption_of

FIRST_SHOWN = (
    "val-core/all/acc/mean@", "rollout/acc/mean", "tool/use_rate", "tool/success_rate", "response_length/mean",
    "actor/entropy", "actor/grad_norm", "actor/pg_clipfrac", "rollout_corr/log_prob_abs_diff", "rollout_corr/k3_kl",
    "rollout_corr/masked_fraction", "timing_s/step",
)  # fmt: skip
"""Names, or how they begin, of the curves that a run's page opens with."""


@dataclass(frozen=True)
class Curves:
    """The rows of a metrics.jsonl that have a step, in the file's order.

    Attributes:
        steps: of each row.
        problems: sentences about lines that could not be used.
    """

    steps: Sequence[int]
    rows: Sequence[Mapping[str, Any]]
    problems: Sequence[str]

    @property
    def names(self) -> list[str]:
        """Of every number but the step, sorted."""
        return sorted({name for row in self.rows for name, value in row.items() if is_number(value)} - {"step"})

    def column(self, name: str) -> list[float | int | str | None]:
        """A value for each row; None where it has none; see ``number_for_json``."""
        return [number_or_none(row.get(name)) for row in self.rows]


def read_curves(run_dir: Path) -> Curves:
    """A run's curves, read again only where the file has changed; none where there is no file.

    Raises:
        FileNotFoundError: there is no such directory.
    """
    check_run_directory(run_dir)
    path = run_dir / METRICS_FILE
    if not path.is_file():
        return Curves([], [], [f"{path} is not there: the run has not finished a step"])
    about = path.stat()
    return _read(path, about.st_mtime_ns, about.st_size)


@functools.lru_cache(maxsize=64)
def _read(path: Path, _changed: int, _size: int) -> Curves:
    rows, problems = read_metrics_and_problems(path)
    return Curves([row["step"] for row in rows], rows, problems)


def curves_page(run_dir: Path, names: Sequence[str] = ()) -> dict[str, Any]:
    """Columns of the metrics ``names``, or those that a run's page opens with; null where a step has none.

    ``names`` in the answer are all that the run has, ``opening`` those that its page opens with. Captions are
    the words of docs/metrics.md.

    Raises:
        FileNotFoundError: there is no such directory.
    """
    curves = read_curves(run_dir)
    every, problems = curves.names, list(curves.problems)
    opening = first_shown(every)
    if not names:
        names = opening
    present = set(every)
    problems += [f"{METRICS_FILE} has no {name}" for name in names if name not in present]
    wanted = [name for name in names if name in present]
    captions = {name: asdict(caption) for name in wanted if (caption := caption_of(name)) is not None}
    if wanted and not GLOSSARY.is_file():
        problems.append(f"{GLOSSARY} is not there: metrics have no captions")
    return {
        "steps": list(curves.steps),
        "metrics": {name: curves.column(name) for name in wanted},
        "names": every,
        "opening": opening,
        "captions": captions,
        "problems": problems,
    }


def is_number(value: object) -> bool:
    """Whether ``value`` is a number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def number_or_none(value: object) -> float | int | str | None:
    """``number_for_json`` of what a row may hold: None of whatever is no number."""
    return number_for_json(value) if is_number(value) else None


def first_shown(every: Sequence[str]) -> list[str]:
    """Of the metrics ``every`` those that a run's page opens with, in that order."""
    return [
        name
        for first in FIRST_SHOWN
        for name in every
        if name == first or (first.endswith("@") and name.startswith(first))
    ]
