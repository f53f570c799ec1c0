import pytest

from megatron_retool.rewards.deep_research import (
    compute_score,
    compute_score_hermes,
    format_error,
    normalize_text,
    token_f1,
)

SEARCHED = "<think>who</think><search>tower</search><result>Paris <b>x</b></result>"
COMPUTED = "<think>how</think><python>print(1)</python><result>1</result>"


def answer(text):
    return f"<think>so</think><answer>The answer is \\boxed{{{text}}}</answer>"


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        (SEARCHED + answer("Paris"), "paris", 1.0),
        (SEARCHED + COMPUTED + answer("the Paris."), "Paris", 1.1),
        (SEARCHED + COMPUTED + answer("Rome"), "Paris", 0.0),
        (answer("Paris in France"), ["London", "Paris, France"], 2 * 2 / 5),
        (SEARCHED + COMPUTED + answer("Paris in France"), {"target": ["Paris, France"]}, 0.8 + 0.1),
        (answer("no"), "no way", 0.0),
        (answer("yes"), "Yes", 1.0),
        ("\\boxed{Paris}", "Paris", -1.0),
    ],
)
def test_scores(response, truth, score):
    assert compute_score("", response, truth)["score"] == pytest.approx(score)


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        (SEARCHED + answer("x"), None),
        (answer("x").replace("</think>", ""), "<answer> inside <think>"),
        ("<think>a</think>" + answer("x").replace("</answer>", ""), "<answer> is not closed"),
        ("<search>q</search>" + answer("x"), "<search> has no <result>"),
        ("<result>r</result>" + answer("x"), "<result> without a tool call"),
        ("<answer>\\boxed{x}</answer>", "no <think>"),
        (answer("x") + answer("y"), "2 <answer> blocks"),
        ("<think>a</think><answer>x</answer>", "no \\boxed"),
        ("</think>" + answer("x"), "</think> closes nothing"),
        ("<think>a</think><search>q</search>", "<search> has no <result>"),
        ("<think>a</think>", "0 <answer> blocks"),
    ],
)
def test_format(response, problem):
    error = format_error(response)
    assert error is None if problem is None else problem in error


def test_result_says_why():
    info = compute_score("", SEARCHED + COMPUTED + answer("The Paris"), "paris")
    assert info == {"score": 1.1, "acc": 1.0, "pred": "paris", "f1": 1.0, "reason": "correct, both tools"}
    assert compute_score("", "", "x")["reason"] == "format: no <think>"


@pytest.mark.parametrize(
    ("final_turn", "calls", "finish", "score"),
    [
        ("It is \\boxed{Paris}.", [], "stop", 1.0),
        ("It is \\boxed{Paris}.", [("search", "ok")], "stop", 1.0),
        ("It is \\boxed{Paris}.", [("search", "ok"), ("code_interpreter", "error")], "stop", 1.1),
        ("It is \\boxed{Rome}.", [("search", "ok"), ("code_interpreter", "ok")], "stop", 0.0),
        ("It is \\boxed{Paris}.", [("", "parse_error"), ("search", "ok")], "stop", -1.0),
        ("It is Paris.", [("search", "ok")], "stop", -1.0),
        ("It is \\boxed{Paris}", [("search", "ok")], "length", -1.0),
        ("\\boxed{Paris}<tool_call>{}</tool_call>", [("search", "ok")], "tool_limit", -1.0),
    ],
)
def test_scores_of_responses_whose_calls_are_turns(final_turn, calls, finish, score):
    extra = {
        "final_turn": final_turn,
        "tool_calls": [{"name": name, "status": status} for name, status in calls],
        "finish_reason": finish,
    }
    assert compute_score_hermes("", "not read", "paris", extra)["score"] == pytest.approx(score)


def test_f1_and_normalisation():
    assert normalize_text("The  Cat, a DOG!") == "cat dog"
    assert token_f1("b c", "b c d") == pytest.approx(2 * 2 / 5)
    assert token_f1("x x y", "x y y") == pytest.approx(2 * 2 / 6)
    assert token_f1("", "") == 0.0
