"""How difficult a problem is said to be, from what its row carries, and accuracy by it.

A level or difficulty in extra_info (in any capitals) counts as it stands. AIME says none: its problems are numbered
from 1, the easiest, to 15, and the number takes its place, in the groups 1-5, 6-10 and 11-15. It is read from a column
of that name ("Problem Number"), an id such as 2024-II-4, or the address of the problem's page; else from the row's
place in a file of one contest (15 rows) or of the two of a year (30).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_retool.rewards.evaluation import EvaluationRecord
from megatron_retool.trajectory import Trajectory

MAX_GROUPS = 10
"""Groups of a data source, and so metrics; more different numbers are put into three ranges."""

_KEYS = ("level", "difficulty")
_WORDS = ("easy", "medium", "hard")
_PROBLEMS = 15
_NUMBER_COLUMN = re.compile(r"problem[ _]?(number|num|no|idx|index)")
_NUMBER_IN_ID = re.compile(r"(?:19|20)\d\d[-_ ](?:I{1,2}[-_ ])?(\d{1,2})")
_NUMBER_IN_ADDRESS = re.compile(r"/Problem_(\d{1,2})\b")


@dataclass(frozen=True)
class Difficulty:
    """
    Attributes:
        order: compares problems of one data source; the greater, the more difficult as far as its data say.
        group: a word for metrics and pictures, such as level_5 or problems_11-15.
    """

    order: float
    group: str


def difficulties(problems: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Difficulty | None]:
    """The difficulty of each problem, None where nothing tells.

    Args:
        problems: data source and extra_info of all problems: the groups of a source depend on all that it has.
    """
    result: list[Difficulty | None] = [None] * len(problems)
    for source in {name for name, _ in problems}:
        places = [place for place, (name, _) in enumerate(problems) if name == source]
        for place, difficulty in zip(places, _of_source(source, [problems[place][1] for place in places]), strict=True):
            result[place] = difficulty
    return result


def problem_number(source: str, extra_info: Mapping[str, Any]) -> int | None:
    """The number of a problem of AIME in its contest, 1 to 15; None for other sources, and where nothing tells."""
    if "aime" not in source.lower():
        return None
    candidates: list[Any] = [value for key, value in extra_info.items() if _NUMBER_COLUMN.fullmatch(key.lower())]
    texts = [value for value in extra_info.values() if isinstance(value, str)]
    candidates += [match[1] for text in texts if (match := _NUMBER_IN_ID.fullmatch(text.strip()))]
    candidates += [match[1] for text in texts if (match := _NUMBER_IN_ADDRESS.search(text))]
    for candidate in candidates:
        if re.fullmatch(r"\d{1,2}", str(candidate)) and 1 <= int(candidate) <= _PROBLEMS:
            return int(candidate)
    index = extra_info.get("index")
    if isinstance(index, int) and not isinstance(index, bool) and 0 <= index < 2 * _PROBLEMS:
        return index % _PROBLEMS + 1
    return None


def difficulty_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """val-aux/<data_source>/acc/<group>/mean@n of sources with two groups or more: mean over a group's prompts of the
    mean over their n samples."""
    samples: dict[tuple[str, Any], list[float]] = {}
    extra_info: dict[tuple[str, Any], Mapping[str, Any]] = {}
    for trajectory in trajectories:
        record = EvaluationRecord.from_trajectory(trajectory)
        samples.setdefault((record.data_source, record.prompt), []).append(record.accuracy)
        extra_info.setdefault((record.data_source, record.prompt), trajectory.extra_info)
    known = difficulties([(source, info) for (source, _), info in extra_info.items()])
    groups: dict[str, dict[str, list[float]]] = {}
    for ((source, _), accuracies), difficulty in zip(samples.items(), known, strict=True):
        if difficulty is not None:
            # Sorted: a sum of floats depends on its order, and responses come in any.
            groups.setdefault(source, {}).setdefault(difficulty.group, []).append(float(np.mean(sorted(accuracies))))
    most = {source: max(len(each) for (name, _), each in samples.items() if name == source) for source in groups}
    return {
        f"val-aux/{source}/acc/{group}/mean@{most[source]}": float(np.mean(sorted(means)))
        for source, result in groups.items()
        if len(result) > 1
        for group, means in sorted(result.items())
    }


def _of_source(source: str, rows: Sequence[Mapping[str, Any]]) -> list[Difficulty | None]:
    stated = [_stated(row) for row in rows]
    if any(each is not None for each in stated):
        return _grouped(stated)
    numbers = [problem_number(source, row) for row in rows]
    return [None if number is None else Difficulty(number, _thirds_of_contest(number)) for number in numbers]


def _thirds_of_contest(number: int) -> str:
    first = (number - 1) // 5 * 5 + 1
    return f"problems_{first}-{first + 4}"


def _stated(row: Mapping[str, Any]) -> tuple[str, float | str] | None:
    """(key, number or text) of the row's level or difficulty."""
    for wanted in _KEYS:
        for key, value in row.items():
            if key.lower() != wanted or isinstance(value, bool) or not isinstance(value, (int, float, str)):
                continue
            text = str(value).strip().lower().removeprefix(wanted).strip()
            try:
                number = float(text)
            except ValueError:
                return (wanted, text) if text else None
            return (wanted, number) if math.isfinite(number) else None
    return None


def _grouped(stated: Sequence[tuple[str, float | str] | None]) -> list[Difficulty | None]:
    values = [each for each in stated if each is not None]
    numbers = [value for _, value in values if isinstance(value, float)]
    texts = sorted({value for _, value in values if isinstance(value, str)}, key=_rank)
    many = len(set(values)) > MAX_GROUPS
    bounds = np.quantile(numbers, [0, 1 / 3, 2 / 3, 1]) if many and numbers else np.zeros(0)

    def difficulty(key: str, value: float | str) -> Difficulty:
        if isinstance(value, str):
            # Behind all numbers: what is not one is no level that they could be compared with.
            return Difficulty(1e12 + texts.index(value), f"{key}_{'other' if many else _word(value)}")
        if not many:
            return Difficulty(value, f"{key}_{value:g}")
        part = int(np.searchsorted(bounds[1:-1], value))
        return Difficulty(value, f"{key}_{bounds[part]:.3g}-{bounds[part + 1]:.3g}")

    return [None if each is None else difficulty(*each) for each in stated]


def _rank(text: str) -> tuple[int, str]:
    return (_WORDS.index(text) if text in _WORDS else len(_WORDS), text)


def _word(text: str) -> str:
    """``text`` as a part of a metric's name."""
    return re.sub(r"[^\w.+-]+", "_", text)[:32]
