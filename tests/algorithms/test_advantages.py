"""Estimators against plain padded formulas with loops, and the cases that formulas leave open."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_retool.algorithms.advantages import (
    AdvantageInputs,
    compute_advantages,
    group_relative,
    leave_one_out,
    place_rewards,
    share_branch_advantages,
    whiten,
)
from megatron_retool.config import AlgorithmConfig
from tests.algorithms.ragged_batches import pad, ragged, unpad

LENGTHS = [5, 9, 1, 4, 7, 6]
GROUPS = torch.tensor([7, 7, 3, 3, 3, 7])
REWARDS = torch.tensor([1.0, -1.0, 1.0, 0.5, -1.0, -1.0])
GROUP_RELATIVE = ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"]


def batch(seed=0, lengths=LENGTHS):
    ids, mask = ragged(lengths, seed=seed)
    mask[ids == 1] = torch.tensor([True] * 4 + [False] * 5)
    return ids, mask


def run(name, **kwargs):
    ids, mask = kwargs.pop("batch", None) or batch()
    estimator = AlgorithmConfig(advantage=name, **kwargs.pop("config", {})).estimator
    inputs = AdvantageInputs(kwargs.pop("rewards", REWARDS), kwargs.pop("groups", GROUPS), mask, ids, **kwargs)
    return compute_advantages(estimator, inputs)


@pytest.mark.parametrize(("name", "normalize"), [("grpo", True), ("grpo", False), ("dr_grpo", True), ("rloo", True)])
def test_group_estimators_equal_a_loop_over_groups(name, normalize):
    expected = torch.zeros(6, dtype=torch.float64)
    for i, (group, reward) in enumerate(zip(GROUPS.tolist(), REWARDS.tolist(), strict=True)):
        members = [REWARDS[j].item() for j in range(6) if GROUPS[j] == group]
        if name == "rloo":
            others = [REWARDS[j].item() for j in range(6) if GROUPS[j] == group and j != i]
            expected[i] = reward - sum(others) / len(others)
        else:
            expected[i] = reward - sum(members) / len(members)
            if name == "grpo" and normalize:
                expected[i] /= torch.tensor(members, dtype=torch.float64).std() + 1e-6
    ids, mask = batch()
    advantages, _ = run(name, config={"normalize_by_std": normalize})
    torch.testing.assert_close(advantages, torch.where(mask, expected[ids], 0.0).float())


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_nothing_to_compare_gives_exactly_zero(name):
    # A group of one, and a group whose equal rewards (0.1) have a mean that is off by rounding.
    advantages, _ = run(name, rewards=torch.tensor([0.1] * 5 + [3.0]), groups=torch.tensor([1, 1, 1, 1, 1, 2]))
    assert torch.count_nonzero(advantages) == 0


def test_group_relative_values():
    torch.testing.assert_close(
        group_relative(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), True),
        torch.tensor([0.5, -0.5], dtype=torch.float64) / (0.5**0.5 + 1e-6),
    )
    assert leave_one_out(torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3, dtype=torch.int64)).tolist() == [1.0, -0.5, -0.5]


@pytest.mark.parametrize("name", [*GROUP_RELATIVE, "reinforce_plus_plus", "gae"])
def test_masked_tokens_get_zero_and_permutation_of_responses_changes_nothing(name):
    ids, mask = batch()
    values = torch.randn(len(ids), generator=torch.Generator().manual_seed(3))
    token_rewards = -0.1 * torch.rand(len(ids), generator=torch.Generator().manual_seed(4))
    advantages, returns = run(name, values=values, token_rewards=token_rewards)
    assert torch.count_nonzero(advantages[~mask]) == torch.count_nonzero(returns[~mask]) == 0

    order = [4, 2, 0, 5, 1, 3]
    take = torch.cat([torch.nonzero(ids == row).squeeze(1) for row in order])
    lengths = torch.tensor(LENGTHS)[order]
    permuted = run(
        name,
        rewards=REWARDS[order],
        groups=GROUPS[order],
        batch=(torch.arange(6).repeat_interleave(lengths), mask[take]),
        values=values[take],
        token_rewards=token_rewards[take],
    )
    torch.testing.assert_close(permuted.advantages, advantages[take], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(permuted.returns, returns[take], atol=1e-6, rtol=1e-5)


def test_kl_in_the_reward_moves_the_group_baseline():
    ids, mask = batch()
    penalty = torch.where(ids == 0, -0.2, 0.0)
    shaped = REWARDS.clone()
    shaped[0] += -0.2 * mask[ids == 0].sum()
    expected = run("dr_grpo", rewards=shaped).advantages
    torch.testing.assert_close(run("dr_grpo", token_rewards=penalty).advantages, expected)


def padded_gae(rewards, values, mask, gamma, lam):
    """Loop over time on padded tensors; tool tokens hand the running values through."""
    advantages = torch.zeros_like(values)
    running, next_value = torch.zeros(len(values)), torch.zeros(len(values))
    for t in reversed(range(values.shape[1])):
        m = mask[:, t].float()
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        running = torch.where(mask[:, t], delta + gamma * lam * running, running)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = running * m
    return advantages, (advantages + values) * mask


@pytest.mark.parametrize("placement", ["last_token", "spread", "linear_decay"])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0)])
def test_gae_equals_the_padded_recursion(placement, gamma, lam):
    ids, mask = batch(seed=5)
    values = torch.randn(len(ids), generator=torch.Generator().manual_seed(6))
    token_rewards = torch.where(mask, 0.01 * torch.arange(len(ids)), 0.0)
    placed = pad(token_rewards.clone(), LENGTHS)
    for row, reward in enumerate(REWARDS.tolist()):
        sampled = torch.nonzero(pad(mask, LENGTHS, False)[row]).squeeze(1)
        if placement == "last_token":
            placed[row, sampled[-1:]] += reward
        elif placement == "linear_decay":
            last = max(len(sampled) - 1, 1)
            weights = torch.tensor([1 - 0.75 * place / last for place in range(len(sampled))])
            placed[row, sampled] += reward * weights / weights.sum()
        else:
            placed[row, sampled] += reward / max(len(sampled), 1)
    expected, expected_returns = padded_gae(placed, pad(values, LENGTHS), pad(mask, LENGTHS, False), gamma, lam)
    config = {"gamma": gamma, "gae_lambda": lam, "gae_whiten": False, "gae_reward": placement}
    config |= {"gae_reward_last_share": 0.25}
    advantages, returns = run("gae", batch=(ids, mask), values=values, token_rewards=token_rewards, config=config)
    torch.testing.assert_close(advantages, unpad(expected, LENGTHS))
    torch.testing.assert_close(returns, unpad(expected_returns, LENGTHS))

    raw = advantages
    sequence_level = run(
        "gae", batch=(ids, mask), values=values, token_rewards=token_rewards, config=config | {"gae_level": "sequence"}
    ).advantages
    for row in range(6):
        chosen = mask & (ids == row)
        if chosen.any():
            torch.testing.assert_close(sequence_level[chosen], raw[chosen].mean().expand(int(chosen.sum())))


def test_spread_rewards_add_up_to_the_reward():
    ids, mask = batch()
    for placement in ("last_token", "spread", "linear_decay"):
        placed = place_rewards(REWARDS, mask, ids, placement)
        for row in range(6):
            expected = REWARDS[row].item() if mask[ids == row].any() else 0.0
            assert placed[ids == row].sum().item() == pytest.approx(expected)


def test_linear_decay_by_hand():
    """Five tokens of which a tool wrote the third, and a response of a single sampled token."""
    mask = torch.tensor([True, True, False, True, True, True])
    ids = torch.tensor([0, 0, 0, 0, 0, 1])
    rewards = torch.tensor([6.0, -2.0])
    assert place_rewards(rewards, mask, ids, "linear_decay").tolist() == pytest.approx([3.0, 2.0, 0.0, 1.0, 0.0, -2.0])
    half = place_rewards(rewards, mask, ids, "linear_decay", last_share=0.5)
    assert half.tolist() == pytest.approx([2.0, 5 / 3, 0.0, 4 / 3, 1.0, -2.0])
    same = place_rewards(rewards, mask, ids, "linear_decay", last_share=1.0)
    torch.testing.assert_close(same, place_rewards(rewards, mask, ids, "spread"))
    with pytest.raises(ValueError, match="none of last_token, spread and linear_decay"):
        place_rewards(rewards, mask, ids, "exponential")


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    seed=st.integers(0, 10),
    last_share=st.floats(0, 10, width=32),
)
def test_shares_of_a_linear_decay(lengths, seed, last_share):
    ids, mask = ragged(lengths, seed=seed)
    placed = place_rewards(torch.ones(len(lengths)), mask, ids, "linear_decay", last_share=last_share)
    assert torch.count_nonzero(placed[~mask]) == 0
    for row in range(len(lengths)):
        shares = placed[mask & (ids == row)]
        if len(shares) == 0:
            continue
        assert shares.sum().item() == pytest.approx(1.0)
        assert shares[-1].item() == pytest.approx(shares[0].item() * (last_share if len(shares) > 1 else 1), abs=1e-9)
        steps = shares.diff()
        assert bool((steps * (last_share - 1) >= -1e-12).all()), "falls below 1, grows above"
        torch.testing.assert_close(steps, steps[:1].expand(len(steps)), atol=1e-12, rtol=1e-9)


def test_reinforce_plus_plus_whitens_rewards_to_go_over_the_batch():
    ids, mask = batch()
    advantages, returns = run("reinforce_plus_plus", config={"gamma": 0.9})
    assert advantages[mask].mean().item() == pytest.approx(0.0, abs=1e-6)
    assert advantages[mask].std().item() == pytest.approx(1.0, abs=1e-5)
    first = torch.nonzero(mask & (ids == 4)).squeeze(1)
    expected = REWARDS[4] * 0.9 ** torch.arange(len(first) - 1, -1, -1)
    torch.testing.assert_close(returns[first], expected)


@given(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=20))
def test_whitening_is_bounded_and_defined(values):
    flat = torch.tensor(values)
    white = whiten(flat, torch.ones(len(flat), dtype=torch.bool))
    assert bool(torch.isfinite(white).all())
    if len(set(values)) == 1:
        assert torch.count_nonzero(white) == 0


def test_branches_share_the_mean_on_copied_tokens():
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0])
    shared = share_branch_advantages(advantages, torch.ones(5, dtype=torch.bool), torch.tensor([10, 11, 12, 10, 13]))
    assert shared.tolist() == [0.0, 1.0, 1.0, 0.0, -1.0]


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match="reward of response 1 is nan"):
        run("grpo", rewards=torch.tensor([0.0, float("nan"), 0, 0, 0, 0]))
    with pytest.raises(ValueError, match="needs the critic's values"):
        run("gae")
    with pytest.raises(ValueError, match="algorithm.advantage='best' is not one of grpo, dr_grpo, rloo"):
        run("best")
    with pytest.raises(ValueError, match="equally long"):
        run("grpo", groups=GROUPS[:2])


def test_reverse_kl_is_the_teachers_log_ratio_and_as_much_of_the_rewards_as_asked():
    from megatron_retool.algorithms.advantages import AdvantageInputs, advantage_estimators

    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([True, False, True, True, True, True])
    inputs = AdvantageInputs(
        rewards=torch.tensor([1.0, -1.0]),
        group_ids=torch.tensor([0, 0]),
        loss_mask=mask,
        sequence_ids=torch.tensor([0, 0, 0, 1, 1, 1]),
        old_log_probs=-torch.rand(6, generator=generator),
        ref_log_probs=-torch.rand(6, generator=generator),
    )
    teacher = torch.where(mask, inputs.ref_log_probs - inputs.old_log_probs, 0.0)
    found = advantage_estimators.bind("reverse_kl", {}).attempt(inputs)
    torch.testing.assert_close(found.advantages, teacher)
    grpo = advantage_estimators.bind("grpo", {}).attempt(inputs)
    both = advantage_estimators.bind("reverse_kl", {"reward_weight": 0.5}).attempt(inputs)
    torch.testing.assert_close(both.advantages, teacher + 0.5 * grpo.advantages)
    torch.testing.assert_close(both.returns, grpo.returns)
