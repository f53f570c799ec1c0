"""Metrics of a step with several updates are those of one update with everything in it."""

import pickle

from megatron_retool.algorithms.means import Mean, mean_metrics


def test_a_mean_is_its_number_and_keeps_its_count_between_processes():
    mean = pickle.loads(pickle.dumps(Mean(0.25, 8)))
    assert (mean, mean.over, type(mean + 1)) == (0.25, 8, float)


def test_means_weigh_by_their_items_and_numbers_of_an_update_alike():
    rows = [
        {"actor/ppo_kl": Mean(1.0, 3), "actor/grad_norm": 1.0},
        {"actor/ppo_kl": Mean(5.0, 1), "actor/grad_norm": 4.0, "actor/own": Mean(2.0, 9)},
        {"actor/ppo_kl": 0.0},  # nothing was counted
    ]
    assert mean_metrics(rows) == {"actor/ppo_kl": 2.0, "actor/grad_norm": 2.5, "actor/own": 2.0}
    assert mean_metrics([]) == {}
