"""Two runs side by side: settings, curves, and the first place where they part, down to the token and its column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from run_files.parquet_files import UnreadableFile, check_lists, read_parquet
from run_files.steps import KEY_COLUMNS, RowKey, keys_of, step_path, stored_steps
from run_viewer.curves import Curves, first_shown, number_or_none, read_curves
from run_viewer.row_names import response_name
from run_viewer.runs_table import differing, settings_of

_PROMPT = "prompt_ids"
_TOKENS = ("response_ids", "loss_mask", "turn_ids", "weight_versions", "rollout_log_probs")
_RESPONSE = ("finish_reason", "reward")
_CLOCK = ("timing_s/", "timing_per_token_ms/", "perf/", "monitor/", "weight_sync/", "checkpoint/", "tool/seconds",
          "tool/sandbox", "rollout/cache_hit_rate", "rollout/cached_tokens")  # fmt: skip
"""How metrics begin that time and caches have a part in: no two runs have them alike."""


@dataclass(frozen=True)
class Difference:
    """The first place where two runs part.

    Attributes:
        kind: prompt, token, response (its end or reward, or one that the other run has not) or metric.
        index: of the response in its group (``response_name``).
        token: place in the prompt (kind prompt) or the response; None: of the whole response.
        a, b: the two values; None: the run has none there.
    """

    kind: str
    step: int
    group: int | None
    index: int | str | None
    token: int | None
    column: str
    a: Any
    b: Any

    def text(self) -> str:
        """The difference as a sentence: where, which column, and both values."""
        place = [f"step {self.step}"]
        if self.group is not None:
            place.append(f"group {self.group}, response {self.index}")
        if self.token is not None:
            place.append(f"token {self.token}" + (" of the prompt" if self.kind == "prompt" else ""))
        shown = ["nothing" if value is None else str(value) for value in (self.a, self.b)]
        return f"{', '.join(place)}: {self.column} is {shown[0]} and {shown[1]}"


def comparison(a: Path, b: Path) -> dict[str, Any]:
    """``/api/compare``: settings that differ, metrics of both, and the first difference.

    Raises:
        FileNotFoundError: one of them is no directory.
    """
    problems: list[str] = []
    settings = [settings_of(run_dir, problems) for run_dir in (a, b)]
    curves = [read_curves(run_dir) for run_dir in (a, b)]
    for result in curves:
        problems += result.problems
    first = first_difference(a, b, problems)
    return {
        "settings": [{"name": n, "a": settings[0].get(n), "b": settings[1].get(n)} for n in differing(settings)],
        "metrics": compare_metrics(curves[0], curves[1]),
        "first_difference": None if first is None else asdict(first) | {"text": first.text()},
        "problems": problems,
    }


def compare_metrics(a: Curves, b: Curves) -> list[dict[str, Any]]:
    """For each metric the last value of both runs, and over the steps that both have: the first at which they differ,
    and the largest distance with its step."""
    rows = []
    by_step = [dict(zip(curves.steps, curves.rows, strict=True)) for curves in (a, b)]
    common = sorted(by_step[0].keys() & by_step[1].keys())
    for name in sorted({*a.names, *b.names}):
        lasts = [next((v for v in reversed(curves.column(name)) if v is not None), None) for curves in (a, b)]
        pairs = [(step, number_or_none(by_step[0][step].get(name)), number_or_none(by_step[1][step].get(name)))
                 for step in common]  # fmt: skip
        apart = [(step, first, second) for step, first, second in pairs if first != second]
        distances = [(abs(x - y), step) for step, x, y in apart
                     if not isinstance(x, str | None) and not isinstance(y, str | None)]  # fmt: skip
        largest = max(distances, key=lambda pair: pair[0], default=(None, None))
        rows.append(
            {
                "name": name,
                "a": lasts[0],
                "b": lasts[1],
                "first_step_apart": apart[0][0] if apart else None,
                "largest_distance": largest[0],
                "largest_distance_step": largest[1],
                "clock": name.startswith(_CLOCK),
            }
        )
    return rows


def first_difference(a: Path, b: Path, problems: list[str]) -> Difference | None:
    """The first step, then response (by group and index), then token, then column in which the runs' files differ.

    Steps are those that both have stored; a step whose rollouts are equal is looked at for its metrics too, clocks left
    out. None: all that both have is equal.

    Args:
        problems: gets a sentence for each file that cannot be read; its step is left out.
    """
    steps = [set(stored_steps(run_dir / "rollouts")) for run_dir in (a, b)]
    curves = [read_curves(run_dir) for run_dir in (a, b)]
    rows = [dict(zip(result.steps, result.rows, strict=True)) for result in curves]
    only = sorted(steps[0] ^ steps[1])
    if only:
        problems.append(f"rollouts of {len(only)} steps are in only one of the runs, the first of them step {only[0]}")
    for step in sorted((steps[0] & steps[1]) | (rows[0].keys() & rows[1].keys())):
        result = None
        if step in steps[0] & steps[1]:
            try:
                result = _in_step(a, b, step, problems)
            except UnreadableFile as error:
                problems.append(f"{error}: step {step} is not compared")
        if result is None and step in rows[0] and step in rows[1]:
            result = _in_metrics(step, rows[0][step], rows[1][step])
        if result is not None:
            return result
    return None


def _in_step(a: Path, b: Path, step: int, problems: list[str]) -> Difference | None:
    folders = [run_dir / "rollouts" for run_dir in (a, b)]
    tables = [_Rows(step_path(folder, step), [_PROMPT, *_TOKENS, *_RESPONSE]) for folder in folders]
    learners: list[_Rows] | None = None
    paths = [step_path(folder, step, "learner") for folder in folders]
    try:
        learners = [_Rows(path) for path in paths] if all(path.is_file() for path in paths) else None
    except UnreadableFile as error:
        problems.append(str(error))
    for key in sorted({*tables[0].places, *tables[1].places}):
        name = (key[0], response_name(*key[1:]))
        has = [key in table.places for table in tables]
        if not all(has):
            return Difference("response", step, *name, None, "response", *("there" if h else None for h in has))
        result = _first_token(tables, [_PROMPT], key)
        if result is not None:
            return Difference("prompt", step, *name, *result)
        candidates = [_first_token(tables, _TOKENS, key)]
        if learners is not None and all(key in learner.places for learner in learners):
            shared = [column for column in learners[0].columns if column in learners[1].columns]
            candidates.append(_first_token(learners, shared, key))
        parted = [candidate for candidate in candidates if candidate is not None]
        if parted:
            return Difference("token", step, *name, *min(parted, key=lambda candidate: candidate[0]))
        for column in _RESPONSE:
            values = [table.value(column, key) for table in tables]
            if values[0] != values[1]:
                return Difference("response", step, *name, None, column, *values)
    return None


class _Rows:
    """Rows of a parquet file by key."""

    def __init__(self, path: Path, columns: list[str] | None = None) -> None:
        wanted = None if columns is None else ["group_id", "index", *columns]
        table: pa.Table = read_parquet(path, wanted, ["segment"])
        self.places = {key: row for row, key in enumerate(keys_of(table, path))}
        names = [name for name in table.column_names if name not in KEY_COLUMNS]
        check_lists(path, table, [name for name in names if name not in _RESPONSE])
        self.columns = {name: table[name].combine_chunks() for name in names}

    def value(self, name: str, key: RowKey) -> Any:
        return (
            number_or_none(value) if isinstance(value := self.columns[name][self.places[key]].as_py(), float) else value
        )

    def array(self, name: str, key: RowKey) -> np.ndarray[Any, np.dtype[Any]]:
        values: np.ndarray[Any, np.dtype[Any]] = self.columns[name][self.places[key]].values.to_numpy(
            zero_copy_only=False
        )
        return values


def _first_token(
    tables: list[_Rows], names: list[str] | tuple[str, ...], key: RowKey
) -> tuple[int, str, Any, Any] | None:
    """(token, column, a, b) of the first token that differs; of several columns there the first."""
    result: tuple[int, str, Any, Any] | None = None
    for name in names:
        x, y = (table.array(name, key) for table in tables)
        length = min(len(x), len(y))
        equal = x[:length] == y[:length]
        if x.dtype.kind == "f" and y.dtype.kind == "f":
            equal |= np.isnan(x[:length]) & np.isnan(y[:length])
        token = int(np.argmin(equal)) if not equal.all() else length
        if token < max(len(x), len(y)) and (result is None or token < result[0]):
            values = [array[token].item() if token < len(array) else None for array in (x, y)]
            result = (token, name, *(number_or_none(v) if isinstance(v, float) else v for v in values))  # type: ignore[assignment]
    return result


def _in_metrics(step: int, a: Mapping[str, Any], b: Mapping[str, Any]) -> Difference | None:
    for name in sorted(a.keys() | b.keys()):
        values = number_or_none(a.get(name)), number_or_none(b.get(name))
        if values[0] != values[1] and not name.startswith(_CLOCK):
            return Difference("metric", step, None, None, None, name, *values)
    return None


def print_comparison(a: Path, b: Path, console: Console) -> None:
    """On a terminal: the curves that a run's page opens with, and the first difference."""
    result = comparison(a, b)
    names = set(first_shown([metric["name"] for metric in result["metrics"]]))
    table = Table(title=f"curves of {b} and of {a}", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("metric", "last", "last of\nthe first", "apart\nfrom step", "largest\ndistance", "at\nstep"):
        table.add_column(heading, no_wrap=True)
    keys = ("b", "a", "first_step_apart", "largest_distance", "largest_distance_step")
    for metric in result["metrics"]:
        if metric["name"] in names and not metric["clock"]:
            table.add_row(metric["name"], *(_shown(metric[key]) for key in keys))
    # Where the terminal is too narrow it wraps whole lines: half a name could not be searched for or copied.
    needed = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    width, console.width = console.width, max(console.width, needed)
    console.print(table)
    console.width = width
    first = result["first_difference"]
    console.print(
        "first difference: " + ("none: all that both have stored is equal" if first is None else first["text"]),
        markup=False,
        highlight=False,
    )
    for problem in result["problems"]:
        console.print(problem, markup=False, highlight=False)


def _shown(value: float | int | str | None) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
