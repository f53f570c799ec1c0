import pytest

from answer_equality import compute_score
from megatron_retool.rewards.base import BadResultError, normalize_result, reward_functions


def test_results_are_normalised():
    assert normalize_result(1) == {"score": 1.0, "acc": 1.0, "pred": None}
    assert normalize_result(True)["score"] == 1.0
    assert normalize_result({"score": 0, "pred": 3, "k": "x"}) == {"score": 0.0, "acc": 0.0, "pred": "3", "k": "x"}
    for bad in ("1.0x", None, {}, {"score": "high"}, float("inf"), [1]):
        with pytest.raises(BadResultError):
            normalize_result(bad)


def test_functions_are_found_by_name():
    assert reward_functions.load("math") is compute_score
    assert reward_functions.load("answer_equality.score:compute_score") is compute_score
    with pytest.raises(ValueError, match="package.module:object"):
        reward_functions.load("maths")
