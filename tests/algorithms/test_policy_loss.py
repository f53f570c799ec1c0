"""Losses and their gradients against plain padded formulas, and the same numbers in every micro-batching."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_retool.algorithms.kl import kl_estimators
from megatron_retool.algorithms.loss_aggregation import loss_aggregations, token_weights
from megatron_retool.algorithms.policy_loss import (
    PolicyLossInputs,
    policy_loss,
    reduce_metrics,
    value_loss,
    with_own_old_log_probs,
)
from megatron_retool.algorithms.rollout_correction import rollout_correction
from megatron_retool.config import AlgorithmConfig, RolloutCorrectionConfig
from tests.algorithms.ragged_batches import pad, ragged

AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LOSSES = ["clip", "gspo", "cispo", "policy_gradient"]
LENGTHS = [6, 11, 3, 8, 5]


def columns(lengths=LENGTHS, seed=0, spread=0.4):
    """float64 columns, so that references can be compared to many digits."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale=1.0):
        return scale * torch.randn(sum(lengths), generator=generator, dtype=torch.float64)

    ids, mask = ragged(lengths, seed=seed)
    mask[ids == 2] = False
    log_probs = -normal().abs()
    return {
        "log_probs": log_probs.clone().requires_grad_(),
        "old_log_probs": log_probs + normal(spread),
        "advantages": normal(),
        "loss_mask": mask,
        "sequence_ids": ids,
        "importance_weights": normal().abs(),
        "entropy": normal().abs().requires_grad_(),
        "ref_log_probs": log_probs + normal(spread),
    }


def weights_of(data, aggregation, **kwargs):
    return token_weights(
        loss_aggregations.bind(aggregation),
        data["loss_mask"],
        data["sequence_ids"],
        int(data["sequence_ids"].max()) + 1,
        max_response_length=16,
        **kwargs,
    )


def padded_policy_term(config, data):
    """[N, longest] token losses, written from the papers on padded tensors."""
    p = {name: pad(column, LENGTHS) for name, column in data.items()}
    mask = p["loss_mask"].bool()
    ratio = torch.exp(p["log_probs"] - p["old_log_probs"])
    low, high = 1 - config.clip_ratio_low, 1 + config.clip_ratio_high
    advantage = p["advantages"]
    if config.policy_loss == "gspo":
        n = mask.sum(1, keepdim=True).clamp(min=1)
        mean = ((p["log_probs"] - p["old_log_probs"]) * mask).sum(1, keepdim=True) / n
        ratio = mean.exp().expand_as(ratio)
    if config.policy_loss in ("clip", "gspo"):
        objective = torch.min(ratio * advantage, ratio.clamp(low, high) * advantage)
        if config.dual_clip:
            objective = torch.where(advantage < 0, torch.max(objective, config.dual_clip * advantage), objective)
    elif config.policy_loss == "cispo":
        objective = ratio.clamp(low, high).detach() * advantage * p["log_probs"]
    else:
        objective = advantage * p["log_probs"]
    return -objective * p["importance_weights"], mask


def aggregate(losses, mask, aggregation):
    rows = [row[m] for row, m in zip(losses, mask, strict=True) if m.any()]
    if aggregation == "token-mean":
        return torch.cat(rows).mean()
    if aggregation == "seq-mean-token-sum":
        return torch.stack([row.sum() for row in rows]).mean()
    if aggregation == "seq-mean-token-mean":
        return torch.stack([row.mean() for row in rows]).mean()
    return torch.stack([row.sum() for row in rows]).mean() / 16


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    "config",
    [AlgorithmConfig(policy_loss=name) for name in LOSSES]
    + [AlgorithmConfig(dual_clip=1.5), AlgorithmConfig(policy_loss="gspo", clip_ratio_low=3e-4, clip_ratio_high=4e-4)],
    ids=lambda c: f"{c.policy_loss}{c.dual_clip or ''}",
)
def test_loss_and_gradient_equal_the_padded_formula(config, aggregation):
    data = columns()
    inputs = PolicyLossInputs(**data, loss_weights=weights_of(data, aggregation))
    loss, _ = policy_loss(inputs, config.objective)
    # GSPO's token form has the gradient of the sequence ratio only where a response's tokens share one advantage.
    if config.policy_loss == "gspo":
        data["advantages"] = torch.linspace(-1, 1, 5, dtype=torch.float64)[data["sequence_ids"]]
        data["importance_weights"] = torch.ones_like(data["advantages"])
        loss, _ = policy_loss(PolicyLossInputs(**data, loss_weights=weights_of(data, aggregation)), config.objective)
    terms, mask = padded_policy_term(config, data)
    expected = aggregate(terms, mask, aggregation)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-9)
    (gradient,) = torch.autograd.grad(loss, data["log_probs"])
    (expected_gradient,) = torch.autograd.grad(expected, data["log_probs"])
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-9)
    assert torch.count_nonzero(gradient[~data["loss_mask"]]) == 0
    assert torch.count_nonzero(gradient) > 0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "mse"])
