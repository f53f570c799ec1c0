"""Groups of experts chosen by their best one; tests/parity has whole models and layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_retool.learner.expert_groups import ExpertChoice, best_group_topk
from megatron_retool.learner.routing_replay import LayerReplay, _Choice

TOKENS, HIDDEN, EXPERTS, CHOSEN, FACTOR = 200, 12, 12, 3, 16.0
GROUPS = [(4, 2), (3, 1), (6, 3), (2, 2)]


def plain(scores: torch.Tensor, groups: int, limit: int) -> list[set[int]]:
    """Word for word: the devices with the highest scores, then the best experts on them."""
    found = []
    for row in scores.tolist():
        size = len(row) // groups
        best = sorted(range(groups), key=lambda group: -max(row[group * size : (group + 1) * size]))[:limit]
        allowed = [expert for group in best for expert in range(group * size, (group + 1) * size)]
        found.append(set(sorted(allowed, key=lambda expert: -row[expert])[:CHOSEN]))
    return found


@pytest.mark.parametrize(("groups", "limit"), GROUPS)
def test_the_choice(groups: int, limit: int) -> None:
    generator = torch.Generator().manual_seed(groups)
    scores = torch.randn(TOKENS, EXPERTS, generator=generator).softmax(-1)
    found, experts = best_group_topk(scores, CHOSEN, groups, limit)
    assert [set(row) for row in experts.tolist()] == plain(scores, groups, limit)
    assert torch.equal(found, scores.gather(1, experts))


@pytest.mark.parametrize(("groups", "limit"), GROUPS)
def test_gates_and_gradients_are_those_of_transformers(groups: int, limit: int) -> None:
    from transformers import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

    config = DeepseekV2Config(
        hidden_size=HIDDEN, n_routed_experts=EXPERTS, num_experts_per_tok=CHOSEN, n_group=groups, topk_group=limit,
        topk_method="group_limited_greedy", routed_scaling_factor=FACTOR, num_attention_heads=4,
    )  # fmt: skip
    theirs = DeepseekV2TopkRouter(config)
    torch.manual_seed(1)
    torch.nn.init.normal_(theirs.weight)
    hidden, pull = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, EXPERTS)
    _, gates, experts = theirs(hidden)
    expected = torch.zeros(TOKENS, EXPERTS).scatter(1, experts, gates)
    (expected * pull).sum().backward()
    weight = theirs.weight.detach().clone().requires_grad_()
    replay = LayerReplay(0, best_group_topk)
    for own in (ExpertChoice(best_group_topk), replay):
        found, chosen = routed(hidden @ weight.t(), groups, limit, own)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(chosen, expected > 0)
    (found * pull).sum().backward()
    assert weight.grad is not None and theirs.weight.grad is not None
    assert (weight.grad - theirs.weight.grad).norm() < 1e-6 * theirs.weight.grad.norm()


def routed(logits: torch.Tensor, groups: int, limit: int, own: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Megatron's own routing function, as its router calls it."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    gates, chosen = topk_routing_with_score_function(
        logits, CHOSEN, use_pre_softmax=True, num_groups=groups, group_topk=limit, scaling_factor=FACTOR,
        router_replay=own,
    )  # fmt: skip
    return gates, chosen


def test_what_is_replayed_is_counted_against_the_groups_own_choice() -> None:
    """The best expert is in group 0, the two best together in group 1, which Megatron's own choice takes."""
    logits = torch.tensor([[0.5, 0.01, 0.01, 0.01, 0.01, 0.01, 0.3, 0.3, 0.01, 0.01, 0.01, 0.01]]).log().repeat(3, 1)
    _, own = best_group_topk(logits.softmax(-1), CHOSEN, 2, 1)
    assert own.max() < 6
    rows = torch.cat([own[:1], own[:1].flip(1), torch.tensor([[6, 7, 8]])])
    differing = torch.zeros(3, dtype=torch.int32)
    replay = LayerReplay(0, best_group_topk)
    with replay.replaying(_Choice(rows.to(torch.uint8), torch.ones(3, 1, dtype=torch.bool), differing)):
        gates, chosen = routed(logits, 2, 1, replay)
    assert differing.tolist() == [0, 0, 1]
    assert torch.equal(chosen.int(), torch.zeros(3, EXPERTS, dtype=torch.int).scatter(1, rows, 1))
    torch.testing.assert_close(gates.gather(1, rows), FACTOR * logits.softmax(-1).gather(1, rows))
    replay.clear()
    with replay.recording():
        routed(logits, 2, 1, replay)
    assert replay.recorded is not None and torch.equal(replay.recorded, own)
