"""verl's default rewards: each row's ``data_source`` chooses the grader, and the scores are verl's.

| data_source | the answer that is read | scores |
|---|---|---|
| openai/gsm8k | the last ``#### <number>`` near the end | 1, 0 |
| lighteval/MATH, DigitalLearningGmbH/MATH-lighteval, HuggingFaceH4/MATH-500, numina_* | ``\\boxed{}`` | 1, 0 |
| math, math_dapo, math_dapo_reasoning, aime* | ``Answer:`` or ``\\boxed{}`` | 1, -1 |
| hiyouga/geometry3k | ``\\boxed{}`` after ``<think>...</think>`` | 0.9 for the answer, 0.1 for the format |
| searchR1_* | ``<answer>...</answer>``, exact match of normalised text | 1, 0 |

Equality of mathematical answers is ``answers.equality``'s (docs/grader.md), which takes more spellings than verl's.
The table of sources follows verl's ``utils/reward_score/__init__.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from answer_equality import score
from megatron_retool.errors import InputError
from megatron_retool.rewards.deep_research import normalize_text

MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
NUMINA = tuple(
    f"numina_{name}" for name in ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
)
DAPO = ("math", "math_dapo", "math_dapo_reasoning")
SEARCH = tuple(
    f"searchR1_{name}" for name in ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
)
CODE = ("codecontests", "apps", "codeforces", "taco")
_MOST_ANSWER_TAGS = 10
_REASONING = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score one response as verl's default reward does.

    Args:
        data_source: names the grader.
        solution_str: the whole response; the last assistant turn is read.
        ground_truth: the answer, or a list of accepted ones; searchR1's is {"target": either}.
        extra_info: "final_turn" holds the last assistant turn where the caller knows it.

    Returns:
        {"score": float, "acc": 1.0 or 0.0, "pred": the answer as given or None}.

    Raises:
        ValueError: no grader is known for ``data_source``.
    """
    grader = grader_of(data_source)
    if grader is None:
        raise InputError(missing_grader(data_source))
    return grader(data_source, solution_str, ground_truth, extra_info)


def grader_of(data_source: str) -> Callable[..., dict[str, Any]] | None:
    """The grader of a data source's rows; None if there is none."""
    if data_source == "openai/gsm8k":
        return _gsm8k
    if data_source in MATH or data_source in NUMINA:
        return _one_or_zero
    if data_source in DAPO or data_source.startswith("aime"):
        return score.compute_score
    if data_source == "hiyouga/geometry3k":
        return _geometry
    return _search if data_source in SEARCH else None


def missing_grader(data_source: str) -> str:
    """What to do about a data source that has no grader."""
    what = "runs code against its tests, for which there is no grader here" if data_source in CODE else "has no grader"
    return (
        f"data_source={data_source[:200]!r} {what}: set reward.function to a function of your own "
        "(docs/extending.md), or to math if its answers stand in \\boxed{}"
    )


def _final_turn(solution: str, extra_info: dict[str, Any] | None) -> str:
    final_turn = (extra_info or {}).get("final_turn")
    return final_turn if isinstance(final_turn, str) else score.final_assistant_turn(solution)


def _gsm8k(data_source: str, solution: str, truth: Any, extra_info: dict[str, Any] | None) -> dict[str, Any]:
    prediction = score.hash_answer(_final_turn(solution, extra_info))
    right = prediction is not None and bool(score.quick_verdict(prediction, truth))
    return {"score": float(right), "acc": float(right), "pred": prediction}


def _one_or_zero(data_source: str, solution: str, truth: Any, extra_info: dict[str, Any] | None) -> dict[str, Any]:
    result = score.compute_score(data_source, solution, truth, extra_info)
    return {**result, "score": result["acc"]}


def _geometry(data_source: str, solution: str, truth: Any, extra_info: dict[str, Any] | None) -> dict[str, Any]:
    result = score.compute_score(data_source, solution, truth, extra_info)
    formatted = _REASONING.fullmatch(_final_turn(solution, extra_info)) is not None
    return {**result, "score": 0.9 * result["acc"] + 0.1 * formatted, "format": formatted}


def _search(data_source: str, solution: str, truth: Any, extra_info: dict[str, Any] | None) -> dict[str, Any]:
    text = _final_turn(solution, extra_info)
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start < 0:
        return {"score": 0.0, "acc": 0.0, "pred": None}
    prediction = text[start + len("<answer>") : end].strip()
    targets = truth.get("target") if isinstance(truth, dict) else truth
    accepted = targets if isinstance(targets, (list, tuple, set)) else [targets]
    right = any(normalize_text(prediction) == normalize_text(str(target)) for target in accepted)
    many = max(text.count("<answer>"), text.count("</answer>")) > _MOST_ANSWER_TAGS
    return {"score": (0.25 if many else 1.0) * right, "acc": float(right), "pred": prediction}
