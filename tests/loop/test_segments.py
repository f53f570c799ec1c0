"""What a step computes of a rollout does not change where the rollout is cut into segments."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conversion.model.layout import ParallelLayout
from megatron_retool.algorithms.policy_loss import PolicyLossInputs, policy_loss
from megatron_retool.config import RewardConfig, load_config
from megatron_retool.config.reward import OverlongConfig
from megatron_retool.learner.packing import Packer
from megatron_retool.loop.columns import add_advantages, correct_rollout, split_mini_batches
from megatron_retool.loop.experience import filter_step, mean_accuracy
from megatron_retool.loop.metrics import batch_metrics, rollout_metrics
from megatron_retool.loop.rollout_files import write_estimates
from megatron_retool.loop.state import TrainerState
from megatron_retool.loop.validation import with_all
from megatron_retool.rewards.evaluation import evaluation_metrics
from megatron_retool.rewards.manager import RewardManager
from megatron_retool.rollout_rows import whole_rollout, whole_rollouts
from megatron_retool.trajectory import TrajectoryBatch, read_trajectories, write_trajectories
from run_files.steps import read_estimates
from tests.loop.segmented import cut, randomly_cut, rollout, step_of

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae")
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
LOSSES = ("clip", "gspo", "cispo", "policy_gradient")
CORRECTIONS = {
    "geometric mask": ["rejection=['geometric_ratio 0.8 1.2']", "veto_threshold=0.2", "mode=truncate", "level=token"],
    "sequence weights": ["rejection=[]", "mode=truncate", "level=sequence", "batch_normalize=true", "denominator=post"],
    "geometric weights": ["rejection=['token_k1 -0.5 0.5']", "mode=mask", "level=geometric", "lower=0.7", "upper=1.4"],
    "bypass": ["bypass_old_log_probs=true", "mode=none", "rejection=['geometric_ratio 0.8 1.2']", "veto_threshold=0.2"],
}


@functools.cache
def configuration(*overrides):
    return load_config(None, list(overrides))


def compared(config, rows, seed, max_tokens=1000):
    """Every column of the step, and loss and gradient (with respect to the log-probs) of each mini-batch."""
    rng = np.random.default_rng(seed)
    batch = TrajectoryBatch.from_trajectories(rows)
    tokens = batch.num_response_tokens
    near = {
        name: batch.rollout_log_probs + rng.normal(0, 0.2, tokens)
        for name in ("old_log_probs", "ref_log_probs", "values", "entropy", "now")
    }
    bypass = config.algorithm.rollout_correction.bypass_old_log_probs
    if bypass:
        near["old_log_probs"] = batch.rollout_log_probs
    batch = batch.with_columns(**near)
    batch, corrected, _ = correct_rollout(config.learner, config.algorithm, batch, rows, 3)
    state = TrainerState.first(config)
    batch, kl = add_advantages(batch, rows, state)
    packer = Packer(ParallelLayout.of_ranks(1), max_tokens, 0, 0, torch.device("cpu"))
    updates = []
    for mini_batch in split_mini_batches(config, batch.with_columns(place=np.arange(tokens)), step=1):
        now = torch.tensor(mini_batch.columns["now"], dtype=torch.float64, requires_grad=True)
        loss = torch.zeros((), dtype=torch.float64)
        for part in packer.micro_batches(mini_batch):
            names = ("old_log_probs", "advantages", "loss_weights", "importance_weights", "ref_log_probs", "entropy")
            columns = {name: part.column(mini_batch.columns[name]) for name in names}
            mask = part.column(mini_batch.loss_mask)
            inputs = PolicyLossInputs(
                log_probs=now[part.response_positions], loss_mask=mask, sequence_ids=part.sequence_ids, **columns
            )
            loss = loss + policy_loss(inputs, config.algorithm.objective).loss
        loss.backward()
        updates.append((mini_batch.columns["place"], loss.item(), now.grad.numpy()))
    limits = (config.data.max_prompt_length, config.data.max_response_length)
    return batch.columns, {**corrected, **kl, **batch_metrics(batch, *limits)}, updates, state.kl.coefficient


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    advantage=st.sampled_from(ADVANTAGES),
    aggregation=st.sampled_from(AGGREGATIONS),
    loss=st.sampled_from(LOSSES),
    correction=st.sampled_from(sorted(CORRECTIONS)),
    kl=st.booleans(),
)
def test_advantages_losses_and_gradients_of_a_cut_rollout(seed, advantage, aggregation, loss, correction, kl):
    config = configuration(
        f"algorithm.advantage={advantage}",
        f"algorithm.loss_aggregation={aggregation}",
        f"algorithm.policy_loss={loss}",
        *(f"algorithm.rollout_correction.{setting}" for setting in CORRECTIONS[correction]),
        *(["algorithm.kl_in_reward=0.3", "algorithm.adaptive_kl_target=0.01"] if kl else []),
        *(["algorithm.dynamic_sampling.enable=false"] if advantage == "gae" else []),
        "algorithm.entropy_coefficient=0.01",
        "learner.mini_batch_size=3",
        "data.train_batch_size=3",
        "rollout.train.n=3",
    )
    rng = np.random.default_rng(seed)
    rollouts = step_of(rng)
    for each in rollouts:
        each.reward_info["overlong_filtered"] = bool(rng.random() < 0.2)
    rows = randomly_cut(rng, rollouts)
    columns, metrics, updates, coefficient = compared(config, rollouts, seed)
    cut_columns, cut_metrics, cut_updates, cut_coefficient = compared(config, rows, seed)
    for name, column in columns.items():
        np.testing.assert_allclose(cut_columns[name], column, rtol=1e-6, atol=1e-7, err_msg=name)
    assert len(updates) == len(cut_updates) == 3 and coefficient == cut_coefficient
    for (place, value, gradient), (cut_place, cut_value, cut_gradient) in zip(updates, cut_updates, strict=True):
        np.testing.assert_array_equal(place, cut_place)
        assert cut_value == pytest.approx(value, rel=1e-6, abs=1e-9)
        np.testing.assert_allclose(cut_gradient, gradient, rtol=1e-6, atol=1e-9)
    for name, value in metrics.items():
        assert cut_metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-9, nan_ok=True), name


def test_a_rollout_too_long_for_a_micro_batch_is_judged_row_by_row():
    rng = np.random.default_rng(3)
    while len((whole := rollout(rng, 0, 0)).response_ids) < 6:
        pass
    short = rollout(rng, 0, 1)
    batch = TrajectoryBatch.from_trajectories([*cut(whole, [2, 4]), *cut(short, [1])])
    of_first = int(batch.total_lengths[:3].sum())
    for budget, expected in ((of_first, [0, 0, 0]), (of_first - 1, [0, 1, 2])):
        packer = Packer(ParallelLayout.of_ranks(1), budget, 0, 0, torch.device("cpu"))
        units = packer.units(batch)
        assert units[:3].tolist() == expected
        parts = packer.micro_batches(batch)
        assert sorted(int(row) for part in parts for row in part.rows) == list(range(len(batch)))
        for unit in range(units.max() + 1):
            assert sum(bool((units[part.rows] == unit).any()) for part in parts) == 1


def test_rows_of_a_rollout_must_lie_together_in_order():
    rows = cut(whole_with_tokens(), [1, 2])
    other = rollout(np.random.default_rng(1), 0, 1)
    for order in ([rows[0], other, rows[1]], [rows[1], rows[0]]):
        with pytest.raises(ValueError, match="in order of segment"):
            TrajectoryBatch.from_trajectories(order).rollout_ids  # noqa: B018


def whole_with_tokens(seed=0):
    rng = np.random.default_rng(seed)
    while len((found := rollout(rng, 0, 0)).response_ids) < 4:
        pass
    return found


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1))
def test_metrics_count_rollouts(seed):
    rng = np.random.default_rng(seed)
    rollouts = step_of(rng)
    for each in rollouts:
        each.reward_info |= {"acc": float(each.reward > 0), "pred": str(each.reward), "score": each.reward}
    rows = randomly_cut(rng, rollouts)
    joined = whole_rollouts(rows)
    for whole, again in zip(rollouts, joined, strict=True):
        for name in ("prompt_ids", "response_ids", "loss_mask", "rollout_log_probs", "turn_ids", "weight_versions"):
            np.testing.assert_array_equal(getattr(whole, name), getattr(again, name))
        assert (whole.tool_calls, whole.finish_reason, whole.num_turns) == (
            again.tool_calls, again.finish_reason, again.num_turns,
        )  # fmt: skip
    expected, found = rollout_metrics(rollouts), rollout_metrics(rows)
    assert found.pop("rollout/segments") == len(rows) / len(rollouts) and expected.pop("rollout/segments") == 1.0
    assert found == expected
    assert evaluation_metrics(with_all(rows)) == evaluation_metrics(with_all(rollouts))
    groups = [[row for row in rows if row.group_id == group] for group in range(3)]
    whole_groups = [[row for row in rollouts if row.group_id == group] for group in range(3)]
    for metric in ("acc", "reward"):
        assert filter_step(groups, metric) == filter_step(whole_groups, metric)
    assert list(map(mean_accuracy, groups)) == list(map(mean_accuracy, whole_groups))


class _Decoder:
    def decode(self, token_ids, skip_special_tokens=False):
        return " ".join(map(str, token_ids))


@pytest.mark.parametrize("mode", ["soft_punish", "piecewise"])
def test_rows_share_the_reward_of_the_whole(tmp_path, mode):
    (tmp_path / "own.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    text, turn = solution_str, extra_info['final_turn']\n"
        "    return {'score': float(len(text.split())), 'text': text, 'turn': turn}\n"
    )
    overlong = OverlongConfig(mode=mode, buffer_length=4, penalty=2.0, pieces=["2 1000"], filter=True)
    config = RewardConfig(function=f"{tmp_path}/own.py:compute_score", overlong=overlong, processes=1)
    whole = whole_with_tokens()
    rows = cut(whole, [1, 3])
    with RewardManager(config, _Decoder(), max_response_length=len(whole.response_ids)) as manager:
        manager.score([whole])
        manager.score(rows)
        assert manager.take_metrics()["reward/scored"] == 2.0
    assert len(rows) == 3 and whole.reward < len(whole.response_ids)
    assert [row.reward for row in rows] == [whole.reward] * 3
    assert all(row.reward_info == whole.reward_info for row in rows)


def test_files_keep_the_segment_and_old_ones_have_none(tmp_path):
    rows = [*cut(whole_with_tokens(), [2]), replace(whole_with_tokens(), index=1)]
    batch = TrajectoryBatch.from_trajectories(rows)
    batch = batch.with_columns(old_log_probs=np.arange(batch.num_response_tokens))
    write_trajectories(rows, tmp_path / "step.parquet")
    write_estimates(batch, tmp_path / "step.learner.parquet")
    keys = [(0, 0, 0), (0, 0, 1), (0, 1, 0)]
    assert [row.key for row in read_trajectories(tmp_path / "step.parquet")] == keys
    assert list(read_estimates(tmp_path / "step.learner.parquet")) == keys
    for name in ("step.parquet", "step.learner.parquet"):
        pq.write_table(pq.read_table(tmp_path / name).drop_columns(["segment"]).slice(1), tmp_path / name)
    assert [row.key for row in read_trajectories(tmp_path / "step.parquet")] == [(0, 0, 0), (0, 1, 0)]
    assert list(read_estimates(tmp_path / "step.learner.parquet")) == [(0, 0, 0), (0, 1, 0)]
    assert whole_rollout(rows[2:]) is rows[2]
