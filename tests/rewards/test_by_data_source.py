"""The answers that verl's prompts ask for, graded as their data source says."""

from __future__ import annotations

import pytest

from answer_equality import score
from megatron_retool.config import ConfigError, RewardConfig
from megatron_retool.rewards import by_data_source
from megatron_retool.rewards.manager import check_data_sources


@pytest.mark.parametrize(
    ("source", "response", "truth", "score"),
    [
        ("openai/gsm8k", "48 + 24 = 72\n#### 72", "72", 1.0),
        ("openai/gsm8k", "#### 1,072", "1072", 1.0),
        ("openai/gsm8k", "#### 10,72", "1072", 0.0),
        ("openai/gsm8k", "#### 0,072", "72", 0.0),
        ("openai/gsm8k", "#### -3.50", "-3.50", 1.0),
        ("openai/gsm8k", "#### 72.", "72", 1.0),
        ("openai/gsm8k", "#### 71\n#### 72", "72", 1.0),
        ("openai/gsm8k", "#### 73", "72", 0.0),
        ("openai/gsm8k", "The answer is 72", "72", 0.0),
        ("openai/gsm8k", "#### 72" + " and on" * 60, "72", 0.0),
        ("lighteval/MATH", "So \\boxed{\\frac12}", "\\frac{1}{2}", 1.0),
        ("DigitalLearningGmbH/MATH-lighteval", "So \\boxed{3}", "4", 0.0),
        ("HuggingFaceH4/MATH-500", "So \\boxed{0.5}", "1/2", 1.0),
        ("numina_olympiads", "\\boxed{x+1}", "1+x", 1.0),
        ("numina_cn_k12", "no answer", "1", 0.0),
        ("math_dapo", "Answer: 34", "34", 1.0),
        ("math_dapo", "Answer: 35", "34", -1.0),
        ("aime_2024", "\\boxed{204}", "204", 1.0),
        ("hiyouga/geometry3k", "<think>so</think> \\boxed{3}", "3", 1.0),
        ("hiyouga/geometry3k", "\\boxed{3}", "3", 0.9),
        ("hiyouga/geometry3k", "<think>so</think> \\boxed{2}", "3", 0.1),
        ("searchR1_nq", "<answer> The Eiffel Tower. </answer>", {"target": ["eiffel tower"]}, 1.0),
        ("searchR1_hotpotqa", "<answer>Rome</answer>", {"target": "Paris"}, 0.0),
        ("searchR1_nq", "Paris", {"target": ["Paris"]}, 0.0),
        ("searchR1_nq", "<answer>Paris</answer>" * 11, {"target": ["Paris"]}, 0.25),
    ],
)
def test_scores(source, response, truth, score):
    found = by_data_source.compute_score(source, response, truth, {"final_turn": response})
    assert found["score"] == pytest.approx(score)
    assert found["acc"] == (1.0 if score in (1.0, 0.9, 0.25) else 0.0)


@pytest.mark.parametrize(("source", "words"), [("codeforces", "runs code"), ("my/own", "has no grader")])
def test_a_source_without_a_grader_is_refused(source, words):
    with pytest.raises(ValueError, match=words):
        by_data_source.compute_score(source, "\\boxed{1}", "1")
    with pytest.raises(ConfigError, match=f"{source}.*{words}"):
        check_data_sources(RewardConfig(function="by_data_source"), ["openai/gsm8k", source])
    check_data_sources(RewardConfig(), [source])


def test_the_mathematical_grader_reads_gsm8ks_answers_in_its_rows_only():
    assert score.compute_score("openai/gsm8k", "#### 72", "72")["score"] == 1.0
    assert score.quick_score("gsm8k", "#### 71", "72", {})["score"] == -1.0
    assert score.compute_score("openai/gsm8k", "#### 71 so \\boxed{72}", "72")["score"] == 1.0
    assert score.compute_score("aime", "#### 72", "72")["score"] == -1.0
