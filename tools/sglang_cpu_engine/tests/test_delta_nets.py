"""Gated delta nets token by token against transformers' own functions, in every cut and beside any neighbour."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_cpu_engine import delta_nets

LENGTHS, KEY_HEADS, HEADS, KEY_SIZE, VALUE_SIZE, WIDTH = (7, 1, 20), 2, 4, 8, 16, 4
FEATURES = 2 * KEY_HEADS * KEY_SIZE + HEADS * VALUE_SIZE
SLOTS = torch.tensor([3, 0, 5], dtype=torch.int32)


def starts_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.fixture
def inputs() -> dict[str, Tensor]:
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    return {
        "q": torch.randn(1, tokens, KEY_HEADS, KEY_SIZE),
        "k": torch.randn(1, tokens, KEY_HEADS, KEY_SIZE),
        "v": torch.randn(1, tokens, HEADS, VALUE_SIZE),
        "g": -torch.rand(1, tokens, HEADS),
        "beta": torch.rand(1, tokens, HEADS),
    }


def states() -> Tensor:
    return torch.zeros(6, HEADS, VALUE_SIZE, KEY_SIZE)


def in_one_call(inputs: dict[str, Tensor], memory: Tensor) -> Tensor:
    places: dict[str, Any] = {"initial_state_indices": SLOTS, "cu_seqlens": starts_of(LENGTHS)}
    return delta_nets.delta_rule(**inputs, initial_state=memory, **places)[0]


def test_the_rule_is_that_of_transformers(inputs: dict[str, Tensor]) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    memory = states()
    found = in_one_call(inputs, memory)
    begin = 0
    for length, slot in zip(LENGTHS, SLOTS.tolist(), strict=True):
        own = {name: each[:, begin : begin + length] for name, each in inputs.items()}
        for name in ("q", "k"):
            own[name] = own[name].repeat_interleave(HEADS // KEY_HEADS, 2)
        expected, state = torch_recurrent_gated_delta_rule(
            own["q"], own["k"], own["v"], g=own["g"], beta=own["beta"], initial_state=None, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        torch.testing.assert_close(found[:, begin : begin + length], expected, rtol=0, atol=2e-6)
        torch.testing.assert_close(memory[slot], state[0].mT, rtol=0, atol=2e-6)
        begin += length
    assert not memory[[1, 2, 4]].any()


def test_every_cut_gives_the_same_bits(inputs: dict[str, Tensor]) -> None:
    memory, cut = states(), states()
    whole = in_one_call(inputs, memory)
    log_a, bias = torch.zeros(HEADS), torch.zeros(HEADS)
    begin = 0
    for length, slot in zip(LENGTHS, SLOTS.tolist(), strict=True):
        for token in range(begin, begin + length):
            own = {name: each[:, token : token + 1] for name, each in inputs.items()}
            place = {"initial_state_indices": torch.tensor([slot]), "cu_seqlens": torch.tensor([0, 1])}
            one = delta_nets.delta_rule(**own, initial_state=cut, **place)[0]
            assert torch.equal(one[:, 0], whole[:, token])
        begin += length
    assert torch.equal(memory, cut)
    g, beta = delta_nets.gates(log_a, torch.tensor([[0.5] * HEADS]), torch.tensor([[-1.0] * HEADS]), bias)
    torch.testing.assert_close(g, -torch.nn.functional.softplus(torch.full((1, 1, HEADS), 0.5)))
    torch.testing.assert_close(beta, torch.full((1, 1, HEADS), 0.26894143))


@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, FEATURES)], ids=["no bias", "bias"])
def test_a_convolution_continues_where_it_was_cut(bias: Tensor | None) -> None:
    torch.manual_seed(1)
    tokens = sum(LENGTHS)
    x, weight = torch.randn(FEATURES, tokens), torch.randn(FEATURES, WIDTH)
    kept = torch.randn(6, FEATURES, WIDTH - 1)
    how: dict[str, Any] = {"activation": "silu", "conv_states": kept, "cache_indices": SLOTS}
    fresh = torch.zeros(len(LENGTHS), dtype=torch.bool)
    whole = delta_nets.convolve_prefill(
        x, weight, bias, has_initial_state=fresh, query_start_loc=starts_of(LENGTHS), **how
    )
    begin = 0
    for length in LENGTHS:
        own = x[None, :, begin : begin + length]
        expected = torch.nn.functional.conv1d(own, weight[:, None], bias, padding=WIDTH - 1, groups=FEATURES)
        expected = torch.nn.functional.silu(expected[0, :, :length])
        torch.testing.assert_close(whole[:, begin : begin + length], expected, rtol=0, atol=2e-6)
        begin += length
    # The same tokens, the first of them by a prefill in two parts and the last one by one.
    parts, before = torch.zeros(6, FEATURES, WIDTH - 1), kept.clone()
    how["conv_states"] = parts
    first, rest = (3, 1, 11), (2, 0, 5)
    begins = starts_of(LENGTHS).tolist()
    for lengths, offset, begun in ((first, (0, 0, 0), False), (rest, first, True)):
        chosen = [x[:, b + o : b + o + n] for b, o, n in zip(begins, offset, lengths, strict=False)]
        found = delta_nets.convolve_prefill(
            torch.cat(chosen, 1), weight, bias,
            has_initial_state=torch.full((3,), begun), query_start_loc=starts_of(lengths), **how,
        )  # fmt: skip
        for b, o, n, part in zip(begins, offset, lengths, found.split(lengths, 1), strict=False):
            assert torch.equal(part, whole[:, b + o : b + o + n])
    for number, length in enumerate(LENGTHS):
        for token in range(first[number] + rest[number], length):
            one = slice(number, number + 1)
            found = delta_nets.convolve_next(
                x[None, :, begins[number] + token], parts, weight, bias, "silu", conv_state_indices=SLOTS[one]
            )
            assert torch.equal(found[0], whole[:, begins[number] + token])
    assert torch.equal(parts[SLOTS.long()], before[SLOTS.long()])


@pytest.mark.parametrize("heads", [4, 32, 48])
def test_gates_do_not_depend_on_neighbours(heads: int) -> None:
    """Their number decides which elements torch computes by whole vectors."""
    torch.manual_seed(3)
    (a, b), (log_a, bias) = torch.randn(2, 37, heads), torch.randn(2, heads)
    whole = delta_nets.gates(log_a, a, b, bias)
    for token in range(37):
        own = delta_nets.gates(log_a, a[token : token + 1], b[token : token + 1], bias)
        assert all(torch.equal(one[0, 0], every[0, token]) for one, every in zip(own, whole, strict=True))


def test_heads_are_normed_beside_their_gates() -> None:
    torch.manual_seed(2)
    heads, size = 3, 8
    q_gate, k, weights = torch.randn(5, heads * 2 * size), torch.randn(5, size), torch.randn(2, size)
    query, key, gate = delta_nets.heads_normed_beside_gates(q_gate, k, *weights, 1e-6, size, heads)
    wanted_query, wanted_gate = q_gate.view(5, heads, 2 * size).chunk(2, -1)
    norm = torch.nn.functional.rms_norm
    torch.testing.assert_close(query.view(5, heads, size), norm(wanted_query, (size,), 1 + weights[0], 1e-6))
    torch.testing.assert_close(key, norm(k, (size,), 1 + weights[1], 1e-6))
    assert torch.equal(gate, wanted_gate)
