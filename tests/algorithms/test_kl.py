import math

import pytest
import torch

from megatron_retool.algorithms.kl import KLController, kl_estimators, kl_penalty, kl_reward
from megatron_retool.algorithms.kl_schedule import kl_coefficient
from megatron_retool.registry import ExtensionError

K1, K2, K3 = (kl_estimators.bind(name) for name in ("k1", "k2", "k3"))


def test_k1_and_k3_are_unbiased_by_exact_enumeration():
    generator = torch.Generator().manual_seed(0)
    log_p = torch.log_softmax(torch.randn(7, generator=generator, dtype=torch.float64), 0)
    log_ref = torch.log_softmax(torch.randn(7, generator=generator, dtype=torch.float64), 0)
    divergence = (log_p.exp() * (log_p - log_ref)).sum()
    for estimator in (K1, K3):
        torch.testing.assert_close((log_p.exp() * kl_penalty(log_p, log_ref, estimator)).sum(), divergence)


def test_gradient_of_k2_is_the_gradient_of_the_divergence():
    logits = torch.randn(5, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    log_ref = torch.log_softmax(torch.arange(5, dtype=torch.float64), 0)
    log_p = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((log_p.exp() * (log_p - log_ref)).sum(), logits, retain_graph=True)
    (sampled,) = torch.autograd.grad((log_p.exp().detach() * kl_penalty(log_p, log_ref, K2)).sum(), logits)
    torch.testing.assert_close(sampled, exact)


@pytest.mark.parametrize("estimator", [kl_estimators.bind(name) for name in kl_estimators.names])
def test_equal_policies_have_no_penalty_and_far_ones_stay_finite(estimator):
    log_probs = torch.tensor([-1.0, -200.0, 0.0])
    assert torch.count_nonzero(kl_penalty(log_probs, log_probs, estimator)) == 0
    assert bool(torch.isfinite(kl_penalty(log_probs, log_probs.flip(0), estimator)).all())


def test_k3_keeps_its_digits_for_small_differences():
    tiny = kl_penalty(torch.tensor([-1.0]) + 2**-12, torch.tensor([-1.0]), K3)
    assert tiny.item() == pytest.approx(2**-25, rel=1e-2)


def test_k3_is_limited_and_has_no_gradient_beyond():
    log_probs = torch.tensor([-2.0, -3.0, -8.0, -30.0, -0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -3.0, -1.0, -1.0, -60.0], dtype=torch.float64)
    penalty = kl_penalty(log_probs, reference, K3)
    (gradient,) = torch.autograd.grad(penalty.sum(), log_probs)
    assert penalty.tolist() == pytest.approx([math.e - 2, 0.0, 10.0, 10.0, 10.0])
    assert gradient.tolist() == pytest.approx([1 - math.e, 0.0, 0.0, 0.0, 0.0])
    free = kl_penalty(log_probs, reference, kl_estimators.bind("k3", {"kl_k3_limit": None}))
    (gradient,) = torch.autograd.grad(free.sum(), log_probs)
    assert free[2].item() == pytest.approx(math.exp(7) - 8)
    # Never the wrong sign: a likelihood far below the reference's is not lowered further.
    assert gradient[2].item() == pytest.approx(1 - math.exp(7)) and gradient[3].item() == 0.0


def test_kl_as_a_reward():
    rewards, mean = kl_reward(
        torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.5, -1.0, 5.0]), torch.tensor([True, True, False]), 0.2, K1
    )
    assert rewards.tolist() == pytest.approx([-0.1, 0.0, 0.0])
    assert mean == pytest.approx(0.25)
    assert kl_reward(torch.zeros(1), torch.ones(1), torch.tensor([False]), 1.0, K3)[1] == 0.0


def test_controller_moves_towards_its_target():
    controller = KLController(0.1, target=0.01, horizon=1000)
    assert controller.updated(0.02, 500).coefficient == pytest.approx(0.1 * (1 + 0.2 * 0.5))
    assert controller.updated(0.0099, 500).coefficient == pytest.approx(0.1 * (1 - 0.01 * 0.5))
    assert controller.updated(0.0, 1000).coefficient == pytest.approx(0.08)
    assert KLController(0.1).updated(5.0, 10**6).coefficient == 0.1
    with pytest.raises(ValueError, match="target > 0"):
        KLController(0.1, target=0.0)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.2, 0.2, 0.2, 0.2, 0.2, 0.2]),
        ("linear", [0.2, 0.16, 0.12, 0.08, 0.04, 0.04]),
        ("cosine", [0.2, 0.2 - 0.16 * (1 - math.sqrt(0.5)) / 2, 0.12, 0.04 + 0.16 * (1 - math.sqrt(0.5)) / 2, 0.04,
                    0.04]),
    ],
)  # fmt: skip
def test_a_fixed_schedule_by_hand(schedule, expected):
    found = [kl_coefficient(schedule, 0.2, 0.04, 4, step) for step in (1, 2, 3, 4, 5, 500)]
    assert found == pytest.approx(expected)
    assert kl_coefficient(schedule, 0.2, 0.04, 4, 0) == pytest.approx(0.2), "before the first step"


def test_a_schedule_stays_between_its_ends_and_may_grow():
    for schedule in ("linear", "cosine"):
        values = [kl_coefficient(schedule, 0.01, 0.3, 7, step) for step in range(1, 20)]
        assert values == sorted(values) and values[0] == 0.01 and values[-1] == pytest.approx(0.3)
    with pytest.raises(ValueError, match="'steep' is not one of constant, linear, cosine"):
        kl_coefficient("steep", 0.1, 0.0, 1, 1)


def test_unknown_estimator_is_refused():
    with pytest.raises(ExtensionError, match="kl_estimator='k4' is not one of k1, "):
        kl_estimators.bind("k4")


def test_an_estimator_of_ones_own_gives_one_number_a_token(tmp_path):
    file = tmp_path / "my_kl.py"
    file.write_text(
        "def huber(log_probs, ref_log_probs, *, width=1.0):\n"
        "    import torch\n"
        "    return torch.nn.functional.huber_loss(log_probs, ref_log_probs, reduction='none', delta=width)\n"
        "def mean(log_probs, ref_log_probs):\n    return (log_probs - ref_log_probs).mean()\n"
    )
    huber = kl_estimators.bind(f"{file}:huber", {"width": 0.5})
    assert kl_penalty(torch.tensor([-1.0]), torch.tensor([-3.0]), huber).tolist() == pytest.approx([0.875])
    with pytest.raises(ExtensionError, match=r"my_kl.py:mean: it returned \[\] for 1 tokens: return a tensor \[T\]"):
        kl_penalty(torch.tensor([-1.0]), torch.tensor([-3.0]), kl_estimators.bind(f"{file}:mean"))


@pytest.mark.parametrize("estimator", [kl_estimators.bind(name) for name in kl_estimators.names])
@pytest.mark.parametrize("missing", [float("nan"), float("-inf")])
def test_a_token_without_a_log_prob_spoils_neither_rewards_nor_mean(estimator, missing):
    log_probs, reference = torch.tensor([-1.0, missing, -2.0]), torch.tensor([-1.5, -1.0, -2.0])
    rewards, mean = kl_reward(log_probs, reference, torch.ones(3, dtype=torch.bool), 0.1, estimator)
    expected = kl_penalty(log_probs, reference, estimator)
    assert rewards.tolist() == pytest.approx([-0.1 * float(expected[0]), 0.0, 0.0])
    assert mean == pytest.approx(float(expected[0]) / 2)