def test_entropy_bonus_and_kl_term(estimator):
    data = columns()
    weights = weights_of(data, "token-mean")
    config = AlgorithmConfig(entropy_coefficient=0.1, kl_in_loss=0.5, kl_estimator=estimator)
    loss, metrics = policy_loss(PolicyLossInputs(**data, loss_weights=weights), config.objective)
    plain, _ = policy_loss(PolicyLossInputs(**data, loss_weights=weights), AlgorithmConfig().objective)
    mask = data["loss_mask"]
    d = (data["log_probs"] - data["ref_log_probs"])[mask]
    kl = {"k1": d, "k2": d**2 / 2, "mse": d**2 / 2, "abs": d.abs(), "k3": torch.exp(-d) - 1 + d}[estimator].mean()
    entropy = data["entropy"][mask].mean()
    torch.testing.assert_close(loss, plain - 0.1 * entropy + 0.5 * kl, rtol=1e-6, atol=1e-9)
    assert reduce_metrics([metrics])["actor/kl_loss"] == pytest.approx(kl.item())
    assert reduce_metrics([metrics])["actor/entropy"] == pytest.approx(entropy.item())


def test_metrics_mean_what_they_say():
    log_probs = torch.log(torch.tensor([0.5, 0.5, 0.5, 0.5]))
    old = torch.log(torch.tensor([0.25, 0.25, 1.0, 0.1]))
    data = PolicyLossInputs(
        log_probs=log_probs,
        old_log_probs=old,
        advantages=torch.tensor([1.0, -1.0, -1.0, -1.0]),
        loss_mask=torch.ones(4, dtype=torch.bool),
        loss_weights=torch.full((4,), 0.25),
        sequence_ids=torch.zeros(4, dtype=torch.int64),
    )
    metrics = reduce_metrics([policy_loss(data, AlgorithmConfig(dual_clip=3.0).objective).metrics])
    # Ratios 2, 2, .5, 5: up-clipped; free (A < 0, ratio above); low-clipped; bounded by dual clip.
    assert metrics["actor/pg_clipfrac"] == 0.5
    assert metrics["actor/pg_clipfrac_lower"] == 0.25
    assert metrics["actor/pg_loss"] == pytest.approx((-1.28 + 2.0 + 0.8 + 3.0) / 4)
    assert metrics["actor/ppo_kl"] == pytest.approx((old - log_probs).mean().item())
    assert "actor/entropy" not in metrics


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    name=st.sampled_from(LOSSES),
    aggregation=st.sampled_from(AGGREGATIONS),
    seed=st.integers(0, 5),
)
def test_any_micro_batching_gives_the_same_loss_gradient_and_metrics(lengths, cuts, name, aggregation, seed):
    config = AlgorithmConfig(policy_loss=name, entropy_coefficient=0.01, kl_in_loss=0.1, dual_clip=3.0)
    data = columns(lengths, seed)
    weights = weights_of(data, aggregation)
    whole = policy_loss(PolicyLossInputs(**data, loss_weights=weights), config.objective)
    (expected,) = torch.autograd.grad(whole.loss, data["log_probs"], retain_graph=True)

    parts = []
    for micro_batch in range(4):
        rows = [row for row in range(len(lengths)) if cuts[row] == micro_batch]
        if rows:
            # Whole sequences, in another order than in the batch.
            take = torch.cat([torch.nonzero(data["sequence_ids"] == row).squeeze(1) for row in reversed(rows)])
            cut = {key: column[take] for key, column in data.items()}
            parts.append(policy_loss(PolicyLossInputs(**cut, loss_weights=weights[take]), config.objective))
    total = torch.stack([part.loss for part in parts]).sum()
    torch.testing.assert_close(total, whole.loss, rtol=1e-9, atol=1e-12)
    (gradient,) = torch.autograd.grad(total, data["log_probs"])
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)
    summed = reduce_metrics(part.metrics for part in parts)
    assert summed == pytest.approx(reduce_metrics([whole.metrics]), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_denominators_before_and_after_rejection(aggregation):
    mask = torch.tensor([1, 1, 1, 1, 1, 0], dtype=torch.bool)
    ids = torch.tensor([0, 0, 1, 1, 1, 2])
    keep = torch.tensor([0, 0, 1, 1, 0, 1], dtype=torch.bool)
    unit = {
        "token-mean": (5, 2),
        "seq-mean-token-sum": (2, 1),
        "seq-mean-token-mean": (6, 2),
        "seq-mean-token-sum-norm": (20, 10),
    }[aggregation]
    for denominator, divisor in zip(("pre", "post"), unit, strict=True):
        bound = loss_aggregations.bind(aggregation)
        weights = token_weights(bound, mask, ids, 3, keep, denominator, max_response_length=10)
        assert weights.tolist() == pytest.approx([0, 0, 1 / divisor, 1 / divisor, 0, 0])


def test_rejected_and_tool_tokens_cannot_poison_the_loss():
    data = columns([4, 4])
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 1, 1], dtype=torch.bool)
    keep = torch.tensor([1, 1, 1, 1, 1, 0, 1, 1], dtype=torch.bool)
    old = data["old_log_probs"].clone()
    old[2], old[5] = float("nan"), -1e30
    data |= {"loss_mask": mask, "old_log_probs": old}
    weights = token_weights(loss_aggregations.bind("token-mean"), mask, data["sequence_ids"], 2, keep)
    for name in LOSSES:
        loss, metrics = policy_loss(
            PolicyLossInputs(**data, loss_weights=weights), AlgorithmConfig(policy_loss=name).objective
        )
        (gradient,) = torch.autograd.grad(loss, data["log_probs"])
        assert bool(torch.isfinite(loss)) and bool(torch.isfinite(gradient).all())
        assert gradient[2] == 0 and (name == "gspo" or gradient[5] == 0)
        assert all(math.isfinite(value) for value in reduce_metrics([metrics]).values())


