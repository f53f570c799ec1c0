from itertools import combinations, product
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_retool.rewards.evaluation import EvaluationRecord, _draws_of, evaluation_metrics, pass_at_k, sample_sizes
from megatron_retool.trajectory import FinishReason, Trajectory


def record(prompt, accuracy, prediction="0", source="aime_2025", turns=4):
    return EvaluationRecord(source, prompt, accuracy, 2 * accuracy - 1, prediction, turns)


def records(matrix, predictions=None):
    return [
        record(p, float(a), None if predictions is None else predictions[p][i])
        for p, row in enumerate(matrix)
        for i, a in enumerate(row)
    ]


def test_names_are_those_of_the_dashboards():
    metrics = evaluation_metrics(records(np.eye(30)[:4], [["7"] * 30] * 4))
    prefix = "val-core/aime_2025/acc/"
    for name in ("mean@30", "best@30/mean", "best@30/std", "maj@30/mean", "maj@30/std", "worst@30/mean"):
        assert prefix + name in metrics
    for k in (2, 4, 8, 16, 30):
        assert f"{prefix}best@{k}/mean" in metrics and f"{prefix}pass@{k}" in metrics
    assert "val-aux/aime_2025/reward/worst@16/std" in metrics
    assert {name for name in metrics if "num_turns" in name} == {
        "val-aux/num_turns/mean",
        "val-aux/num_turns/max",
        "val-aux/num_turns/min",
    }
    assert metrics[prefix + "mean@30"] == pytest.approx(1 / 30)
    assert all(type(value) is float for value in metrics.values())


def test_what_else_a_reward_function_returned_is_averaged_by_data_source():
    rows = [
        EvaluationRecord("qa", 0, 1.0, 1.0, None, 1, {"f1": 0.5}),
        EvaluationRecord("qa", 0, 1.0, 1.0, None, 1, {"f1": 1.0, "format": 1.0}),
        EvaluationRecord("qa", 1, 0.0, -1.0, None, 1, {"f1": 0.0}),
        EvaluationRecord("qa", 1, 0.0, -1.0, None, 1),
        record(0, 1.0),
    ]
    metrics = evaluation_metrics(rows)
    assert metrics["val-aux/qa/f1/mean@2"] == pytest.approx((0.75 + 0.0) / 2)
    assert metrics["val-aux/qa/f1/std@2"] == pytest.approx((0.25 + 0.0) / 2)
    assert metrics["val-aux/qa/format/mean@2"] == 1.0
    assert not any(name.startswith("val-aux/aime_2025/f") for name in metrics)
    assert evaluation_metrics(rows[::-1]) == metrics


def test_best_and_worst_are_exact():
    # One of 8 correct: best@k with replacement is 1 - (7/8)**k, worst@k is (1/8)**k.
    metrics = evaluation_metrics(records([[1] + [0] * 7]), bootstrap_draws=1)
    for k in (2, 4, 8):
        expected = 1 - (7 / 8) ** k
        assert metrics[f"val-core/aime_2025/acc/best@{k}/mean"] == pytest.approx(expected)
        deviation = (expected * (1 - expected)) ** 0.5
        assert metrics[f"val-core/aime_2025/acc/best@{k}/std"] == pytest.approx(deviation)
        assert metrics[f"val-core/aime_2025/acc/worst@{k}/mean"] == pytest.approx((1 / 8) ** k)
        assert metrics[f"val-core/aime_2025/acc/pass@{k}"] == pytest.approx(k / 8)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=4), min_size=1, max_size=3))
def test_best_and_worst_equal_counting_all_draws(matrix):
    metrics = evaluation_metrics(records(matrix))
    for k in sample_sizes(max(map(len, matrix))):
        for name, choose in (("best", max), ("worst", min)):
            chosen = [[choose(draw) for draw in product(row, repeat=k)] for row in matrix]
            prefix = f"val-core/aime_2025/acc/{name}@{k}/"
            assert metrics[prefix + "mean"] == pytest.approx(np.mean([np.mean(row) for row in chosen]))
            assert metrics[prefix + "std"] == pytest.approx(np.mean([np.std(row) for row in chosen]), abs=1e-7)


def test_errors_of_majority_votes_average_out_over_prompts():
    # Of 8 samples 5 agree on the right answer; 400 prompts of the same kind, with draws of their own.
    predictions = [["1"] * 5 + ["0"] * 3] * 400
    metrics = evaluation_metrics(records([[1] * 5 + [0] * 3] * 400, predictions), bootstrap_draws=100)
    wins = sum(comb(8, i) * 5**i * 3 ** (8 - i) / 8**8 * (1 if i > 4 else 0.5) for i in range(4, 9))
    assert metrics["val-core/aime_2025/acc/maj@8/mean"] == pytest.approx(wins, abs=0.008)


