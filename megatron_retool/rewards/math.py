"""Mathematical answers: +1 if the final answer is equivalent to the ground truth, -1 otherwise.

The answer is what the *last assistant turn* commits to: its last complete ``\\boxed{...}``, ``<answer>...</answer>``
or ``Answer: ...`` line, whichever comes last.  Text in tool calls, tool results and earlier turns never counts, nor
does a bare number.

Equality is decided in two stages.  ``quick_verdict`` settles integers, decimals, fractions and identical text exactly,
with the standard library alone, in microseconds.  What it cannot settle goes to math-verify (sympy), which may take
seconds on a hostile expression: call ``compute_score`` in a process that can be killed, as the reward manager does.
"""

from __future__ import annotations

import re
import threading
from fractions import Fraction
from typing import Any

_MAX_ANSWER_CHARACTERS = 1000
_MAX_NUMBER_CHARACTERS = 400
_SYMBOLIC_SECONDS = 3
_DECIMAL_PLACES = 6

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# Every pattern that sees a whole response runs in linear time: a response is text that a policy chose.
_ANSWER_LINE = re.compile(r"^[^\w\n]*(?:final )?answer[^\w\n:]*:[ \t]*(\S[^\n]*)$", re.IGNORECASE | re.MULTILINE)
_TOOL_CALL = re.compile(r"<(tool_call|code|python|search)>")
_BOXES_TRIED = 50
_TURN_STARTS = ("<|im_start|>assistant", "</tool_response>", "</interpreter>", "</result>")

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)"
_PLAIN_NUMBER = re.compile(rf"{_NUMBER}\Z")
_SLASH_FRACTION = re.compile(rf"({_NUMBER})/({_NUMBER})\Z")
_LATEX_FRACTION = re.compile(rf"([+-]?)\\[dt]?frac(?:\{{({_NUMBER})\}}|(\d))(?:\{{({_NUMBER})\}}|(\d))\Z")
_TWO_NUMBERS = re.compile(r"\d \d")
_THOUSANDS = re.compile(r"(?<![\d.])(\d{1,3}(?:(?:,|\{,\}|\\,|\\!,|,\\!)\d{3})+)(?![\d])")
_TEXT_UNIT = re.compile(r"(?<=[\d}\s)])\s*\\(?:text|mathrm|textrm|mbox|operatorname)\s*\{[^{}]*\}(?:\^\{?\d\}?)?\.?\Z")
# Letters right behind a number are a product of variables (2m, 2xyz) unless they can be nothing but a unit.
_WORD_UNIT = re.compile(
    r"(?<=\d)(?:\s+(?:[a-zA-Z]{3,}(?:\s+[a-zA-Z]+)*|[mgshL])|\s*(?:cm|mm|km|kg|mg|ml|ft|in|hr|min|mph|deg|USD))"
    r"(?:\^\{?\d\}?)?\.?\Z"
)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score one solution.

    Args:
        data_source: not used; part of the interface.
        solution_str: the response; only its last assistant turn is read.
        ground_truth: the answer as text or number, or a list of accepted ones.
        extra_info: "final_turn" holds the last assistant turn where the caller knows it.

    Returns:
        {"score": 1.0 or -1.0, "acc": 1.0 or 0.0, "pred": the answer as given or None}.

    Raises:
        TimeoutError: the symbolic comparison ran past its limit (and could be interrupted).
    """
    final_turn = (extra_info or {}).get("final_turn")
    prediction = extract_answer(final_turn if isinstance(final_turn, str) else final_assistant_turn(solution_str))
    verdict = quick_verdict(prediction, ground_truth)
    if verdict is None:
        assert prediction is not None
        verdict = any(_symbolically_equal(prediction, truth) for truth in _accepted(ground_truth))
    return result(verdict, prediction)


def result(correct: bool, prediction: str | None) -> dict[str, Any]:
    """The dict that ``compute_score`` returns."""
    return {"score": 1.0 if correct else -1.0, "acc": float(correct), "pred": prediction}


def quick_score(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, Any] | None:
    """``compute_score`` where the standard library alone can decide, else None. Never takes long."""
    final_turn = extra_info.get("final_turn")
    prediction = extract_answer(final_turn if isinstance(final_turn, str) else final_assistant_turn(solution_str))
    verdict = quick_verdict(prediction, ground_truth)
    return None if verdict is None else result(verdict, prediction)


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
    found: list[tuple[int, str]] = []
    box = _last_box(text)
    if box is not None:
        found.append(box)
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start >= 0:
        content = text[start + len("<answer>") : end]
        inner = _last_box(content)
        found.append((end, content if inner is None else inner[1]))
    for match in _ANSWER_LINE.finditer(text):
        inner = _last_box(match[1])
        found.append((match.end(), match[1].strip("*$ \t\r") if inner is None else inner[1]))
    if not found:
        return None
    answer = max(found, key=lambda item: item[0])[1].strip()
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
            continue
        depth = 1
        for position in range(match.end(), min(len(text), match.end() + 2 * _MAX_ANSWER_CHARACTERS)):
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
    """Are the two equal? None where only a symbolic comparison can tell.

    Numbers written as integers, decimals or fractions are compared exactly; where one is a decimal, to six places, so
    that 0.333333 stands for 1/3.
    """
    if prediction is None:
        return False
    undecided = False
    for truth in _accepted(ground_truth):
        verdict = _compare_plainly(prediction, truth)
        if verdict:
            return True
        undecided = undecided or verdict is None
    return None if undecided else False


def _compare_plainly(prediction: str, truth: str) -> bool | None:
    if prediction.strip() == truth.strip():
        return bool(prediction.strip())
    if len(prediction) > _MAX_ANSWER_CHARACTERS:
        return False
    predicted_text, true_text = normalize_answer(prediction), normalize_answer(truth)
    if not predicted_text:
        return False
    if predicted_text == true_text:
        return True
    predicted, true = _number(predicted_text), _number(true_text)
    if predicted is None or true is None:
        return None
    if _numbers_equal(predicted, true, decimal="." in predicted_text + true_text):
        return True
    # A percentage stands for its hundredth, and for itself where the truth is stated without the sign.
    percent = re.search(r"\\?%\s*\$?\Z", prediction.strip()) is not None
    if percent != (re.search(r"\\?%\s*\$?\Z", truth.strip()) is not None):
        scaled = (predicted / 100, true) if percent else (predicted, true / 100)
        return _numbers_equal(*scaled, decimal=True)
    return False


def _numbers_equal(left: Fraction, right: Fraction, decimal: bool) -> bool:
    if left == right:
        return True
    return decimal and abs(left - right) < Fraction(1, 2 * 10**_DECIMAL_PLACES)


def normalize_answer(text: str) -> str:
    """Remove what does not change the meaning: delimiters, spacing, thousands separators, units, a final dot."""
    text = text.strip().strip("$").strip()
    for opening, closing in (("\\(", "\\)"), ("\\[", "\\]")):
        if text.startswith(opening) and text.endswith(closing):
            text = text[2:-2].strip()
    text = text.replace("\\left", "").replace("\\right", "").replace("\\displaystyle", "").replace("−", "-")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = _THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[1]), text)
    for spacing in ("\\,", "\\!", "\\;", "\\:", "\\ ", "~"):
        text = text.replace(spacing, " ")
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|°|\\degree|\\?%|\\\$", "", text)
    text = _WORD_UNIT.sub("", _TEXT_UNIT.sub("", text.strip())).strip()
    wrapped = re.fullmatch(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}", text)
    if wrapped:
        text = wrapped[1]
    # "3 4" is not 34.
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r"(?<!\d) | (?!\d)", "", text)
    return text.rstrip(".") if not text.endswith("...") else text


def canonical_answer(text: str) -> str:
    """One spelling for answers that are plainly equal (0.5, 1/2 and \\frac12), to count votes by. Never takes long."""
    if len(text) > _MAX_ANSWER_CHARACTERS:
        return text
    normal = normalize_answer(text)
    number = _number(normal)
    return normal if number is None else str(number)


def _number(text: str) -> Fraction | None:
    if len(text) > _MAX_NUMBER_CHARACTERS:
        return None
    if _PLAIN_NUMBER.match(text):
        return Fraction(text)
    match = _SLASH_FRACTION.match(text)
    if match:
        numerator, denominator, sign = Fraction(match[1]), Fraction(match[2]), 1
    else:
        match = _LATEX_FRACTION.match(text)
        if not match:
            return None
        sign = -1 if match[1] == "-" else 1
        numerator, denominator = Fraction(match[2] or match[3]), Fraction(match[4] or match[5])
    return sign * numerator / denominator if denominator else None


def _symbolically_equal(prediction: str, truth: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException

    # math-verify bounds its time with SIGALRM, which Python delivers to the main thread alone.
    seconds = _SYMBOLIC_SECONDS if threading.current_thread() is threading.main_thread() else None
    extraction = [LatexExtractionConfig(boxed_match_priority=-1)]

    def parsed(answer: str) -> list[Any]:
        # Only a parse of the whole answer counts: looking for "an expression in the text" would find a 9 in 9**9.
        return parse(
            f"${_as_latex(answer)}$",
            extraction_config=extraction,
            fallback_mode="no_fallback",
            parsing_timeout=seconds,
            raise_on_error=True,
        )

    if _TWO_NUMBERS.search(normalize_answer(prediction)):
        # Would be read as a mixed number: "3 4" as 3 + 4.
        return False
    try:
        right = parsed(truth)
        left = parsed(prediction)
        if not left or not right:
            return normalize_answer(prediction) == normalize_answer(truth)
        return bool(verify(right, left, timeout_seconds=seconds, raise_on_error=True))
    except TimeoutException:
        raise TimeoutError(f"comparing {prediction!r:.80} with {truth!r:.80} took over {seconds} s") from None
    except (ValueError, TypeError, AttributeError, NotImplementedError, ArithmeticError, RecursionError):
        # sympy has no opinion on such a pair (a matrix with a set, say): not equivalent.
        return False


def _as_latex(answer: str) -> str:
    return answer.strip().strip("$").replace("**", "^").replace("*", " \\cdot ")
