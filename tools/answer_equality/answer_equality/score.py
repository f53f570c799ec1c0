"""Mathematical answers: +1 if the final answer is equivalent to the ground truth, -1 otherwise.

The answer is what the *last assistant turn* commits to: its last complete ``\\boxed{...}``, ``<answer>...</answer>``
or ``Answer: ...`` line, whichever comes last.  GSM8K asks for ``#### <number>``, so that counts for its rows.  Text in
tool calls, tool results and earlier turns never counts, nor does a bare number.

Equality is decided in two stages.  ``quick_verdict`` settles integers and identical text in microseconds, in whatever
process it is called.  What it cannot settle goes to ``answers.equality``: milliseconds, and under a second for any
input.  docs/grader.md says what counts as equal and why.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from answer_equality.equality import MAX_CHARACTERS, canonical, equivalent

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# \boxed 5: TeX takes what follows, and so does a reader.
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s+|(?=[\d-]))([+-]?[\w.,/]*\w)")
# Every pattern that sees a whole response runs in linear time: a response is text that a policy chose.
_ANSWER_LINE = re.compile(r"^[^\w\n]*(?:final )?answer[^\w\n:]*:[ \t]*(\S[^\n]*)$", re.IGNORECASE | re.MULTILINE)
_TOOL_CALL = re.compile(r"<(tool_call|code|python|search)>")
_HASHES = re.compile(r"#### *\$?(-?[\d.,]*\d)", re.ASCII)
_GROUPED = re.compile(r"-?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?", re.ASCII)
_HASHES_WITHIN = 300
_BOXES_TRIED = 50
_TURN_STARTS = ("<|im_start|>assistant", "</tool_response>", "</interpreter>", "</result>")
_INTEGER = re.compile(r"([+-]?)(\d{1,300}|[1-9]\d{0,2}(?:,\d{3}){1,90})\Z", re.ASCII)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score one solution.

    Args:
        data_source: whether it names GSM8K, whose answers stand behind ``####``.
        solution_str: the response; only its last assistant turn is read.
        ground_truth: the answer as text or number, or a list of accepted ones.
        extra_info: "final_turn" holds the last assistant turn where the caller knows it.

    Returns:
        {"score": 1.0 or -1.0, "acc": 1.0 or 0.0, "pred": the answer as given or None}.
    """
    prediction = _prediction(data_source, solution_str, extra_info or {})
    verdict = quick_verdict(prediction, ground_truth)
    if verdict is None:
        assert prediction is not None
        verdict = any(equivalent(prediction, truth) for truth in _accepted(ground_truth))
    return result(verdict, prediction)


def result(correct: bool, prediction: str | None) -> dict[str, Any]:
    """The dict that ``compute_score`` returns."""
    return {"score": 1.0 if correct else -1.0, "acc": float(correct), "pred": prediction}


def quick_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, Any] | None:
    """``compute_score`` where ``quick_verdict`` can decide, else None. Never takes long."""
    prediction = _prediction(data_source, solution_str, extra_info)
    verdict = quick_verdict(prediction, ground_truth)
    return None if verdict is None else result(verdict, prediction)


def _prediction(data_source: str, solution_str: str, extra_info: dict[str, Any]) -> str | None:
    final_turn = extra_info.get("final_turn")
    text = final_turn if isinstance(final_turn, str) else final_assistant_turn(solution_str)
    answer = extract_answer(text)
    return hash_answer(text) if answer is None and "gsm8k" in data_source.lower() else answer


def hash_answer(text: str) -> str | None:
    """The number behind the last ``####`` of the text's last 300 characters, as GSM8K writes an answer."""
    result = _HASHES.findall(text[-_HASHES_WITHIN:])
    if not result:
        return None
    return result[-1].replace(",", "") if _GROUPED.fullmatch(result[-1]) else result[-1]


def final_assistant_turn(solution: str) -> str:
    """What follows the last tool result or assistant header."""
    start = 0
    for marker in _TURN_STARTS:
        position = solution.rfind(marker)
        if position >= 0:
            start = max(start, position + len(marker))
    return solution[start:]


def extract_answer(text: str) -> str | None:
    """The last answer that ``text`` commits to, None if there is none (or its box is never closed).

    Tool calls are no answers: what follows the opening tag of one is not read.
    """
    call = _TOOL_CALL.search(text)
    if call is not None:
        text = text[: call.start()]
    result: list[tuple[int, str]] = []
    box = _last_box(text)
    if box is not None:
        result.append(box)
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start >= 0:
        content = text[start + len("<answer>") : end]
        inner = _last_box(content)
        result.append((end, content if inner is None else inner[1]))
    for match in _ANSWER_LINE.finditer(text):
        inner = _last_box(match[1])
        result.append((match.end(), match[1].strip("*$ \t\r") if inner is None else inner[1]))
    if not result:
        return None
    answer = max(result, key=lambda item: item[0])[1].strip()
    return answer or None


def _last_box(text: str) -> tuple[int, str] | None:
    """(end position, content) of the last balanced box."""
    end = len(text)
    for _ in range(_BOXES_TRIED):
        start = max(text.rfind("\\boxed", 0, end), text.rfind("\\fbox", 0, end))
        if start < 0:
            return None
        end = start
        match = _BOX.match(text, start)
        if match is None:
            bare = _BARE_BOX.match(text, start, start + MAX_CHARACTERS)
            if bare is not None:
                return bare.end(), bare[1]
            continue
        depth = 1
        for position in range(match.end(), min(len(text), match.end() + 2 * MAX_CHARACTERS)):
            character = text[position]
            if text[position - 1] == "\\" and character in "{}":
                continue
            depth += (character == "{") - (character == "}")
            if depth == 0:
                return position + 1, text[match.end() : position]
    return None


def _accepted(ground_truth: Any) -> list[str]:
    truths = ground_truth if isinstance(ground_truth, (list, tuple, set)) else [ground_truth]
    return [_strip_box(str(truth)) for truth in truths]


def _strip_box(truth: str) -> str:
    box = _last_box(truth)
    return truth if box is None else box[1]


def quick_verdict(prediction: str | None, ground_truth: Any) -> bool | None:
    """Are the two equal? None where only a reading of both can tell: they are neither integers nor the same text."""
    if prediction is None:
        return False
    undecided = False
    for truth in _accepted(ground_truth):
        if prediction.strip() == truth.strip():
            return bool(prediction.strip())
        integers = [_INTEGER.match(text.strip(" $\n")) for text in (prediction, truth)]
        if integers[0] is None or integers[1] is None:
            undecided = True
        elif _integer(integers[0]) == _integer(integers[1]):
            return True
        elif "," in prediction + truth:
            undecided = True
    return None if undecided else False


def _integer(match: re.Match[str]) -> int:
    return int(match[1] + match[2].replace(",", ""))


@functools.lru_cache(maxsize=4096)
def canonical_answer(text: str) -> str:
    """One spelling for answers that are plainly equal (0.5, 1/2 and \\frac12), to count votes by. Never takes long."""
    return canonical(text)