@settings(deadline=None)
@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_equals_counting(case):
    n, c, k = case
    hits = sum(any(i < c for i in chosen) for chosen in combinations(range(n), k))
    assert pass_at_k([n], [c], k)[0] == pytest.approx(hits / comb(n, k))


def test_majority_votes_on_canonical_answers():
    # 0.5 and 1/2 are one candidate and beat two wrong answers that differ.
    preds = [["0.5", "\\frac{1}{2}", "3", "4", "5", "6"]]
    metrics = evaluation_metrics(records([[1, 1, 0, 0, 0, 0]], preds), bootstrap_draws=4000)
    split = evaluation_metrics(records([[1, 1, 0, 0, 0, 0]], [["a", "b", "3", "4", "5", "6"]]), bootstrap_draws=4000)
    name = "val-core/aime_2025/acc/maj@6/mean"
    assert metrics[name] > split[name] + 0.1
    assert split[name] == pytest.approx(1 / 3, abs=0.03)


def test_majority_equals_a_loop():
    rng = np.random.default_rng(0)
    preds = [[str(x) for x in rng.integers(0, 3, 8)] for _ in range(5)]
    preds[0][:3] = [None] * 3
    accuracy = [[float(p == "1") for p in row] for row in preds]
    metrics = evaluation_metrics(records(accuracy, preds), seed=3, bootstrap_draws=50)
    values = []
    for prompt, row in enumerate(preds):
        draws = _draws_of(str(prompt), 3, 50, 4)
        ordered = sorted(row, key=lambda p: (p == "1", p or ""))
        for draw in draws:
            votes = [ordered[int(u * 8)] for u in draw]
            cast = [v for v in votes if v is not None]
            most = max((cast.count(v) for v in cast), default=0)
            tied = {v for v in cast if cast.count(v) == most}
            values.append(np.mean([v == "1" for v in tied]) if tied else 0.0)
    assert metrics["val-core/aime_2025/acc/maj@4/mean"] == pytest.approx(np.mean(values))


@settings(max_examples=20, deadline=None)
@given(st.randoms())
def test_order_of_responses_does_not_matter(random):
    rows = records(np.random.default_rng(1).integers(0, 2, (6, 4)), [list("abca")] * 6)
    shuffled = rows.copy()
    random.shuffle(shuffled)
    assert evaluation_metrics(rows, 5, 100) == pytest.approx(evaluation_metrics(shuffled, 5, 100), abs=1e-12)
    assert evaluation_metrics(rows, 5, 100) != evaluation_metrics(rows, 6, 100)


def test_data_sources_are_kept_apart_and_short_prompts_take_part():
    rows = [record(0, 1.0, source="a"), record(0, 0.0, source="a"), record(1, 1.0, source="a")]
    rows.append(record(0, 0.0, source="b"))
    metrics = evaluation_metrics(rows)
    assert metrics["val-core/a/acc/mean@2"] == pytest.approx((0.5 + 1.0) / 2)
    assert metrics["val-core/a/acc/pass@2"] == 1.0
    assert metrics["val-core/b/acc/mean@1"] == 0.0
    assert "val-core/b/acc/best@1/mean" not in metrics


def test_trajectories_are_read_as_the_reward_room_fills_them():
    trajectory = Trajectory(
        np.array([1]),
        np.array([2, 3]),
        np.array([True, True]),
        np.zeros(2),
        np.array([0, 1]),
        np.zeros(2),
        5,
        0,
        FinishReason.STOP,
        reward=-1.0,
        reward_info={"acc": 0.0, "pred": None},
        extra_info={"data_source": "demo"},
    )
    assert evaluation_metrics([trajectory])["val-aux/demo/reward/mean@1"] == -1.0
    assert evaluation_metrics([trajectory])["val-aux/num_turns/mean"] == 2.0


def test_edges():
    assert evaluation_metrics([]) == {}
    assert (sample_sizes(1), sample_sizes(2), sample_sizes(30)) == ([], [2], [2, 4, 8, 16, 30])
    with pytest.raises(ValueError, match="score all responses first"):
        evaluation_metrics([record(0, float("nan"))])
    with pytest.raises(ValueError, match="pass@3"):
        pass_at_k([2], [1], 3)


def test_a_full_validation_is_fast():
    import time

    accuracy = np.random.default_rng(0).integers(0, 2, (500, 32))
    rows = records(accuracy, [[str(i % 5) for i in range(32)]] * 500)
    started = time.process_time()
    evaluation_metrics(rows)
    assert time.process_time() - started < 10
