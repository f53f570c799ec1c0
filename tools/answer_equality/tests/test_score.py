import time

import pytest

from answer_equality.score import (
    canonical_answer,
    compute_score,
    extract_answer,
    final_assistant_turn,
    quick_verdict,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{1}, no: \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}} done", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed {3} \\fbox{4}", "4"),
        ("so \\boxed 5.", "5"),
        ("\\boxed12", "12"),
        ("\\boxed{3 + \\boxed{5}}", "5"),
        ("<answer>7</answer>", "7"),
        ("\\boxed{6} <answer>\\boxed{7}</answer>", "7"),
        ("<answer>7</answer> wait \\boxed{8}", "8"),
        ("Answer: $12$", "12"),
        ("**Final Answer:** 5", "5"),
        ("The answer is 5", None),
        ("\\boxed{1", None),
        ("\\boxed{}", None),
        ("", None),
        ("\\boxed{5} <tool_call>print('\\boxed{6}')</tool_call>", "5"),
        ("<code>\\boxed{6}</code>", None),
    ],
)
def test_extraction(text, answer):
    assert extract_answer(text) == answer


def test_only_the_final_turn_is_read():
    response = "\\boxed{1}<tool_call>x</tool_call><tool_response>\\boxed{2}</tool_response>\\boxed{3}"
    assert extract_answer(final_assistant_turn(response)) == "3"
    assert compute_score("", "\\boxed{2}</tool_response> I give up", "2")["score"] == -1.0
    assert compute_score("", "\\boxed{1}", "1", {"final_turn": "no"})["pred"] is None


@pytest.mark.parametrize(
    ("prediction", "truth", "verdict"),
    [
        ("42", "42", True),
        ("042", 42, True),
        ("41", "42", False),
        ("1,234,567", "1234567", True),
        ("$ 7 $", "7", True),
        ("x + 1", "x + 1", True),
        ("7", ["5", "7"], True),
        ("6", ["5", "7"], False),
        ("7", "\\boxed{7}", True),
        (None, "7", False),
        # Not plain: left to a reading of both.
        ("42.0", "42", None),
        ("1/2", "0.5", None),
        ("5x", "5", None),
        ("7", ["5", "\\sqrt{49}"], None),
        ("12,345", "12", None),
    ],
)
def test_quick_verdicts(prediction, truth, verdict):
    assert quick_verdict(prediction, truth) is verdict


@pytest.mark.parametrize(
    ("prediction", "truth", "expected"),
    [
        ("42.0", 42, True),
        ("\\frac{\\sqrt 2}{2}", "\\frac{1}{\\sqrt{2}}", True),
        ("7", ["5", "\\boxed{\\sqrt{49}}"], True),
        ("5 thousand", 5, False),
        ("x=3", "3", True),
        ("", "3", False),
        ("10^{10^{10}}", "5", False),
    ],
)
def test_scores(prediction, truth, expected):
    assert compute_score("", f"\\boxed{{{prediction}}}", truth)["acc"] == expected


def test_scores_are_plus_and_minus_one():
    assert compute_score("", "\\boxed{2}", "2") == {"score": 1.0, "acc": 1.0, "pred": "2"}
    assert compute_score("", "\\boxed{\\pi}", "3.14") == {"score": -1.0, "acc": 0.0, "pred": "\\pi"}


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 30000,
        "<answer>" * 30000,
        "<answer>" * 20000 + "</answer>" * 20000,
        "\n" * 300000,
        "answer " * 40000,
        "\\boxed{" + "{" * 200000,
        " " * 200000 + "answer" + " " * 200000,
        "answer:\n" * 40000,
        "\\boxed{" + "1" * 900 + "}",
        "\\boxed{" + "1," * 450 + "}",
        "\\boxed{" + "9 a" * 300 + "}",
    ],
    ids=range(11),
)
def test_the_quick_path_is_linear_in_hostile_text(text):
    started = time.process_time()
    prediction = extract_answer(final_assistant_turn(text))
    quick_verdict(prediction, "5")
    canonical_answer(prediction or "")
    assert time.process_time() - started < 1.0


def test_canonical_answers_count_equal_spellings_together():
    assert len({canonical_answer(a) for a in ("0.5", "1/2", "\\frac{1}{2}", "\\dfrac12", "$ .50 $")}) == 1
    assert canonical_answer("x + 1") == canonical_answer("x+1") != canonical_answer("x+2")
