"""The kernels for a GPU, in Triton's interpreter on the host: near those for a CPU, and the same bits in any cut.

The interpreter knows no products of bfloat16, so that these are computed in float32. What the compiler makes of the
kernels, tests/gpu_branch/test_exact_kernels.py sees.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_retool.exact import kernels, operators

Compute = Callable[..., Tensor]


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def _computed(name: str, operands: list[Any], shape: tuple[int, ...]) -> Tensor:
    from megatron_retool.exact import gpu_kernels

    out = torch.full(shape, torch.nan)
    getattr(gpu_kernels, name)(*operands, out)
    return out


def _walked(name: str, operands: list[Any], states: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """What the kernel reads of the states, and the states behind its texts."""
    from megatron_retool.exact import gpu_kernels

    out = torch.full(operands[VALUE[name]].shape, torch.nan)
    getattr(gpu_kernels, name)(*operands, states, *rest, out)
    return out, states


VALUE = {"delta_rule": 2, "state_space": 0}


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    pytest.importorskip("triton", reason="torch's build for CPUs comes without Triton")
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=_interpret) as process:
        yield process


@pytest.fixture(scope="module")
def compute(interpreter: ProcessPoolExecutor) -> Compute:
    """``compute(name, operands, shape)``: what the kernel fills a tensor of this shape with."""
    return lambda *args: interpreter.submit(_computed, *args).result()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hold(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("rows", "length", "columns"), [(70, 33, 65), (1, 100, 7), (5, 32, 64)])
def test_products(rows: int, length: int, columns: int, compute: Compute) -> None:
    x, weight = normal(rows, length), normal(columns, length, seed=1) / length**0.5
    found = compute("products", [x, weight], (rows, columns))
    hold(found, operators.linear(x, weight))
    assert torch.equal(found[-1:], compute("products", [x[-1:].contiguous(), weight], (1, columns)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [48, 1500])
def test_rows(size: int, dtype: torch.dtype, compute: Compute) -> None:
    """Norm, activation, sigmoid and normaliser, each of a row."""
    x, weight = normal(6, 2 * size).to(dtype), normal(2 * size, seed=1).to(dtype)
    cases: list[tuple[str, list[Any], tuple[int, ...], Tensor]] = [
        ("normalized", [weight, 1e-6], (2 * size,), operators._normalized(x, weight, 1e-6)),
        ("gated", [], (size,), operators.silu_and_multiply(x.float())),
        ("gelu_gated", [], (size,), operators.gelu_and_multiply(x.float())),
    ]
    if dtype == torch.float32:
        cases += [
            ("sigmoids", [], (2 * size,), operators.sigmoid(x)),
            ("log_normalizers", [], (2,), torch.stack(operators.log_normalizers(x), 1)),
        ]
        hold(compute("exponentials", [operators.log_softmax(x)], (6, 2 * size)), operators.probabilities(x))
    for name, rest, shape, expected in cases:
        found = compute(name, [x, *rest], (6, *shape))
        hold(found, expected)
        assert torch.equal(found[2:3], compute(name, [x[2:3].contiguous(), *rest], (1, *shape)))


def test_rotation(compute: Compute) -> None:
    x, cos, sin = normal(9, 3, 20), normal(9, 8, seed=1), normal(9, 8, seed=2)
    hold(compute("rotated", [x, cos, sin], (9, 3, 20)), operators.rotate(x, cos, sin))
    hold(compute("rotated", [x[..., :16].contiguous(), cos, sin], (9, 3, 16)), operators.rotate(x[..., :16], cos, sin))


@pytest.mark.parametrize(
    ("heads", "groups", "size", "width"), [(4, 4, 12, 12), (6, 2, 20, 20), (4, 1, 72, 64), (20, 1, 72, 64)]
)
@pytest.mark.parametrize("window", [None, 10])
def test_attention(heads: int, groups: int, size: int, width: int, window: int | None, compute: Compute) -> None:
    """Texts of 41, 1 and 7 tokens, whose keys lie scattered; then each query by itself."""
    lengths = torch.tensor([41, 1, 7])
    tokens = int(lengths.sum())
    slots = torch.randperm(2 * tokens, generator=torch.Generator().manual_seed(3))[:tokens].int()
    query = normal(tokens, heads, size)
    keys, values = normal(2 * tokens, groups, size, seed=1), normal(2 * tokens, groups, width, seed=2)
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    counts = torch.arange(tokens) - starts + 1
    if window is not None:
        starts, counts = operators.last_keys(starts, counts, window)
    found = compute("attended", [query, keys, values, slots, starts, counts, 0.3], (tokens, heads, width))
    hold(found, operators.attention(query, keys, values, slots, starts, counts, 0.3))
    for row in (0, 30, 40, 41, 48):
        own = [query[row : row + 1].contiguous(), keys, values, slots, starts[row : row + 1], counts[row : row + 1]]
        assert torch.equal(found[row : row + 1], compute("attended", [*own, 0.3], (1, heads, width)))


@pytest.mark.parametrize("experts", [5, 16])
def test_gates(experts: int, compute: Compute) -> None:
    logits = normal(7, experts)
    taken = operators.top_experts(logits, 3)
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, taken, True)
    for over_all in (True, False):
        found = compute("gates_of", [logits, chosen, over_all], (7, experts))
        hold(found, operators.expert_gates(logits, taken, not over_all))
    scores = operators.sigmoid(logits)
    found = compute("shares_of", [scores, chosen], (7, experts))
    hold(found, operators.expert_gates(scores, taken, True, "sigmoid"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_convolution(dtype: torch.dtype, compute: Compute) -> None:
    """Of two lines of 130 tokens; then of the last one by itself."""
    known, weight, bias = normal(2, 5, 133).to(dtype), normal(5, 4, seed=1).to(dtype), normal(5, seed=2).to(dtype)
    found = compute("convolved", [known, weight, bias], (2, 5, 130))
    expected = torch.full((2, 5, 130), torch.nan)
    kernels.convolved(*map(operators._array, (known, weight, bias, expected)))
    hold(found, expected)
    last = compute("convolved", [known[..., -4:].contiguous(), weight, bias], (2, 5, 1))
    assert torch.equal(found[..., -1:], last)


def test_rates(interpreter: ProcessPoolExecutor) -> None:
    """Of steps so small that 1 + exp(step) is 1 in float64, and so large that softplus leaves them as they are."""
    steps, logits = 40 * normal(9, 3), normal(9, 3, seed=1)
    factors, bias = normal(3, seed=2), normal(3, seed=3)
    found = interpreter.submit(_rates, steps, logits, factors, bias).result()
    for ours, theirs in zip(found, operators.delta_net_rates(steps, logits, factors, bias), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=0)


def _rates(steps: Tensor, logits: Tensor, factors: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    from megatron_retool.exact import gpu_kernels

    log_decays, betas = torch.empty_like(steps), torch.empty_like(steps)
    gpu_kernels.rates(steps, logits, factors, bias, log_decays, betas)
    return log_decays, betas


LENGTHS = (7, 1, 12)


@pytest.mark.parametrize("name", VALUE)
def test_memories(name: str, interpreter: ProcessPoolExecutor) -> None:
    """Three texts in slots of their own, with two groups of heads; then the last one in two parts."""
    tokens, heads, groups, size, length = sum(LENGTHS), 4, 2, 40, 12
    value, vectors = normal(tokens, heads, size), [normal(tokens, groups, length, seed=each) for each in (1, 2)]
    before = normal(5 * heads * size, length, seed=3)
    slots, starts = torch.tensor([3, 0, 4]), torch.tensor([0, 7, 8, 20])
    numbers = [normal(tokens, heads, seed=each) for each in (4, 5)]
    if name == "delta_rule":
        operands: list[Any] = [*vectors, value, -numbers[0].abs(), operators.sigmoid(numbers[1]), 1e-6]
    else:
        of_heads = [normal(heads, seed=each) for each in (6, 7, 8)]
        operands = [value, numbers[0], -of_heads[0].abs(), *of_heads[1:], *vectors]
    of_tokens = [each for each, x in enumerate(operands) if isinstance(x, Tensor) and len(x) == tokens]

    def walk(states: Tensor, slots: Tensor, starts: Tensor, first: int = 0, end: int = tokens) -> tuple[Tensor, Tensor]:
        own = [x[first:end].contiguous() if each in of_tokens else x for each, x in enumerate(operands)]
        # The other process has the same memory, and changes the states in it.
        return interpreter.submit(_walked, name, own, states.clone(), slots, starts).result()

    found, behind = walk(before, slots, starts)
    expected, states = torch.full(value.shape, torch.nan), before.clone()
    getattr(kernels, name)(*map(operators._array, (*operands, states, slots, starts, expected)))
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(behind, states, rtol=2e-5, atol=2e-5)
    assert torch.equal(behind.view(5, -1)[[1, 2]], before.view(5, -1)[[1, 2]])
    part = before
    for first, end in ((8, 13), (13, 20)):
        read, part = walk(part, slots[2:], torch.tensor([0, end - first]), first, end)
        assert torch.equal(read, found[first:end])
    assert torch.equal(part.view(5, -1)[4], behind.view(5, -1)[4])


def test_what_kernels_get_begins_where_what_torch_allocates_begins() -> None:
    """Where it begins decides the layout over threads, and the layout the order of sums."""
    rows = normal(4, 7).bfloat16()
    for each in (rows, rows[1:], rows[:, 1:]):
        aligned = operators._aligned(each)
        assert aligned.is_contiguous() and aligned.data_ptr() % 16 == 0 and torch.equal(aligned, each)
    assert operators._aligned(rows).data_ptr() == rows.data_ptr()
