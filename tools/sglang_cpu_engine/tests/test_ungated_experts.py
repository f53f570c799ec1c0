"""Experts that square their ReLU against their definition, and the float32 product of their router."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_cpu_engine.ungated_experts import experts, register_product

TOKENS, EXPERTS, CHOSEN, HIDDEN, FEATURES = 9, 5, 2, 8, 6


def _layer(scaled: bool) -> SimpleNamespace:
    return SimpleNamespace(
        w13_weight=torch.randn(EXPERTS, FEATURES, HIDDEN),
        w2_weight=torch.randn(EXPERTS, HIDDEN, FEATURES),
        should_fuse_routed_scaling_factor_in_topk=scaled,
    )


def _plain(*_: Any) -> torch.Tensor:
    return torch.full((1,), 7.0)


@pytest.mark.parametrize("scaled", [True, False])
def test_the_sum_is_that_of_the_chosen_experts(scaled: bool) -> None:
    torch.manual_seed(3)
    layer, x = _layer(scaled), torch.randn(TOKENS, HIDDEN)
    chosen = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(TOKENS)])
    chosen[-1] = -1  # fills the batch up
    weights = torch.rand(TOKENS, CHOSEN)
    config = SimpleNamespace(activation="relu2", routed_scaling_factor=2.5)
    found = experts(_plain, layer, x, (weights, chosen, None), config)
    expected = torch.zeros(TOKENS, HIDDEN)
    for token in range(TOKENS - 1):
        for expert, weight in zip(chosen[token], weights[token], strict=True):
            inner = (layer.w13_weight[expert] @ x[token]).clamp(min=0) ** 2
            expected[token] += weight * (layer.w2_weight[expert] @ inner)
    torch.testing.assert_close(found, expected * (1.0 if scaled else 2.5))
    alone = experts(_plain, layer, x[2:3], (weights[2:3], chosen[2:3], None), config)
    torch.testing.assert_close(alone, found[2:3])


def test_gated_experts_stay_sglangs() -> None:
    config = SimpleNamespace(activation="silu", routed_scaling_factor=None)
    assert experts(_plain, None, torch.zeros(1, 1), None, config).item() == 7.0


def test_a_routers_product_is_float32() -> None:
    register_product()
    register_product()
    left, right = torch.randn(3, 64, dtype=torch.bfloat16), torch.randn(64, 5, dtype=torch.bfloat16)
    found = torch.mm(left, right, out_dtype=torch.float32)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, left.float() @ right.float())