@pytest.mark.parametrize("estimator", kl_estimators.names)
@pytest.mark.parametrize("name", LOSSES)
def test_what_a_token_without_loss_holds_reaches_neither_loss_nor_gradient(name, estimator):
    config = AlgorithmConfig(policy_loss=name, dual_clip=3.0, kl_in_loss=0.1, kl_estimator=estimator).objective
    data = columns()
    keep = data["sequence_ids"] != 1
    weights = weights_of(data, "token-mean", keep_mask=keep)
    rejected = weights == 0
    floats = ("log_probs", "old_log_probs", "advantages", "importance_weights", "ref_log_probs")

    def learn(garbage, columns_with_it):
        changed = {key: torch.where(rejected, garbage, data[key].detach()) for key in columns_with_it}
        log_probs = changed.pop("log_probs", data["log_probs"]).detach().requires_grad_()
        inputs = PolicyLossInputs(**{**data, **changed, "log_probs": log_probs}, loss_weights=weights)
        loss = policy_loss(inputs, config).loss
        return loss.detach(), torch.autograd.grad(loss, log_probs)[0]

    expected = learn(0.0, floats)
    assert bool(torch.isfinite(expected[1]).all()) and not bool(expected[1][rejected].any())
    for garbage in (float("nan"), float("inf"), float("-inf")):
        for key in floats:
            torch.testing.assert_close(learn(garbage, [key]), expected, rtol=0, atol=0)
        torch.testing.assert_close(learn(garbage, floats), expected, rtol=0, atol=0)


