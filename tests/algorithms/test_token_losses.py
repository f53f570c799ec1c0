"""Token losses and their gradients against formulas of one target at a time; wrong requests are refused at once."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_retool.algorithms.policy_loss import PolicyLossInputs, policy_loss
from megatron_retool.algorithms.token_losses import TokenLossInputs, bind_token_loss, token_loss, token_losses
from megatron_retool.config import AlgorithmConfig
from megatron_retool.target_sequences import RequestRefused, TokenLoss

COLUMNS = ("weights", "rollout_log_probs", "advantages", "sequence_ratio_mask", "clip_low", "clip_high")
LENGTHS = (3, 1, 5)
ARGUMENTS = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low": 0.7, "clip_high": 1.1},
    "cispo": {"clip_low": 0.7, "clip_high": 1.1},
    "dro": {"beta": 0.3},
    "gspo": {"clip_low": 0.9, "clip_high": 1.05},
}


def columns(seed: int, thresholds: bool) -> TokenLossInputs:
    """float64 columns of three sequences; some targets count for a sequence's ratio and some do not."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64)

    log_probs = -normal().abs()
    given = {
        "weights": normal(),
        "rollout_log_probs": log_probs + 0.3 * normal(),
        "advantages": normal(),
        "sequence_ratio_mask": (normal() > -0.5).double(),
    }
    if thresholds:
        given |= {"clip_low": 1 - 0.1 * normal().abs(), "clip_high": 1 + 0.1 * normal().abs()}
    ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)) + 7
    return TokenLossInputs(log_probs.requires_grad_(), given, ids)


def by_hand(name: str, inputs: TokenLossInputs, arguments: dict[str, float]) -> tuple[list[float], list[float]]:
    """Loss and derivative of each target, written with plain numbers."""
    p = inputs.log_probs.tolist()
    column = {key: values.tolist() for key, values in inputs.columns.items()}
    ids, losses, slopes = inputs.sequence_ids.tolist(), [], []
    for i, log_prob in enumerate(p):
        q, advantage = column["rollout_log_probs"][i], column["advantages"][i]
        ratio = math.exp(log_prob - q)
        low, high = arguments.get("clip_low", 0.8), arguments.get("clip_high", 1.2)
        if "clip_low" in column:
            low, high = column["clip_low"][i], column["clip_high"][i]
        if name == "gspo":
            counted = [j for j in range(len(p)) if ids[j] == ids[i] and column["sequence_ratio_mask"][j]]
            mean = sum(p[j] - column["rollout_log_probs"][j] for j in counted) / max(len(counted), 1)
            ratio = math.exp(mean)
        clipped = min(max(ratio, low), high)
        if name == "cross_entropy":
            loss, slope = -column["weights"][i] * log_prob, -column["weights"][i]
        elif name == "importance_sampling":
            loss = slope = -ratio * advantage
        elif name in ("ppo", "gspo"):
            loss = -min(ratio * advantage, clipped * advantage)
            slope = -ratio * advantage if ratio * advantage <= clipped * advantage else 0.0
        elif name == "cispo":
            loss, slope = -clipped * log_prob * advantage, -clipped * advantage
        else:
            loss = -(log_prob * advantage - arguments["beta"] / 2 * (log_prob - q) ** 2)
            slope = -(advantage - arguments["beta"] * (log_prob - q))
        losses.append(loss)
        slopes.append(slope)
    return losses, slopes


@pytest.mark.parametrize("name", ARGUMENTS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), thresholds=st.booleans())
def test_losses_and_gradients_are_the_formulas(name: str, seed: int, thresholds: bool) -> None:
    inputs = columns(seed, thresholds)
    losses = token_loss(inputs, bind_token_loss(TokenLoss(name, ARGUMENTS[name]), COLUMNS))
    expected, slopes = by_hand(name, inputs, ARGUMENTS[name])
    assert losses.tolist() == pytest.approx(expected, rel=1e-12)
    (gradient,) = torch.autograd.grad(losses.sum(), inputs.log_probs)
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-12)


