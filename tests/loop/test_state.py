import json

import pytest

from megatron_retool.algorithms.refill import KeepRate
from megatron_retool.config import ConfigError, load_config
from megatron_retool.data.prompts import PromptRow
from megatron_retool.loop.state import TrainerState
from megatron_retool.loop.validation_schedule import Validation


def prompts(*uids):
    return [PromptRow([1], group_id, uid, "test", None) for group_id, uid in enumerate(uids)]


def test_validation_follows_the_schedule_or_the_frequency():
    state = TrainerState.first(load_config(None, ["trainer.test_schedule=['0 4', '8 2']", "trainer.save_freq=5"]))
    due = []
    for state.step in range(1, 13):
        due.append((state.validation_due(last=False) is Validation.FULL, state.save_due()))
    assert [step for step, (validation, _) in enumerate(due, 1) if validation] == [4, 8, 10, 12]
    assert [step for step, (_, save) in enumerate(due, 1) if save] == [5, 10]

    state = TrainerState.first(
        load_config(None, ["trainer.test_freq=3", "trainer.save_freq=0", "trainer.save_weights_freq=2"])
    )
    for state.step in range(1, 7):
        assert state.save_weights_due() == (state.step in (2, 4, 6))
        assert (state.validation_due(last=False) is Validation.FULL) == (state.step in (3, 6))
        assert not state.save_due()


@pytest.mark.parametrize("schedule", ["['5 2']", "['0 2', '0 3']", "['0 0']", "['weekly']"])
def test_bad_schedule_is_refused_with_its_key(schedule):
    with pytest.raises(ConfigError, match=r"trainer\.test_schedule"):
        load_config(None, [f"trainer.test_schedule={schedule}"])


def test_adaptive_sampling_by_stage_and_history_survives_a_checkpoint():
    config = load_config(
        None,
        [
            "algorithm.adaptive_sampling.enable=true",
            "algorithm.adaptive_sampling.stages=['0 24', '30 16']",
            "algorithm.adaptive_sampling.easy_batches=2",
        ],
    )
    state = TrainerState.first(config)
    for accuracy in (0.1, 1.0, 0.95):
        state.record_accuracy("easy", accuracy)
    state.record_accuracy("hard", 0.2)
    assert state.accuracies["easy"] == [1.0, 0.95]  # what was before can decide nothing any more
    rows = prompts("easy", "hard", "new")
    assert state.group_sizes(rows, 1) == {0: 8, 1: 24, 2: 24}
    assert state.group_sizes(rows, 31) == {0: 8, 1: 24, 2: 16}

    resumed = TrainerState.first(config)
    resumed.load_state_dict(json.loads(json.dumps(state.state_dict())))
    assert resumed.group_sizes(rows, 31) == {0: 8, 1: 24, 2: 16}


def test_the_keep_rate_survives_a_checkpoint_and_is_unknown_to_older_ones():
    state = TrainerState.first(load_config())
    state.keep_rate = KeepRate(3.5, 9.25)
    saved = json.loads(json.dumps(state.state_dict()))
    resumed = TrainerState.first(load_config())
    resumed.load_state_dict(saved)
    assert resumed.keep_rate == state.keep_rate
    del saved["keep_rate"]
    resumed.load_state_dict(saved)
    assert resumed.keep_rate.share == 1


def test_without_adaptive_sampling_every_prompt_gets_n_and_nothing_is_remembered():
    state = TrainerState.first(load_config(None, ["rollout.train.n=5", "learner.mini_batch_size=5"]))
    state.record_accuracy("a", 0.0)
    assert state.group_sizes(prompts("a", "b"), 1) == {0: 5, 1: 5}
    assert state.state_dict()["accuracies"] == {}


def test_only_an_adaptive_kl_coefficient_comes_from_the_checkpoint():
    adaptive = load_config(None, ["algorithm.kl_in_reward=0.01", "algorithm.adaptive_kl_target=0.1"])
    state = TrainerState.first(adaptive)
    state.kl = state.kl.updated(measured_kl=1.0, samples=5000)
    assert state.kl.coefficient == pytest.approx(0.011)
    resumed = TrainerState.first(adaptive)
    resumed.load_state_dict(state.state_dict())
    assert resumed.kl == state.kl
    constant = TrainerState.first(load_config(None, ["algorithm.kl_in_reward=0.02"]))
    constant.load_state_dict(state.state_dict())
    assert constant.kl.coefficient == 0.02