def test_everything_rejected_is_a_zero_loss():
    data = columns()
    nothing = torch.zeros_like(data["loss_mask"])
    for denominator in ("pre", "post"):
        weights = weights_of(data, "seq-mean-token-mean", keep_mask=nothing, denominator=denominator)
        loss, metrics = policy_loss(PolicyLossInputs(**data, loss_weights=weights), AlgorithmConfig().objective)
        assert loss.item() == 0.0
        assert reduce_metrics([metrics])["actor/pg_clipfrac"] == 0.0


def test_bypass_mode_rejects_inside_the_loss():
    data = columns()
    difference = torch.zeros_like(data["old_log_probs"])
    difference[data["sequence_ids"] == 1] = 0.5
    data["old_log_probs"] = data["log_probs"].detach() - difference
    weights = weights_of(data, "token-mean")
    rules = RolloutCorrectionConfig(rejection=["geometric_ratio 0.9 1.1"], bypass_old_log_probs=True)
    loss, _ = policy_loss(
        PolicyLossInputs(**data, loss_weights=weights), replace(AlgorithmConfig(), rollout_correction=rules).objective
    )
    (gradient,) = torch.autograd.grad(loss, data["log_probs"])
    kept = data["loss_mask"] & (data["sequence_ids"] != 1)
    assert torch.equal(gradient != 0, kept)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=2, max_size=7).filter(any),
    cuts=st.lists(st.integers(1, 6), max_size=3),
    name=st.sampled_from(LOSSES),
    level=st.sampled_from(["token", "sequence", "geometric"]),
    mode=st.sampled_from(["none", "truncate", "clip", "mask"]),
    rules=st.sampled_from([[], ["geometric_ratio 0.8 1.2"], ["token_k2 -inf 0.5", "sequence_max_k3 -inf 0.6"]]),
    seed=st.integers(0, 99),
)
def test_the_updates_own_old_log_probs_are_those_of_a_pass(lengths, cuts, name, level, mode, rules, seed):
    """Corrected micro-batch by micro-batch, or before the update over all responses: one loss and one gradient."""
    data = columns(lengths, seed)
    rollout = data["old_log_probs"]
    ids, mask, count = data["sequence_ids"], data["loss_mask"], len(lengths)
    if seed % 2:
        rollout = torch.where(ids == ids[0], torch.nan, rollout)
    correction = RolloutCorrectionConfig(level=level, mode=mode, lower=0.7, upper=1.5, rejection=rules)
    objective = AlgorithmConfig(policy_loss=name, entropy_coefficient=0.1, kl_in_loss=0.2).objective
    weights = weights_of({**data, "sequence_ids": ids}, "token-mean")
    own = data["log_probs"].detach()

    whole = rollout_correction(own, rollout, mask, ids, count, torch.zeros_like(ids), correction)
    separate = policy_loss(
        PolicyLossInputs(
            **data | {"old_log_probs": own, "importance_weights": whole.importance_weights},
            loss_weights=torch.where(whole.keep_mask, weights, 0.0),
        ),
        objective,
    )
    (expected,) = torch.autograd.grad(separate.loss, data["log_probs"], retain_graph=True)

    bounds = sorted({0, *(cut for cut in cuts if cut < count), count})
    parts, kept = [], []
    for low, high in zip(bounds, bounds[1:], strict=False):
        chosen = (ids >= low) & (ids < high)
        columns_of_part = {column: values[chosen] for column, values in (data | {"loss_weights": weights}).items()}
        inputs, keep = with_own_old_log_probs(PolicyLossInputs(**columns_of_part), rollout[chosen], correction)
        parts.append(policy_loss(inputs, objective))
        kept.append(keep)
    (gradient,) = torch.autograd.grad(sum(part.loss for part in parts), data["log_probs"])
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(torch.cat(kept), whole.keep_mask)
    found, wanted = reduce_metrics(part.metrics for part in parts), reduce_metrics([separate.metrics])
    assert found == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("policy", LOSSES)
