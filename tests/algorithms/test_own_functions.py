"""Losses and advantage estimators of one's own: what they are given, what they declare, what is said when they fail."""

import textwrap

import pytest
import torch

from megatron_retool.algorithms.advantages import AdvantageInputs, compute_advantages
from megatron_retool.algorithms.loss_aggregation import token_weights
from megatron_retool.algorithms.policy_loss import PolicyLossInputs, policy_loss, reduce_metrics
from megatron_retool.cluster.placement import needs_critic
from megatron_retool.config import AlgorithmConfig, ConfigError, load_config, save_config
from megatron_retool.registry import ExtensionError, Need
from tests.algorithms.ragged_batches import ragged

NO_DYNAMIC_SAMPLING = "algorithm.dynamic_sampling.enable=false"
ONE_RESPONSE = ["rollout.train.n=1", "learner.mini_batch_size=1"]


@pytest.fixture
def own(tmp_path):
    """Write a module of functions; returns the target of the one called ``name``."""

    def write(source, name="own"):
        path = tmp_path / "own.py"
        path.write_text("import torch\nfrom megatron_retool.registry import needs\n" + textwrap.dedent(source))
        return f"{path}:{name}"

    return write


def loss_inputs(seed=0, **columns):
    ids, mask = ragged([5, 8, 3, 6], seed=seed)
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(len(ids), generator=generator)
    given = {
        "log_probs": log_probs.clone().requires_grad_(),
        "old_log_probs": log_probs + 0.3 * torch.randn(len(ids), generator=generator),
        "advantages": torch.randn(len(ids), generator=generator),
        "loss_mask": mask,
        "loss_weights": token_weights(AlgorithmConfig().aggregation, mask, ids, 4),
        "sequence_ids": ids,
    }
    return PolicyLossInputs(**given | columns)


def advantage_inputs(**columns):
    ids, mask = ragged([5, 8, 3, 6])
    return AdvantageInputs(torch.tensor([1.0, -1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1]), mask, ids, **columns)


def test_an_own_loss_has_its_settings_and_metrics_and_everything_common_around_it(own, tmp_path):
    target = own(
        """
        def own(inputs, *, clip_ratio_high, slope=1.0):
            ratio = inputs.log_ratio.exp()
            losses = -slope * inputs.advantages * ratio.clamp(max=1 + clip_ratio_high)
            return losses, {"high": ratio > 1 + clip_ratio_high, "mine/ratio": ratio}
        """
    )
    overrides = [f"algorithm.policy_loss={target}", "algorithm.policy_loss_kwargs.slope=0.5"]
    config = load_config(None, [*overrides, "algorithm.clip_ratio_high=0.1"])
    config.algorithm.dry_run()
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config

    # A rejected token whose old log-prob is unknown harms neither loss nor gradient.
    inputs = loss_inputs(importance_weights=torch.full((22,), 2.0))
    sampled = torch.nonzero(inputs.loss_mask).squeeze(1)
    inputs.loss_weights[sampled[0]], inputs.old_log_probs[sampled[0]] = 0.0, float("nan")
    loss, metrics = policy_loss(inputs, config.algorithm.objective)
    rest = sampled[1:]
    ratio = (inputs.log_probs - inputs.old_log_probs)[rest].exp()
    expected = -2.0 * 0.5 * (inputs.advantages[rest] * ratio.clamp(max=1.1)).sum() / len(sampled)
    torch.testing.assert_close(loss, expected)
    assert bool(torch.isfinite(torch.autograd.grad(loss, inputs.log_probs)[0]).all())
    metrics = reduce_metrics([metrics])
    assert metrics["actor/high"] == pytest.approx((ratio > 1.1).float().mean().item())
    assert metrics["mine/ratio"] == pytest.approx(ratio.mean().item())
    assert set(metrics) == {"actor/high", "mine/ratio", "actor/pg_loss", "actor/ppo_kl"}


def test_what_a_loss_declares_the_run_provides(own):
    target = own(
        """
        @needs("reference", "critic", "groups")
        def own(inputs):
            return (inputs.log_probs - inputs.ref_log_probs) * (inputs.returns - inputs.values)
        """
    )
    override = f"algorithm.policy_loss={target}"
    with pytest.raises(ConfigError, match=r"algorithm.policy_loss=.*own.py:own with .*dynamic_sampling.enable=true"):
        load_config(None, [override])
    with pytest.raises(ConfigError, match=r"own.py:own compares answers of a group: rollout.train.n"):
        load_config(None, [override, NO_DYNAMIC_SAMPLING, *ONE_RESPONSE, "algorithm.advantage=reinforce_plus_plus"])
    config = load_config(None, [override, NO_DYNAMIC_SAMPLING])
    config.algorithm.dry_run()
    assert needs_critic(config.algorithm) and not needs_critic(load_config().algorithm)
    assert Need.REFERENCE in config.algorithm.needs and Need.REFERENCE not in load_config().algorithm.needs
    assert load_config(None, ["algorithm.kl_in_reward=0.1"]).algorithm.needs[Need.REFERENCE] == (
        "algorithm.kl_in_reward=0.1"
    )


