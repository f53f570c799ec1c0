"""Equality of answers: this project's grader against math-verify alone, on labelled pairs.

    python benchmarks/grader.py [--table tools/answer_equality/tests/equal_answers.txt] [--limit 400]

Prints for both: share judged right, false positives, false negatives, median and worst milliseconds of a pair. The
table has a truth a line, behind it " ;; =equal" and " ;; !unequal" predictions. math-verify is given both sides in a
box, with its defaults otherwise; what it raises counts as unequal.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path

Pair = tuple[str, str, bool]


def labelled_pairs(table: Path) -> list[Pair]:
    """(prediction, truth, equal) of the table."""
    result = []
    for line in table.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            truth, *predictions = line.split(" ;; ")
            result += [(each[1:].strip(), truth.strip(), each[0] == "=") for each in predictions]
    return result


def by_math_verify(prediction: str, truth: str) -> bool:
    from math_verify import parse, verify

    try:
        return bool(verify(parse(f"\\boxed{{{truth}}}"), parse(f"\\boxed{{{prediction}}}")))
    except Exception:
        return False


def measure(name: str, judge: Callable[[str, str], bool], pairs: list[Pair]) -> None:
    """Print one row."""
    judge("1", "2")
    right, false_positives, false_negatives, milliseconds = 0, 0, 0, []
    for prediction, truth, equal in pairs:
        started = time.perf_counter()
        verdict = judge(prediction, truth)
        milliseconds.append(1000 * (time.perf_counter() - started))
        right += verdict == equal
        false_positives += verdict and not equal
        false_negatives += equal and not verdict
    print(
        f"{name:12} {100 * right / len(pairs):6.2f} % right {false_positives:5} false positives "
        f"{false_negatives:5} false negatives {statistics.median(milliseconds):8.2f} ms median "
        f"{max(milliseconds):8.1f} ms worst"
    )


def main() -> None:
    from answer_equality.equality import equivalent

    default = Path(__file__).resolve().parents[1] / "tests" / "rewards" / "equal_answers.txt"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=default)
    parser.add_argument("--limit", type=int, default=None, help="judge so many pairs, evenly spread, instead of all")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    pairs = labelled_pairs(args.table)
    pairs = pairs[:: max(1, len(pairs) // args.limit)] if args.limit else pairs
    print(f"{len(pairs)} pairs")
    measure("this grader", equivalent, pairs)
    measure("math-verify", by_math_verify, pairs)


if __name__ == "__main__":
    main()