def test_a_response_that_the_engine_gave_no_log_prob_leaves_the_others_gradient(policy):
    data = columns()
    rules = RolloutCorrectionConfig(mode="none", rejection=[], bypass_old_log_probs=True)
    config, weights = AlgorithmConfig(policy_loss=policy), weights_of(data, "token-mean")
    gradients = []
    for value in (0.0, float("nan"), float("-inf")):
        old = data["old_log_probs"].clone()
        broken = data["sequence_ids"] == 1
        old[torch.nonzero(broken & data["loss_mask"])[0]] = value
        inputs = PolicyLossInputs(**{**data, "old_log_probs": old}, loss_weights=weights)
        (gradient,) = torch.autograd.grad(
            policy_loss(inputs, replace(config, rollout_correction=rules).objective).loss, data["log_probs"]
        )
        gradients.append(gradient)
    torch.testing.assert_close(gradients[1], torch.where(broken, 0.0, gradients[0]))
    torch.testing.assert_close(gradients[2], gradients[1])


def test_what_settings_need_is_asked_for():
    data = columns()
    weights = weights_of(data, "token-mean")
    bare = {name: data[name] for name in ("log_probs", "old_log_probs", "advantages", "loss_mask", "sequence_ids")}
    inputs = PolicyLossInputs(**bare, loss_weights=weights)
    with pytest.raises(ValueError, match="needs the policy's entropy"):
        policy_loss(inputs, AlgorithmConfig(entropy_coefficient=0.1).objective)
    with pytest.raises(ValueError, match="needs the reference policy's log-probs"):
        policy_loss(inputs, AlgorithmConfig(kl_in_loss=0.1).objective)
    with pytest.raises(ValueError, match="algorithm.policy_loss='ppo' is not one of clip, gspo"):
        policy_loss(inputs, AlgorithmConfig(policy_loss="ppo").objective)
    with pytest.raises(ValueError, match="data.max_response_length"):
        token_weights(loss_aggregations.bind("seq-mean-token-sum-norm"), data["loss_mask"], data["sequence_ids"], 5)
    with pytest.raises(ValueError, match="equally long"):
        policy_loss(replace(inputs, advantages=torch.zeros(2)), AlgorithmConfig().objective)


@pytest.mark.parametrize("column", ["old_values", "returns"])
def test_values_of_tokens_without_loss_teach_the_critic_nothing(column):
    data = columns()
    weights = weights_of(data, "token-mean")
    given = {"values": data["log_probs"], "old_values": data["old_log_probs"], "returns": data["advantages"]}
    gradients = []
    for garbage in (0.0, float("nan"), float("inf")):
        given[column] = torch.where(weights == 0, garbage, given[column])
        loss = value_loss(**given, loss_mask=data["loss_mask"], loss_weights=weights, value_clip=0.2).loss
        gradients += torch.autograd.grad(loss, data["log_probs"])
    assert bool(torch.isfinite(gradients[0]).all())
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])


@pytest.mark.parametrize("value_clip", [None, 0.2])
def test_value_loss_equals_the_formula(value_clip):
    data = columns()
    mask, weights = data["loss_mask"], weights_of(data, "token-mean")
    values, old, returns = data["log_probs"], data["old_log_probs"], data["advantages"]
    loss, metrics = value_loss(values, old, returns, mask, weights, value_clip)
    errors = (values - returns) ** 2
    if value_clip is not None:
        errors = torch.max(errors, (old + (values - old).clamp(-value_clip, value_clip) - returns) ** 2)
    expected = 0.5 * errors[mask].mean()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-9)
    for got, want in zip(torch.autograd.grad(loss, values), torch.autograd.grad(expected, values), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-9)
    reduced = reduce_metrics([metrics])
    assert reduced["critic/vf_loss"] == pytest.approx(expected.item())
    assert (reduced["critic/vf_clipfrac"] > 0) == (value_clip is not None)
