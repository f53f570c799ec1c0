"""``answer-equality``: judges one pair of answers, or a file of responses.

answer-equality '\\frac{1}{2}' 0.5
answer-equality --responses answers.jsonl > scores.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from answer_equality.equality import equivalent
from answer_equality.score import compute_score


class BadRowError(ValueError):
    """A line of the file is not what it has to be."""


def scores(lines: Iterable[str], file: str) -> Iterator[dict[str, Any]]:
    """What ``compute_score`` says of each line.

    Args:
        lines: JSON objects with "response" (text), "ground_truth" (text, number or a list of these) and perhaps
            "data_source" (text). Empty lines are skipped.
        file: what a message calls the file.

    Raises:
        BadRowError: naming file and line.
    """
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise BadRowError(f"{file}, line {number}: not JSON: {error}") from None
            if not isinstance(row, dict) or not isinstance(row.get("response"), str) or "ground_truth" not in row:
                raise BadRowError(f'{file}, line {number}: needs "response" (a text) and "ground_truth"')
            yield compute_score(str(row.get("data_source", "")), row["response"], row["ground_truth"])


def main(arguments: list[str] | None = None) -> int:
    """0 where a pair is equal or a file was judged, 1 where the pair is not equal."""
    parser = argparse.ArgumentParser(prog="answer-equality", description="Whether mathematical answers are equal.")
    parser.add_argument("prediction", nargs="?", help="an answer, such as 0.5")
    parser.add_argument("truth", nargs="?", help="the answer that is right, such as \\frac{1}{2}")
    parser.add_argument(
        "--responses",
        type=Path,
        metavar="FILE",
        help='JSON lines with "response" and "ground_truth": prints a line with score, acc and pred for each',
    )
    given = parser.parse_args(arguments)
    if (given.responses is None) == (given.truth is None):
        parser.error("give a prediction and a truth, or --responses FILE")
    if given.responses is None:
        equal = equivalent(given.prediction, given.truth)
        print("equal" if equal else "not equal")
        return 0 if equal else 1
    try:
        with given.responses.open(encoding="utf-8") as lines:
            for score in scores(lines, str(given.responses)):
                print(json.dumps(score))
    except (BadRowError, OSError, UnicodeDecodeError) as error:
        print(f"answer-equality: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
