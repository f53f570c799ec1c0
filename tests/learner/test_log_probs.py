"""The chunked head against the plain way: values, every gradient, temperature, vocabulary padding, memory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_retool.algorithms.settings import SamplingSettings
from megatron_retool.learner.log_probs import log_probs_and_entropy

ROOT = Path(__file__).parents[2]


def _inputs(tokens: int, vocabulary: int, rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 12, generator=generator, dtype=torch.float64).float()
    weight = torch.randn(rows, 12, generator=generator, dtype=torch.float64).float()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def _plain(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary: int, temperature: float
) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax((hidden @ weight[:vocabulary].T) / temperature, dim=-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


@settings(deadline=None, max_examples=25)
@given(
    tokens=st.integers(1, 40),
    vocabulary=st.integers(2, 50),
    padding=st.integers(0, 9),
    chunk=st.integers(1, 17),
    temperature=st.sampled_from([0.6, 1.0, 1.7]),
    entropy_gradient=st.booleans(),
)
def test_values_and_gradients_equal_the_plain_way(
    tokens: int, vocabulary: int, padding: int, chunk: int, temperature: float, entropy_gradient: bool
) -> None:
    hidden, weight, targets = _inputs(tokens, vocabulary, vocabulary + padding)
    upstream = torch.randn(2, tokens, generator=torch.Generator().manual_seed(1))

    def gradients(log_probs: Tensor, entropy: Tensor) -> tuple[Tensor, ...]:
        loss = (log_probs * upstream[0]).sum()
        if entropy_gradient:
            loss = loss + (entropy * upstream[1]).sum()
        return torch.autograd.grad(loss, (hidden, weight))

    found = log_probs_and_entropy(
        hidden, weight, targets, vocab_size=vocabulary, temperature=temperature, chunk_tokens=chunk
    )
    expected = _plain(hidden, weight, targets, vocabulary, temperature)
    for mine, plain in zip((*found, *gradients(*found)), (*expected, *gradients(*expected)), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sampling", [None, SamplingSettings(temperature=0.7, top_k=5)])
def test_several_targets_of_a_token_are_as_each_by_itself(sampling: SamplingSettings | None) -> None:
    hidden, weight, _ = _inputs(23, 31, 34)
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(0, 31, (23, 3), generator=generator)
    targets[5] = targets[5, 0]  # the same token three times
    upstream = torch.randn(23, 3, generator=generator)
    options = {"vocab_size": 31, "chunk_tokens": 8}
    log_probs, entropy = log_probs_and_entropy(hidden, weight, targets, **options)
    each = [log_probs_and_entropy(hidden, weight, column, **options) for column in targets.T]
    torch.testing.assert_close(log_probs, torch.stack([column for column, _ in each], 1), rtol=0, atol=0)
    assert all(torch.equal(entropy, own) for _, own in each)
    found = torch.autograd.grad((log_probs * upstream).sum() + entropy.sum(), (hidden, weight))
    parts = [(own * weights).sum() for (own, _), weights in zip(each, upstream.T, strict=True)]
    expected = torch.autograd.grad(torch.stack(parts).sum() + each[0][1].sum(), (hidden, weight))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    if sampling is not None:  # no target is filtered out, whatever the others are
        kept, _ = log_probs_and_entropy(hidden, weight, targets, sampling=sampling, **options)
        assert bool(torch.isfinite(kept).all())


def test_padding_rows_get_no_gradient() -> None:
    hidden, weight, targets = _inputs(6, 10, 16)
    log_probs, entropy = log_probs_and_entropy(hidden, weight, targets, vocab_size=10)
    (log_probs.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    assert not weight.grad[10:].any()


def test_weight_gradient_goes_to_the_main_gradient_in_fp32() -> None:
    """bf16 weights: the sum over many chunks is kept in the fp32 buffer, and autograd carries no second copy."""
    hidden, weight, targets = _inputs(512, 30, 30)
    half_hidden, half_weight = (x.detach().bfloat16().requires_grad_() for x in (hidden, weight))
    main_grad = torch.ones(weight.shape)
    log_probs, _ = log_probs_and_entropy(
        half_hidden, half_weight, targets, vocab_size=30, chunk_tokens=2, main_grad=main_grad
    )
    log_probs.sum().backward()
    assert half_weight.grad is None
    plain, _ = _plain(half_hidden.detach().float(), half_weight.float(), targets, 30, 1.0)
    (expected,) = torch.autograd.grad(plain.sum(), half_weight)
    error = (main_grad - 1 - expected.float()).norm() / expected.float().norm()
    assert error < 0.01


def test_fp32_head_multiplies_in_fp32() -> None:
    hidden, weight, targets = _inputs(64, 200, 200)
    half = [x.detach().bfloat16() for x in (hidden, weight)]
    exact, _ = _plain(half[0].float(), half[1].float(), targets, 200, 1.0)
    in_fp32, _ = log_probs_and_entropy(*half, targets, vocab_size=200, fp32_head=True)
    in_bf16, _ = log_probs_and_entropy(*half, targets, vocab_size=200)
    assert (in_fp32 - exact).abs().max() < 1e-5
    assert (in_bf16 - exact).abs().max() > 1e-3


def test_no_tokens() -> None:
    hidden, weight, targets = _inputs(0, 10, 10)
    log_probs, entropy = log_probs_and_entropy(hidden, weight, targets, vocab_size=10)
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.shape == entropy.shape == (0,)
    assert not weight.grad.any()


@pytest.mark.slow
@pytest.mark.parametrize("chunk_tokens", [64])
def test_memory_is_an_eighth_of_the_plain_way(chunk_tokens: int) -> None:
    """The benchmark at a size that fits a test: chunks are the same 1/32 of the tokens."""
    command = [sys.executable, str(ROOT / "benchmarks/log_probs_memory.py"), "--vocabulary=38000", "--tokens=2048"]
    output = subprocess.run(
        [*command, f"--chunk-tokens={chunk_tokens}", "--plain-tokens=1024"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        timeout=120,
    ).stdout
    ratio = float(re.search(r"ratio ([\d.]+)", output)[1])
    assert ratio <= 1 / 8, output
