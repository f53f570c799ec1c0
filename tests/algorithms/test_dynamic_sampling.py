import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_retool.algorithms.dynamic_sampling import filter_groups, samples_for_prompt
from megatron_retool.algorithms.stage_schedule import is_due, parse_stages, stage_value
from megatron_retool.config import AdaptiveSamplingConfig, ConfigError, load_config


def test_groups_without_a_signal_are_dropped_and_order_is_kept():
    groups = [9, 9, 4, 4, 7, 7, 1, 1, 5]
    rewards = [1.0, 1.0, -1.0, 1.0, -1.0, -1.0, 0.2, 0.4, 1.0]
    accuracy = [1, 1, 0, 1, 0, 0, 0, 0, 1]
    result = filter_groups(groups, rewards, accuracy)
    assert result.kept_groups == [4, 1]
    # The group of one (5) has no signal and is all correct.
    assert (result.all_correct, result.all_wrong, result.all_equal) == (2, 1, 3)
    assert result.metrics() == {
        "dynamic_sampling/kept_groups": 2.0,
        "dynamic_sampling/generated_groups": 5.0,
        "dynamic_sampling/all_correct": 2.0,
        "dynamic_sampling/all_wrong": 1.0,
    }


def test_the_metric_decides():
    # Length shaping makes rewards differ where accuracy does not.
    rewards, accuracy = [1.0, 0.9, -1.0, 1.0], [1, 1, 0, 1]
    assert filter_groups([0, 0, 1, 1], rewards, accuracy).kept_groups == [0, 1]
    assert filter_groups([0, 0, 1, 1], accuracy, accuracy).kept_groups == [1]


@given(st.lists(st.tuples(st.integers(-3, 3), st.sampled_from([-1.0, 0.5, 1.0])), max_size=40))
def test_filter_equals_a_loop(rows):
    groups, rewards = [g for g, _ in rows], [r for _, r in rows]
    result = filter_groups(groups, rewards, [float(r > 0) for r in rewards])
    members = {g: [r for h, r in rows if h == g] for g in dict.fromkeys(groups)}
    expected = [g for g, values in members.items() if len(set(values)) > 1]
    assert result.kept_groups == expected
    assert result.all_equal == len(members) - len(expected)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="response 1 has the value nan"):
        filter_groups([0, 0], [1.0, float("nan")], [1, 1])
    with pytest.raises(ValueError, match="lengths must agree"):
        filter_groups([0, 0], [1.0], [1])


def test_adaptive_number_of_responses():
    config = AdaptiveSamplingConfig()

    def n(step, *history):
        return samples_for_prompt(
            step,
            history,
            config.stages,
            config.easy_accuracy,
            config.easy_batches,
            config.easy_n,
            config.hard_accuracy,
            config.hard_n,
        )

    assert [n(step) for step in (0, 29, 30, 79, 80, 500)] == [24, 24, 16, 16, 12, 12]
    assert n(50, 0.95, 1.0, 0.92) == 8
    assert n(50, 1.0, 1.0) == 16
    assert n(50, 1.0, 1.0, 0.9) == 16
    assert n(100, 1.0, 0.4) == 24


def test_stages():
    stages = parse_stages(["0 3", "30 5", "80 10"])
    assert [stage_value(stages, step) for step in (0, 29, 30, 80, 1000)] == [3, 3, 5, 10, 10]
    assert [step for step in range(100) if is_due(stages, step)] == [
        *range(3, 30, 3),
        *range(30, 80, 5),
        80,
        90,
    ]
    for bad in ([], ["10 3"], ["0 3", "0 4"], ["0 3", "5"], ["0 x"], ["0 0"]):
        with pytest.raises(ValueError, match="stage|values"):
            parse_stages(bad)
    with pytest.raises(ConfigError, match="algorithm.adaptive_sampling.stages"):
        load_config(None, ["algorithm.adaptive_sampling.enable=true", "algorithm.adaptive_sampling.stages=['5 5']"])


def test_arrays_are_accepted():
    result = filter_groups(np.array([1, 1], np.int32), np.array([0, 1], np.float32), np.array([0, 1], np.float32))
    assert result.kept_groups == [1]
