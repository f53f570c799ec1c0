"""The chunked gated delta rule against its recurrence in float64, and against transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_retool.learner.delta_rule import CHUNK, gated_delta_rule
from megatron_retool.parity.admission.recurrences import delta_rule
from megatron_retool.planning.activations import DELTA_CHUNK

KEY_HEADS, SHARE, KEY_DIM, VALUE_DIM = 2, 3, 8, 12


def recurrence(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Token by token, number by number: S <- e^g S;  S <- S + k beta (v - S^T k)^T;  o = S^T q / sqrt(d_k)."""
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query, key = (x.repeat_interleave(SHARE, 2) for x in (query, key))
    out = []
    state = value.new_zeros(value.size(0), KEY_HEADS * SHARE, KEY_DIM, VALUE_DIM)
    for t in range(value.size(1)):
        state = log_decay[:, t, :, None, None].exp() * state
        said = torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        change = beta[:, t, :, None] * (value[:, t] - said)
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], change)
        out.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]) / KEY_DIM**0.5)
    return torch.stack(out, 1)


def inputs(length: int, decay: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    heads = KEY_HEADS * SHARE
    query, key = (torch.randn(2, length, KEY_HEADS, KEY_DIM, generator=generator) for _ in range(2))
    value = torch.randn(2, length, heads, VALUE_DIM, generator=generator)
    rates = (torch.rand(2, length, heads, generator=generator) for _ in range(2))
    return [query, key, value, -decay * next(rates), next(rates)]


def with_gradients(rule: Callable[..., Tensor], tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    out = rule(*leaves)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(dtype))]


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative; of what is to be 0 (a single token has nothing to forget) absolute."""
    return float((found - expected).norm() / (expected.norm() or 1.0))


@pytest.mark.parametrize("length", [1, 3, CHUNK, 2 * CHUNK + 7])
@pytest.mark.parametrize("decay", [0.05, 1.0, 20.0])
def test_chunks_are_the_recurrence(length: int, decay: float) -> None:
    """Also where decays are fast, where a difference of sums over a chunk would be off by 7e-6."""
    tensors = inputs(length, decay)
    exact = with_gradients(recurrence, tensors, torch.float64)
    for dtype, bound in ((torch.float32, 2e-6), (torch.float64, 1e-13)):
        for found, expected in zip(with_gradients(gated_delta_rule, tensors, dtype), exact, strict=True):
            assert distance(found, expected) < bound


def test_the_admissions_recurrence_is_this_one() -> None:
    tensors = inputs(30, 1.0)

    def repeated(query: Tensor, key: Tensor, *others: Tensor) -> Tensor:
        return delta_rule(query.repeat_interleave(SHARE, 2), key.repeat_interleave(SHARE, 2), *others)

    for found, expected in zip(
        with_gradients(repeated, tensors, torch.float64),
        with_gradients(recurrence, tensors, torch.float64),
        strict=True,
    ):
        assert distance(found, expected) < 1e-13


def test_transformers_computes_the_same() -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    query, key, value, log_decay, beta = inputs(CHUNK + 20, 1.0)
    expected, _ = torch_chunk_gated_delta_rule(
        query.repeat_interleave(SHARE, 2), key.repeat_interleave(SHARE, 2), value, log_decay, beta,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    torch.testing.assert_close(gated_delta_rule(query, key, value, log_decay, beta), expected, rtol=1e-5, atol=1e-6)


def test_what_comes_later_changes_nothing_earlier_and_gets_no_gradient_from_it() -> None:
    long = [tensor.requires_grad_() for tensor in inputs(CHUNK + 20, 1.0)]
    short = [tensor[:, : CHUNK - 9] for tensor in long]
    out = gated_delta_rule(*long)[:, : CHUNK - 9]
    torch.testing.assert_close(out, gated_delta_rule(*short), rtol=1e-5, atol=1e-6)
    for gradient in torch.autograd.grad(out.sum(), long):
        assert not gradient[:, CHUNK - 9 :].any() and gradient[:, : CHUNK - 9].any()


def test_memory_outlives_chunks() -> None:
    """What the last token reads has a gradient in the first token's value."""
    tensors = inputs(3 * CHUNK, 0.01)
    value = tensors[2].requires_grad_()
    (gradient,) = torch.autograd.grad(gated_delta_rule(*tensors)[:, -1].sum(), value)
    assert float(gradient[:, 0].abs().max()) > 0


def test_the_planner_knows_the_chunk() -> None:
    assert DELTA_CHUNK == CHUNK
