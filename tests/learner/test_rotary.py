"""Positions that rotate a part of each head: the first features turn, the others pass, gradients too."""

from __future__ import annotations

import pytest
import torch

from megatron_retool.learner.attention import RotaryTable, _Rotary


@pytest.mark.parametrize("rotated", [4, 8])
def test_the_first_features_turn(rotated: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 8, generator=generator, requires_grad=True)
    frequencies = torch.rand(rotated // 2, generator=generator)
    positions = torch.tensor([0, 3, 1, 2, 7])
    cos, sin = RotaryTable(frequencies).at(positions, 8, torch.float32)
    found = _Rotary.apply(x, cos, sin)

    first, rest = x.split([rotated, 8 - rotated], -1)
    turned = torch.complex(*first.chunk(2, -1)) * torch.polar(torch.ones(1), positions[:, None, None] * frequencies)
    expected = torch.cat([turned.real, turned.imag, rest], -1)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn(found.shape, generator=generator)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, upstream)[0] for y in (found, expected)))