def test_an_own_estimator_has_its_settings_and_one_advantage_for_each_response_is_enough(own):
    target = own(
        """
        @needs("groups")
        def own(batch, *, normalize_by_std, scale=1.0):
            bonus = torch.tensor([info["length_bonus"] for info in batch.reward_info])
            return batch.per_token(scale * batch.scores + bonus + normalize_by_std)
        """
    )
    algorithm = AlgorithmConfig(advantage=target, advantage_kwargs={"scale": 2.0}, normalize_by_std=False)
    load_config(None, [f"algorithm.advantage={target}"]).algorithm.dry_run()
    batch = advantage_inputs(reward_info=[{"length_bonus": 0.5}] * 4)
    advantages, returns = compute_advantages(algorithm.estimator, batch)
    expected = torch.tensor([2.5, -1.5, 0.5, 2.5])[batch.sequence_ids]
    torch.testing.assert_close(advantages, torch.where(batch.loss_mask, expected, 0.0))
    torch.testing.assert_close(returns, batch.per_token(batch.rewards))
    with pytest.raises(ConfigError, match="own.py:own compares answers of a group"):
        load_config(None, [f"algorithm.advantage={target}", *ONE_RESPONSE])


def test_an_own_estimator_on_a_critic(own):
    target = own(
        """
        @needs("critic")
        def own(batch, *, gamma):
            returns = batch.per_token(gamma * batch.scores)
            return torch.where(batch.loss_mask, returns - batch.values, 0.0), returns
        """
    )
    override = f"algorithm.advantage={target}"
    with pytest.raises(ConfigError, match=r"algorithm.advantage=.*:own with .*dynamic_sampling.enable=true"):
        load_config(None, [override])
    config = load_config(None, [override, NO_DYNAMIC_SAMPLING, "algorithm.gamma=0.5"])
    config.algorithm.dry_run()
    assert needs_critic(config.algorithm)
    batch = advantage_inputs(values=torch.full((22,), 0.25))
    advantages, returns = compute_advantages(config.algorithm.estimator, batch)
    torch.testing.assert_close(returns, batch.per_token(0.5 * batch.rewards))
    torch.testing.assert_close(advantages, torch.where(batch.loss_mask, returns - 0.25, 0.0))
    with pytest.raises(ValueError, match="own.py:own needs the critic's values"):
        compute_advantages(config.algorithm.estimator, advantage_inputs())
    # A critic that diverged is a step to leave out, not an estimator to blame.
    compute_advantages(config.algorithm.estimator, advantage_inputs(values=torch.full((22,), float("nan"))))


