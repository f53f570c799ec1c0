"""From rollouts to what the update needs, on batches made by hand."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_retool.algorithms.means import mean_metrics
from megatron_retool.algorithms.policy_loss import PolicyLossInputs, policy_loss, reduce_metrics
from megatron_retool.algorithms.rejection_rules import OVERLONG
from megatron_retool.config import load_config
from megatron_retool.errors import OperationError
from megatron_retool.loop.columns import (
    add_advantages,
    add_log_probs,
    add_ref_log_probs,
    correct_rollout,
    critic_mini_batch,
    mini_batch_of,
    split_mini_batches,
)
from megatron_retool.loop.metrics import batch_metrics
from megatron_retool.loop.state import TrainerState
from megatron_retool.loop.update import update_actor
from megatron_retool.runs.step_timer import StepTimer
from megatron_retool.trajectory import FinishReason, Trajectory, TrajectoryBatch

MASK = [True, True, False, True]


def trajectory(group, index, reward, filtered=False):
    return Trajectory(
        [1, 2], [3, 4, 5, 6], MASK, [-0.5, -0.25, 0.0, -1.0], [0, 0, -1, 1], [0, 0, -1, 0], group, index,
        FinishReason.STOP, reward=reward, reward_info={"overlong_filtered": filtered},
    )  # fmt: skip


def make_batch(*rows):
    batch = TrajectoryBatch.from_trajectories(rows)
    return batch.with_columns(old_log_probs=batch.rollout_log_probs)


def four(filtered=-1):
    rewards = [1.0, -1.0, -1.0, -1.0]
    return [trajectory(i // 2, i % 2, rewards[i], filtered=i == filtered) for i in range(4)]


def test_overlong_responses_keep_their_weight_and_give_no_loss():
    config = load_config(None, ["learner.mini_batch_size=4", "data.train_batch_size=2", "rollout.train.n=2"])
    rows = four(filtered=1)
    batch, metrics, skip = correct_rollout(config.learner, config.algorithm, make_batch(*rows), rows, 0)
    assert not skip and metrics["rollout_corr/overlong_filtered"] == 0.25
    batch = batch.with_columns(advantages=batch.columns["keep"])
    (mini_batch,) = split_mini_batches(config, batch, step=1)
    weights = mini_batch.columns["loss_weights"].reshape(4, 4)
    assert np.all(weights[1] == 0)
    assert batch.columns["rejected_by"].reshape(4, 4)[1].tolist() == [OVERLONG * trained for trained in MASK]
    # Token mean over the 12 sampled tokens before the filter.
    np.testing.assert_allclose(weights[[0, 2, 3]], np.tile(np.array(MASK) / 12, (3, 1)), rtol=1e-6)


def test_mismatch_is_weighed_and_rejected():
    settings = ["mode=truncate", "rejection=[]", "veto_threshold=0.01"]
    config = load_config(None, [f"algorithm.rollout_correction.{setting}" for setting in settings])
    rows = four()
    batch = make_batch(*rows)
    old = batch.rollout_log_probs.copy()
    old[0], old[4] = old[0] + 5.0, old[4] - 5.0
    batch, metrics, _ = correct_rollout(
        config.learner, config.algorithm, batch.with_columns(old_log_probs=old), rows, 3
    )
    assert batch.columns["importance_weights"][0] == 2.0
    assert batch.columns["keep"].reshape(4, 4).any(1).tolist() == [True, False, True, True]
    assert metrics["rollout_corr/veto_fraction"] == 0.25 and metrics["rollout_corr/staleness/mean"] == 3.0


def test_an_exact_run_ends_where_a_token_of_the_newest_weights_differs():
    config = load_config(None, ["learner.match_engine=exact", "rollout.engine.dtype=bfloat16"])
    rows = four()
    batch = make_batch(*rows)
    old = batch.rollout_log_probs.copy()
    old[MASK.index(False)] = -7.0  # a tool's token has no log-prob of its own
    _, metrics, _ = correct_rollout(config.learner, config.algorithm, batch.with_columns(old_log_probs=old), rows, 0)
    assert metrics["rollout_corr/log_prob_abs_diff"] == 0.0
    old[4] = np.nextafter(old[4], np.float32(0))
    with pytest.raises(OperationError, match="1 of 12 sampled tokens have another log-prob"):
        correct_rollout(config.learner, config.algorithm, batch.with_columns(old_log_probs=old), rows, 0)
    correct_rollout(
        config.learner, config.algorithm, batch.with_columns(old_log_probs=old), rows, 1
    )  # where older weights sampled it


def test_bypass_reports_what_needs_no_learner():
    settings = ["bypass_old_log_probs=true", "mode=none"]
    config = load_config(None, [f"algorithm.rollout_correction.{setting}" for setting in settings])
    rows = four()
    batch, metrics, skip = correct_rollout(config.learner, config.algorithm, make_batch(*rows), rows, 2)
    assert not skip
    assert np.all(batch.columns["importance_weights"][batch.loss_mask] == 1.0)
    assert np.array_equal(batch.columns["keep"] > 0, batch.loss_mask)
    assert metrics["rollout_corr/staleness/max"] == 2.0 and "rollout_corr/rollout_ppl" in metrics
    assert not any("kl" in name or "training" in name for name in metrics)


def test_kl_in_reward_lowers_the_advantage_of_responses_far_from_the_reference():
    config = load_config(
        None,
        [
            "algorithm.kl_in_reward=0.5",
            "algorithm.kl_estimator=k1",
            "algorithm.adaptive_kl_target=0.01",
            "algorithm.adaptive_kl_horizon=40",
            "algorithm.normalize_by_std=false",
        ],
    )
    rows = [trajectory(0, i, reward=1.0) for i in range(2)]
    batch = make_batch(*rows)
    reference = batch.columns["old_log_probs"].copy()
    reference[:2] -= 0.3  # two tokens of the first response are likelier than under the reference
    state = TrainerState.first(config)
    batch, metrics = add_advantages(batch.with_columns(ref_log_probs=reference), rows, state)
    advantages = batch.columns["advantages"].reshape(2, 4)[:, MASK]
    # Rewards 1 - 0.5 * 0.6 and 1: relative to their mean.
    np.testing.assert_allclose(advantages, [[-0.15] * 3, [0.15] * 3], atol=1e-6)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.6 / 6)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5
    assert state.kl.coefficient == pytest.approx(0.5 * (1 + 0.2 * 2 / 40))


SCHEDULE = ["algorithm.kl_schedule=linear", "algorithm.kl_final=0.1", "algorithm.kl_schedule_steps=4"]


def test_a_schedule_gives_each_step_its_kl_in_the_reward():
    config = load_config(
        None, ["algorithm.kl_in_reward=0.5", "algorithm.kl_estimator=k1", "algorithm.normalize_by_std=false", *SCHEDULE]
    )
    rows = [trajectory(0, i, reward=1.0) for i in range(2)]
    batch = make_batch(*rows)
    reference = batch.columns["old_log_probs"].copy()
    reference[:2] -= 0.3
    state = TrainerState.first(config)
    for state.step, coefficient in ((1, 0.5), (3, 0.3), (9, 0.1)):
        found, metrics = add_advantages(batch.with_columns(ref_log_probs=reference), rows, state)
        advantages = found.columns["advantages"].reshape(2, 4)[:, MASK]
        np.testing.assert_allclose(advantages, [[-0.3 * coefficient] * 3, [0.3 * coefficient] * 3], atol=1e-6)
        assert metrics["actor/reward_kl_penalty_coeff"] == pytest.approx(coefficient)
    resumed = TrainerState.first(config)
    resumed.load_state_dict(state.state_dict())
    assert resumed.kl_in_reward == state.kl_in_reward


@pytest.mark.parametrize("schedule", [SCHEDULE, []])
def test_a_schedule_gives_each_step_its_kl_in_the_loss(schedule):
    asked = []

    class Learner:
        async def update(self, batch, *, sampling, kl_in_loss):
            asked.append(kl_in_loss)
            return {"actor/lr": 1.0}

    config = load_config(None, ["algorithm.kl_in_loss=0.5", *schedule])
    run = SimpleNamespace(config=config, learner=Learner(), critic=None, teachers=None)
    for step in (1, 3, 9):
        updates = asyncio.run(update_actor(run, [make_batch(*four())] * 2, step, StepTimer()))
        assert [update["actor/kl_coef"] for update in updates] == asked[-2:]
    assert asked == pytest.approx([0.5, 0.5, 0.3, 0.3, 0.1, 0.1] if schedule else [0.5] * 6)
    run.config = load_config(None, [])
    asyncio.run(update_actor(run, [make_batch(*four())], 1, StepTimer()))
    assert asked[-1] == 0.0


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("denominator", ["pre", "post"])
def test_unequal_mini_batches_give_the_metrics_of_the_step(aggregation, denominator):
    settings = [f"algorithm.loss_aggregation={aggregation}", f"algorithm.rollout_correction.denominator={denominator}"]
    config = load_config(None, [*settings, "algorithm.kl_in_loss=0.1"])
    lengths = [3, 9, 4, 1, 6]
    rows = [
        Trajectory([1], [5] * length, [True] * length, [-0.5] * length, [0] * length, [0] * length, 0, row,
                   FinishReason.STOP, reward=1.0)
        for row, length in enumerate(lengths)
    ]  # fmt: skip
    batch = TrajectoryBatch.from_trajectories(rows)
    random = np.random.default_rng(0)
    noise = {name: random.normal(size=sum(lengths)).astype(np.float32) for name in ("old_log_probs", "ref_log_probs")}
    keep = np.where(batch.sequence_ids == 2, 0, 1).astype(np.float32)
    batch = batch.with_columns(keep=keep, advantages=noise["old_log_probs"] + 1, **noise)

    async def learn(part, *, sampling, kl_in_loss):
        columns = {name: torch.from_numpy(column) for name, column in part.columns.items() if name != "keep"}
        inputs = PolicyLossInputs(
            log_probs=torch.from_numpy(part.rollout_log_probs),
            loss_mask=torch.from_numpy(part.loss_mask),
            sequence_ids=torch.from_numpy(part.sequence_ids),
            **columns,
        )
        return reduce_metrics([policy_loss(inputs, config.algorithm.objective).metrics])

    run = SimpleNamespace(config=config, critic=None, learner=SimpleNamespace(update=learn))

    def of_step(*parts):
        mini_batches = [mini_batch_of(config.algorithm, config.data, batch, np.array(part)) for part in parts]
        return mean_metrics(asyncio.run(update_actor(run, mini_batches, 1, StepTimer())))

    assert of_step([0, 2], [1, 3, 4]) == pytest.approx(of_step([0, 1, 2, 3, 4]), rel=1e-5)


@pytest.mark.parametrize("declared", [True, False])
def test_the_reference_is_asked_where_a_loss_declares_it(tmp_path, declared):
    source = "from megatron_retool.registry import needs\n" + "@needs('reference')\n" * declared
    (tmp_path / "own.py").write_text(source + "def loss(inputs): return inputs.log_probs\n")

    class Learner:
        async def log_probs(self, batch, reference=False, sampling=None):
            columns = {name: np.full(batch.num_response_tokens, -float(reference)) for name in ("log_probs", "entropy")}
            return {**columns, "metrics": {}}

    config = load_config(None, [f"algorithm.policy_loss={tmp_path}/own.py:loss"])
    run = SimpleNamespace(config=config, learner=Learner(), critic=None, teachers=None)
    batch, _ = asyncio.run(add_log_probs(run, TrajectoryBatch.from_trajectories(four()), four(), StepTimer()))
    assert ("ref_log_probs" in batch.columns) == declared
    if declared:
        assert np.all(batch.columns["ref_log_probs"] == -1.0)


def test_routing_flips_are_a_column_where_the_engines_experts_were_replayed():
    class Learner:
        async def log_probs(self, batch, reference=False, sampling=None):
            columns = {name: np.zeros(batch.num_response_tokens) for name in ("log_probs", "entropy")}
            return {**columns, "metrics": {}, "routing_flips": np.arange(batch.num_response_tokens)}

    run = SimpleNamespace(config=load_config(None, []), learner=Learner(), critic=None, teachers=None)
    batch, _ = asyncio.run(add_log_probs(run, TrajectoryBatch.from_trajectories(four()), four(), StepTimer()))
    np.testing.assert_array_equal(batch.columns["routing_flips"], np.arange(batch.num_response_tokens))


def test_the_experts_of_the_old_log_probs_are_the_updates_and_the_references():
    asked = []

    class Learner:
        async def log_probs(self, batch, reference=False, sampling=None):
            asked.append((reference, batch.routed_experts))
            columns = {name: np.zeros(batch.num_response_tokens) for name in ("log_probs", "entropy")}
            return columns | ({"metrics": {}} if reference else {"metrics": {"seen": 1.0}, "routed_experts": rows})

    config = load_config(
        None, ["algorithm.kl_in_loss=0.1", "learner.routing_replay=old_log_probs", "learner.mini_batch_size=2"]
    )
    batch = TrajectoryBatch.from_trajectories(four())
    rows = np.arange(2 * int(batch.total_lengths.sum()), dtype=np.uint8).reshape(-1, 1, 2)
    run = SimpleNamespace(config=config, learner=Learner(), critic=None, teachers=None)
    batch, metrics = asyncio.run(add_log_probs(run, batch, [], StepTimer()))
    assert metrics == {"seen": 1.0}
    assert [reference for reference, _ in asked] == [False, True] and asked[0][1] is None
    batch = batch.with_columns(keep=batch.loss_mask)
    part = next(split_mini_batches(config, batch, step=1))
    for column in (asked[1][1], batch.routed_experts, part.routed_experts):
        np.testing.assert_array_equal(column.rows, rows)
    np.testing.assert_array_equal(batch.routed_experts.starts, np.cumsum(batch.total_lengths) - batch.total_lengths)
    assert set(part.routed_experts.starts) < set(batch.routed_experts.starts)


def test_gae_takes_the_critics_values_and_reports_how_good_they_were():
    config = load_config(
        None,
        [
            "algorithm.advantage=gae",
            "algorithm.dynamic_sampling.enable=false",
            "algorithm.gae_lambda=1.0",
            "algorithm.gae_whiten=false",
        ],
    )
    rows = four()
    values = np.repeat([0.5, -1.0, -1.0, -1.0], 4).astype(np.float32)
    batch, _ = add_advantages(make_batch(*rows).with_columns(values=values), rows, TrainerState.first(config))
    np.testing.assert_allclose(batch.columns["advantages"].reshape(4, 4)[0], [0.5, 0.5, 0.0, 0.5])
    np.testing.assert_allclose(batch.columns["advantages"].reshape(4, 4)[1:], 0.0)
    metrics = batch_metrics(batch, 8, 8)
    assert metrics["critic/returns/mean"] == -0.5 and metrics["critic/values/mean"] == -0.625
    # Var(returns) = 0.75, Var(returns - values) of (0.5, 0, 0, 0) = 0.046875
    assert metrics["critic/vf_explained_var"] == pytest.approx(1 - 0.046875 / 0.75)


@pytest.mark.parametrize(
    ("estimate", "first_token"), [("soft", [0.5, -0.5, 0.5, -0.5]), ("hard", [0.5, -0.5, 0.0, 0.0])]
)
def test_branches_share_the_advantage_of_their_common_tokens_under_the_hard_estimate(estimate, first_token):
    config = load_config(
        None,
        [
            "rollout.branching.enable=true",
            f"rollout.branching.advantage={estimate}",
            "algorithm.normalize_by_std=false",
        ],
    )
    rows = [trajectory(0, i, reward=float(i in (0, 2))) for i in range(4)]
    rows[3].reward_info["branch"] = {"parent": 2, "shared_tokens": 2}
    batch, _ = add_advantages(make_batch(*rows), rows, TrainerState.first(config))
    np.testing.assert_allclose(batch.columns["advantages"].reshape(4, 4)[:, 0], first_token, atol=1e-6)
    np.testing.assert_allclose(batch.columns["advantages"].reshape(4, 4)[:, 3], [0.5, -0.5, 0.5, -0.5], atol=1e-6)


def test_critic_learns_from_rejected_tokens_too():
    batch = make_batch(*four()).with_columns(loss_weights=np.zeros(16))
    np.testing.assert_allclose(critic_mini_batch(batch).columns["loss_weights"], np.tile(MASK, 4) / 12, rtol=1e-6)


def test_a_row_carries_the_number_of_its_teacher():
    teachers = "algorithm.distillation.teachers=[{path: a, data_sources: [math]}, {path: b}]"
    settings = [teachers, "algorithm.distillation.divergence=forward_kl", "algorithm.advantage=zero"]
    run = SimpleNamespace(config=load_config(None, [*settings, "algorithm.dynamic_sampling.enable=false"]))
    rows = four()
    for row, source in zip(rows, ("math", "code", "math", "art"), strict=True):
        row.extra_info["data_source"] = source
    batch = asyncio.run(add_ref_log_probs(run, make_batch(*rows), rows, StepTimer()))
    assert batch.columns["teacher"].reshape(4, 4).tolist() == [[number] * 4 for number in (0, 1, 0, 1)]
    assert batch.select([3, 0]).columns["teacher"].tolist() == [1.0] * 4 + [0.0] * 4
