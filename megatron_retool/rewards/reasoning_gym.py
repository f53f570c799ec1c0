"""Rewards of reasoning-gym's procedural tasks, by each task's own verifier (https://pypi.org/project/reasoning-gym)."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from answer_equality.score import extract_answer, final_assistant_turn


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score one response with the verifier of its task.

    Args:
        data_source: "reasoning_gym/<task>" unless ``extra_info`` names the task.
        ground_truth: the entry's reference answer.
        extra_info: "task" (the data set's registered name) and "metadata" (the entry's, as a dict or as JSON), as
            reasoning-gym made them.

    Returns:
        {"score": the verifier's, in [0, 1], "acc": 1.0 where it is 1, "pred": the answer}.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: the task is not known to reasoning-gym.
    """
    info = extra_info or {}
    final_turn = info.get("final_turn")
    answer = extract_answer(final_turn if isinstance(final_turn, str) else final_assistant_turn(solution_str))
    task = info.get("task") or data_source.removeprefix("reasoning_gym/")
    metadata = info.get("metadata") or {}
    if isinstance(metadata, str):
        metadata = json.loads(metadata)
    entry = {"answer": ground_truth, "question": info.get("question", ""), "metadata": metadata}
    verify = _verifier(str(task))
    try:
        score = float(verify(answer=answer, entry=entry))
    except ValueError:  # prime_factorization's verifier, for one, calls int() on whatever the answer is
        score = 0.0
    return {"score": score, "acc": float(score >= 1.0), "pred": answer}


@cache
def _verifier(task: str) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(
            "reward.function=reasoning_gym needs the package reasoning-gym: pip install reasoning-gym"
        ) from error
    return reasoning_gym.get_score_answer_fn(task)
