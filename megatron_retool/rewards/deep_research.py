"""Reward for question answering with search and code (ARPO, arXiv:2507.19849, eq. 3).

-1 for a malformed response; otherwise the token F1 between the boxed answer and the best ground truth, plus 0.1 where
the answer is at all right and the response used both tools.

The format (``compute_score``, for rollout.multi_turn.format=arpo): one or more ``<think>`` blocks, every tag closed and
not nested in its own kind, every ``<search>`` and ``<python>`` call followed by its ``<result>``, and one ``<answer>``
holding a ``\\boxed{...}``. Where calls are turns of a chat (``compute_score_hermes``): every call could be read, the
response ended by itself, and its last turn holds a ``\\boxed{...}``.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

from answer_equality.score import extract_answer

BOTH_TOOLS_BONUS = 0.1
_TAG = re.compile(r"<(/?)(think|search|python|result|answer)>")
_TOOLS = {"search", "code_interpreter"}
_CLOSED_ANSWERS = ("yes", "no", "noanswer")


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score one response.

    Args:
        solution_str: the whole response with its tags.
        ground_truth: the answer, or a list of accepted ones, or {"target": either}.

    Returns:
        {"score": float, "acc": 1.0 where F1 is 1, "pred": answer, "f1": float, "reason": str}.
    """
    problem = format_error(solution_str)
    if problem is not None:
        return _malformed(problem)
    answer = extract_answer(solution_str[solution_str.rindex("<answer>") :])
    if answer is None:
        return _malformed("empty answer")
    return _score(answer, ground_truth, "</search>" in solution_str and "</python>" in solution_str)


def compute_score_hermes(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """``compute_score`` for rollout.multi_turn.format=hermes, from what the rollout knows of the response.

    Args:
        extra_info: with final_turn, finish_reason and tool_calls, as the reward manager gives them.
    """
    calls = extra_info["tool_calls"]
    if any(call["status"] == "parse_error" for call in calls):
        return _malformed("a tool call could not be read")
    if extra_info["finish_reason"] != "stop":
        return _malformed(f"the response ended by {extra_info['finish_reason']}")
    answer = extract_answer(extra_info["final_turn"])
    if answer is None:
        return _malformed("no \\boxed in the last turn")
    return _score(answer, ground_truth, {call["name"] for call in calls} >= _TOOLS)


def _malformed(problem: str) -> dict[str, Any]:
    return {"score": -1.0, "acc": 0.0, "pred": None, "f1": 0.0, "reason": f"format: {problem}"}


def _score(answer: str, ground_truth: Any, both_tools: bool) -> dict[str, Any]:
    truths = ground_truth.get("target") if isinstance(ground_truth, dict) else ground_truth
    accepted = truths if isinstance(truths, (list, tuple, set)) else [truths]
    f1 = max((token_f1(answer, str(truth)) for truth in accepted), default=0.0)
    bonus = BOTH_TOOLS_BONUS if f1 > 0 and both_tools else 0.0
    reason = "correct, both tools" if bonus else ("correct" if f1 > 0 else "wrong")
    return {"score": f1 + bonus, "acc": float(f1 == 1.0), "pred": normalize_text(answer), "f1": f1, "reason": reason}


def format_error(response: str) -> str | None:
    """What is wrong with the response's tags, None if nothing is."""
    open_tags: list[str] = []
    waiting_for_result: str | None = None
    counts: Counter[str] = Counter()
    for match in _TAG.finditer(response):
        closing, tag = bool(match[1]), match[2]
        if closing:
            if not open_tags or open_tags[-1] != tag:
                return f"</{tag}> closes nothing"
            open_tags.pop()
            if tag in ("search", "python"):
                waiting_for_result = tag
            continue
        if tag == "result":
            if waiting_for_result is None:
                return "<result> without a tool call"
            waiting_for_result = None
        elif waiting_for_result is not None:
            return f"<{waiting_for_result}> has no <result>"
        if open_tags and tag != "result":
            return f"<{tag}> inside <{open_tags[-1]}>"
        counts[tag] += 1
        open_tags.append(tag)
    if open_tags:
        return f"<{open_tags[-1]}> is not closed"
    if waiting_for_result is not None:
        return f"<{waiting_for_result}> has no <result>"
    if not counts["think"]:
        return "no <think>"
    if counts["answer"] != 1:
        return f"{counts['answer']} <answer> blocks instead of one"
    answer = response[response.index("<answer>") : response.index("</answer>")]
    return None if "\\boxed" in answer else "no \\boxed in <answer>"


def normalize_text(text: str) -> str:
    """Lower case, without punctuation, articles and repeated spaces (SQuAD's normalisation)."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def token_f1(prediction: str, truth: str) -> float:
    """F1 over the multisets of normalised words; yes, no and noanswer count as a whole."""
    left, right = normalize_text(prediction), normalize_text(truth)
    if left != right and (left in _CLOSED_ANSWERS or right in _CLOSED_ANSWERS):
        return 0.0
    if left == right:
        return 1.0 if left else 0.0
    left_words, right_words = left.split(), right.split()
    common = sum((Counter(left_words) & Counter(right_words)).values())
    return 2.0 * common / (len(left_words) + len(right_words)) if common else 0.0
