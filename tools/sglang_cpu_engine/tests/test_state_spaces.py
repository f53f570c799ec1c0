"""Mamba-2 token by token against transformers' own function, in every cut and beside any neighbour."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_cpu_engine import mamba

LENGTHS, GROUPS, HEADS, VALUE_SIZE, STATE_SIZE = (7, 1, 20), 2, 4, 8, 12
TOKENS = sum(LENGTHS)
STARTS = torch.tensor([0, *LENGTHS]).cumsum(0).int()


@pytest.fixture
def inputs() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "x": torch.randn(TOKENS, HEADS, VALUE_SIZE),
        "dt": torch.randn(TOKENS, HEADS),
        "write": torch.randn(TOKENS, GROUPS, STATE_SIZE),
        "read": torch.randn(TOKENS, GROUPS, STATE_SIZE),
    }


@pytest.fixture
def weights() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"rates": -torch.rand(HEADS), "D": torch.randn(HEADS), "dt_bias": torch.randn(HEADS)}


def scanned(
    inputs: dict[str, Tensor], weights: dict[str, Tensor], chosen: slice, starts: Tensor, states: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    own: dict[str, Any] = {name: each[None, chosen] for name, each in inputs.items()}
    out = torch.empty_like(own["x"])
    _, behind, _ = mamba.scan(
        **own, **weights, cu_seqlens=starts, initial_states=states, out=out, state_dtype=torch.float32, chunk_size=256
    )
    return out[0], behind


def test_it_is_that_of_transformers(inputs: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan

    found, behind = scanned(inputs, weights, slice(None), STARTS)
    for request, (begin, end) in enumerate(zip(STARTS[:-1].tolist(), STARTS[1:].tolist(), strict=True)):
        x, dt, write, read = (inputs[name][None, begin:end] for name in ("x", "dt", "write", "read"))
        expected, state = mamba2_chunk_scan(
            x, dt, weights["rates"], write, read, chunk_size=8, D=weights["D"], dt_bias=weights["dt_bias"],
            dt_softplus=True, return_final_states=True,
        )  # fmt: skip
        torch.testing.assert_close(found[begin:end], expected[0], rtol=0, atol=5e-6)
        torch.testing.assert_close(behind[request], state[0], rtol=0, atol=5e-6)


def test_every_cut_gives_the_same_bits(inputs: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    """A prefill in two parts; and then token by token, each request in its own slot, beside others."""
    whole, behind = scanned(inputs, weights, slice(None), STARTS)
    last = slice(STARTS[2], STARTS[3])
    first, state = scanned(inputs, weights, slice(STARTS[2], STARTS[2] + 9), torch.tensor([0, 9]))
    rest, state = scanned(inputs, weights, slice(STARTS[2] + 9, STARTS[3]), torch.tensor([0, 11]), state)
    assert torch.equal(torch.cat([first, rest]), whole[last]) and torch.equal(state[0], behind[2])

    slots = torch.zeros(5, HEADS, VALUE_SIZE, STATE_SIZE)
    skip, bias = (weights[name][:, None].expand(-1, VALUE_SIZE) for name in ("D", "dt_bias"))
    rates = weights["rates"][:, None, None].expand(-1, VALUE_SIZE, STATE_SIZE)
    for token in range(LENGTHS[0]):  # of the first request, and those of the last one
        places = torch.tensor([token, STARTS[2] + token])
        x, dt, write, read = (inputs[name][places] for name in ("x", "dt", "write", "read"))
        out = torch.empty_like(x)
        mamba.scan_next(
            slots, x, dt[..., None].expand(-1, -1, VALUE_SIZE), rates, write, read, skip, z=None, dt_bias=bias,
            dt_softplus=True, state_batch_indices=torch.tensor([3, 1], dtype=torch.int32), out=out,
        )  # fmt: skip
        assert torch.equal(out, whole[places])
    assert torch.equal(slots[3], behind[0]) and not slots[[0, 2, 4]].any()