def test_entropy_before_the_update_is_not_there_in_bypass_mode(own):
    target = own("@needs('entropy')\ndef own(batch): return batch.per_token(batch.scores) * batch.entropy")
    override = f"algorithm.advantage={target}"
    load_config(None, [override]).algorithm.dry_run()
    bypass = ["bypass_old_log_probs=true", "mode=none"]
    with pytest.raises(ConfigError, match="needs the entropy at each token before the update, which .*bypass"):
        load_config(None, [override, *(f"algorithm.rollout_correction.{setting}" for setting in bypass)])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("policy_loss=clipp", "algorithm.policy_loss='clipp' is not one of clip, .*; the nearest is clip"),
        ("advantage=grpoo", "algorithm.advantage='grpoo' is not one of grpo, .*; the nearest is"),
        ("policy_loss=nowhere:loss", "there is no module nowhere: install it"),
        ("policy_loss_kwargs={hihg: 1}", r"algorithm.policy_loss_kwargs.hihg: clip has no parameter of that name"),
        ("advantage_kwargs={lam: 1}", r"algorithm.advantage_kwargs.lam: grpo has no parameter of that name"),
    ],
)
def test_the_configuration_refuses_what_cannot_be_loaded_or_set(override, said):
    with pytest.raises(ConfigError, match=said):
        load_config(None, [f"algorithm.{override}"])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return inputs.lgo_probs", r"own raised AttributeError at line 4: .*lgo_probs"),
        (
            "return (inputs.advantages * inputs.log_probs).sum()",
            r"the losses are a float32 tensor of shape \[\]: .*\[26\]",
        ),
        ("return {'loss': inputs.log_probs}", "it returned dict .*: return the loss of each token"),
        ("return -inputs.advantages", "no gradient to inputs.log_probs, the policy would not learn"),
        ("return -inputs.log_probs.detach()", "no gradient to inputs.log_probs"),
        ("return inputs.log_probs / (inputs.log_ratio * 0)", "a ratio near 1 is not finite: clamp"),
        ("return inputs.log_ratio.abs().sqrt()", "its gradient to inputs.log_probs is not finite"),
        ("return inputs.log_probs, {'x': 1.0}", r"its metric 'x' is float '1.0': give a value for each token"),
        ("return inputs.log_probs, {'pg_loss': inputs.log_probs}", "actor/pg_loss is a metric of every loss"),
        (
            "return inputs.log_probs, {'x': inputs.log_probs} if inputs.log_ratio.any() else {}",
            r"its metrics are \[\] in one call and \['actor/x'\] in another",
        ),
        ("return inputs.log_probs - inputs.log_probs.max()", r"called with tensors of no element, as where a rank"),
        (
            "return inputs.log_probs - inputs.ref_log_probs",
            r"None without a declared need: ref_log_probs \(@needs\('ref",
        ),
    ],
)
def test_a_dry_run_refuses_a_loss_with_key_object_and_cure(own, body, said):
    target = own(f"def own(inputs):\n    {body}\n")
    config = load_config(None, [f"algorithm.policy_loss={target}"])
    with pytest.raises(ConfigError, match=r"^algorithm.policy_loss=.*own.py:own: (.|\n)*" + said):
        config.algorithm.dry_run()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise KeyError('x')", r"own raised KeyError at line 4: .x."),
        ("return batch.rewards", r"the advantages are a float32 tensor of shape \[6\]: .*batch.per_token"),
        ("return batch.loss_mask", r"the advantages are a bool tensor"),
        ("return None", r"it returned NoneType 'None': return \(advantages, returns\)"),
        ("return torch.ones(26)", r"are not 0 at tokens that the policy did not sample"),
        ("return batch.per_token(batch.rewards / 0)", r"the advantages of response 0 are inf: guard divisions"),
        ("return batch.per_token(batch.rewards) - batch.values", r"values \(@needs\('critic'\)\)"),
    ],
)
def test_a_dry_run_refuses_an_estimator_with_key_object_and_cure(own, body, said):
    target = own(f"def own(batch):\n    {body}\n")
    config = load_config(None, [f"algorithm.advantage={target}"])
    with pytest.raises(ConfigError, match=r"^algorithm.advantage=.*own.py:own: .*" + said):
        config.algorithm.dry_run()


def test_an_own_aggregation(own):
    target = own(
        """
        def own(counts, *, power=0.5, max_response_length):
            weights = counts.clamp(min=1) ** -power / max_response_length
            return weights / (counts > 0).sum().clamp(min=1)
        """
    )
    overrides = [f"algorithm.loss_aggregation={target}", "algorithm.loss_aggregation_kwargs.power=1"]
    algorithm = load_config(None, overrides).algorithm
    algorithm.dry_run()
    mask, ids = torch.tensor([1, 1, 0, 1], dtype=torch.bool), torch.tensor([0, 0, 0, 1])
    weights = token_weights(algorithm.aggregation, mask, ids, 3, max_response_length=10)
    assert weights.tolist() == pytest.approx([0.025, 0.025, 0, 0.05])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return counts.mean()", r"it returned a float64 tensor of shape \[\]: return the weight .*\[6\]"),
        ("return counts / (counts - 4)", "a weight is not finite: guard divisions"),
        ("return 1 / count", "own raised NameError at line 4"),
    ],
)
def test_a_dry_run_refuses_an_aggregation_with_key_object_and_cure(own, body, said):
    target = own(f"def own(counts):\n    {body}\n")
    config = load_config(None, [f"algorithm.loss_aggregation={target}"])
    with pytest.raises(ConfigError, match=r"^algorithm.loss_aggregation=.*own.py:own: .*" + said):
        config.algorithm.dry_run()


def test_what_an_estimator_returns_is_checked_in_every_step(own):
    target = own("def own(batch): return batch.per_token(batch.scores / batch.scores)")
    estimator = AlgorithmConfig(advantage=target).estimator
    with pytest.raises(ExtensionError, match="the advantages of response 2 are nan"):
        compute_advantages(estimator, advantage_inputs())