def test_every_built_in_loss_is_tested() -> None:
    assert set(ARGUMENTS) == set(token_losses.names)


@pytest.mark.parametrize(("name", "policy"), [("ppo", "clip"), ("cispo", "cispo"), ("gspo", "gspo")])
def test_losses_are_those_of_a_training_run_with_weights_of_one(name: str, policy: str) -> None:
    inputs = columns(3, thresholds=False)
    everything = torch.ones(sum(LENGTHS), dtype=torch.float64)
    inputs.columns["sequence_ratio_mask"][:] = 1
    losses = token_loss(inputs, bind_token_loss(TokenLoss(name), COLUMNS[:4]))
    objective = AlgorithmConfig(policy_loss=policy, clip_ratio_low=0.2, clip_ratio_high=0.2).objective
    run = PolicyLossInputs(
        log_probs=inputs.log_probs,
        old_log_probs=inputs.columns["rollout_log_probs"],
        advantages=inputs.columns["advantages"],
        loss_mask=everything.bool(),
        loss_weights=everything,
        sequence_ids=inputs.sequence_ids,
    )
    torch.testing.assert_close(losses.sum(), policy_loss(run, objective).loss, rtol=1e-12, atol=0)


def test_a_ratio_far_from_one_stays_finite() -> None:
    far = torch.tensor([-1.0, -500.0], requires_grad=True)
    given = {"rollout_log_probs": torch.tensor([-900.0, -1.0]), "advantages": torch.ones(2)}
    losses = token_loss(
        TokenLossInputs(far, given, torch.zeros(2, dtype=torch.int64)),
        bind_token_loss(TokenLoss("importance_sampling"), given),
    )
    assert bool(torch.isfinite(losses).all())


OWN = """
import torch

def squared(inputs, *, power=2.0):
    return (-inputs.log_probs) ** power * inputs.column("weights")

def summed(inputs):
    return inputs.log_probs.sum()

def constant(inputs):
    return inputs.log_probs.detach()

def broken(inputs):
    return inputs.log_probs / inputs.scale
"""


def own_loss(directory: Path, function: str) -> str:
    (directory / "my_losses.py").write_text(OWN)
    return f"{directory / 'my_losses.py'}:{function}"


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    inputs = columns(1, thresholds=False)
    bound = bind_token_loss(TokenLoss(own_loss(tmp_path, "squared"), {"power": 3.0}), ["weights"])
    torch.testing.assert_close(token_loss(inputs, bound), (-inputs.log_probs) ** 3 * inputs.columns["weights"])


REFUSED: dict[str, tuple[str, dict[str, float], tuple[str, ...], str]] = {
    "unknown": ("pppo", {}, COLUMNS, "loss='pppo' is not one of cross_entropy, .*the nearest is ppo"),
    "unknown argument": ("ppo", {"clip": 0.1}, COLUMNS, "loss.arguments.clip: ppo has no parameter of that name"),
    "no number": ("dro", {"beta": math.nan}, COLUMNS, "loss.arguments.beta=nan: give a finite number"),
    "missing column": (
        "ppo",
        {},
        ("advantages",),
        "loss=ppo: rollout_log_probs: the loss needs this column, and those given are advantages: add it",
    ),
    "one number": ("summed", {}, (), "it returned a float32 tensor of shape .*: return the loss of each target"),
    "no gradient": ("constant", {}, (), "it has no gradient to inputs.log_probs"),
    "raises": ("broken", {}, (), "broken raised AttributeError at line 14: .*has no attribute 'scale'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_with_a_request_is_said_before_a_pass(case: str, tmp_path: Path) -> None:
    name, arguments, given_columns, message = REFUSED[case]
    if f"def {name}(" in OWN:
        name = own_loss(tmp_path, name)
    with pytest.raises(RequestRefused, match=message):
        bind_token_loss(TokenLoss(name, arguments), given_columns)
