"""The chunked recurrence of Mamba-2 against the plain one in float64, and against transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_retool.learner.delta_rule import CHUNK
from megatron_retool.learner.state_space import state_space
from megatron_retool.parity.admission import recurrences
from tests.learner.test_delta_rule import distance, with_gradients

GROUPS, SHARE, STATE_DIM, VALUE_DIM = 2, 3, 8, 12


def recurrence(value: Tensor, write: Tensor, read: Tensor, log_decay: Tensor, step: Tensor) -> Tensor:
    """Token by token, number by number: S <- e^g S + s b v^T;  o = S^T c."""
    write, read = (x.repeat_interleave(SHARE, 2) for x in (write, read))
    out = []
    state = value.new_zeros(value.size(0), GROUPS * SHARE, STATE_DIM, VALUE_DIM)
    for t in range(value.size(1)):
        added = torch.einsum("bhn,bhv,bh->bhnv", write[:, t], value[:, t], step[:, t])
        state = log_decay[:, t, :, None, None].exp() * state + added
        out.append(torch.einsum("bhnv,bhn->bhv", state, read[:, t]))
    return torch.stack(out, 1)


def inputs(length: int, decay: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    heads = GROUPS * SHARE
    value = torch.randn(2, length, heads, VALUE_DIM, generator=generator)
    write, read = (torch.randn(2, length, GROUPS, STATE_DIM, generator=generator) for _ in range(2))
    log_decay, step = (torch.rand(2, length, heads, generator=generator) for _ in range(2))
    return [value, write, read, -decay * log_decay, step]


@pytest.mark.parametrize("length", [1, 3, CHUNK, 2 * CHUNK + 7])
@pytest.mark.parametrize("decay", [0.05, 1.0, 20.0])
def test_chunks_are_the_recurrence(length: int, decay: float) -> None:
    """Also where decays are fast, where a difference of sums over a chunk would lose digits."""
    tensors = inputs(length, decay)
    exact = with_gradients(recurrence, tensors, torch.float64)
    for dtype, bound in ((torch.float32, 2e-6), (torch.float64, 1e-13)):
        for found, expected in zip(with_gradients(state_space, tensors, dtype), exact, strict=True):
            assert distance(found, expected) < bound


def test_the_admissions_recurrence_is_this_one() -> None:
    tensors = inputs(30, 1.0)
    for found, expected in zip(
        with_gradients(recurrences.state_space, tensors, torch.float64),
        with_gradients(recurrence, tensors, torch.float64),
        strict=True,
    ):
        assert distance(found, expected) < 1e-13


def test_transformers_computes_the_same() -> None:
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan

    value, write, read, _, step = inputs(CHUNK + 20, 1.0)
    rates = -torch.rand(GROUPS * SHARE)
    expected = mamba2_chunk_scan(value, step, rates, write, read, chunk_size=32)
    found = state_space(value, write, read, rates * step, step)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_comes_later_changes_nothing_earlier_and_gets_no_gradient_from_it() -> None:
    long = [tensor.requires_grad_() for tensor in inputs(CHUNK + 20, 1.0)]
    short = [tensor[:, : CHUNK - 9] for tensor in long]
    out = state_space(*long)[:, : CHUNK - 9]
    torch.testing.assert_close(out, state_space(*short), rtol=1e-5, atol=1e-6)
    for gradient in torch.autograd.grad(out.sum(), long):
        assert not gradient[:, CHUNK - 9 :].any() and gradient[:, : CHUNK - 9].any()


def test_memory_outlives_chunks() -> None:
    """What the last token reads has a gradient in the first token's value."""
    tensors = inputs(3 * CHUNK, 0.01)
    value = tensors[0].requires_grad_()
    (gradient,) = torch.autograd.grad(state_space(*tensors)[:, -1].sum(), value)
    assert float(gradient[:, 0].abs().max()) > 0
