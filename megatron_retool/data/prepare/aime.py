"""Which problem of which AIME a row is: each year has two contests, I and II, of fifteen problems that get harder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PROBLEMS = 15
"""Of a contest."""
_URL = re.compile(r"(\d{4})_AIME_(II?)_Problems/Problem_(\d+)")
_ID = re.compile(r"(\d{4})-(II?)-(\d+)\Z")
_FILE = re.compile(r"aime[-_ ]?(\d{4})[-_ ]?(II?)(?![A-Za-z])", re.IGNORECASE)


@dataclass(frozen=True)
class AimeProblem:
    """Which problem of which contest."""

    year: int
    contest: str
    """I or II."""
    number: int
    """1 to 15."""

    @property
    def name(self) -> str:
        """Its usual name, such as 2024-II-4."""
        return f"{self.year}-{self.contest}-{self.number}"


def aime_problem(cells: Mapping[str, Any], file: str, row: int, year: int) -> AimeProblem | None:
    """The problem that a row is; None where the file does not tell.

    Read are, in this order: ``url`` of the problem's page, as HuggingFaceH4/aime_2024 and yentinglin/aime_2025 have it;
    ``id`` such as 2024-II-4 (Maxwell-Jia/AIME_2024); ``problem_idx`` from 1 to 30 (MathArena/aime_2025); the name of a
    file with one contest in order, such as aime2025-I.jsonl (opencompass/AIME2025).

    Args:
        cells: the row's url, id and problem_idx, where it has them.
        row: of the file.
        year: of the data set.
    """
    for pattern, name in ((_URL, "url"), (_ID, "id")):
        result = pattern.search(str(cells.get(name) or ""))
        if result and 1 <= int(result[3]) <= PROBLEMS:
            return AimeProblem(int(result[1]), result[2], int(result[3]))
    number = str(cells.get("problem_idx") or "")
    if number.isdecimal() and 1 <= int(number) <= 2 * PROBLEMS:
        second, place = divmod(int(number) - 1, PROBLEMS)
        return AimeProblem(year, "II" if second else "I", place + 1)
    result = _FILE.search(file)
    if result and row < PROBLEMS:
        return AimeProblem(int(result[1]), result[2].upper(), row + 1)
    return None
